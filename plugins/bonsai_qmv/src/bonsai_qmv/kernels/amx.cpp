/* The bodies for AMX and what such processors have besides. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("gfni")
#define BONSAI_GFNI 1 /* the pragma alone does not define __GFNI__ in C++ */
#endif
#include "isa_avx512.h"
#include "qmm_body.h"
#include "qmv_body.h"
#include "vnni_body.h"
#include "facts_body.h"
#include "amx_rows.h"
#include "amx_small_body.h"

namespace bonsai {
const Bodies kAmxBodies = {amx_small_rows, amx_large_rows, vnni_facts};
}
