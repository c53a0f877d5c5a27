/* The bodies for AMX and what such processors have besides. */
#include "isa_avx512.h"
#include "qmm_body.h"
#include "qmv_body.h"
#include "vnni_body.h"
#include "facts_body.h"
#include "amx_rows.h"

namespace bonsai {
const Bodies kAmxBodies = {vnni_small_rows, amx_large_rows, vnni_facts};
}
