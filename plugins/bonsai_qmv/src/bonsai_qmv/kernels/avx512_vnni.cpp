/* The bodies for AVX-512 with VNNI; this file alone is compiled with -mavx512vnni as well. */
#include "isa_avx512.h"
#include "qmm_body.h"
#include "qmv_body.h"
#include "facts_body.h"
#include "vnni_body.h"

namespace bonsai {
const Bodies kVnniBodies = {vnni_small_rows, large_rows<Avx512>, vnni_facts};
}
