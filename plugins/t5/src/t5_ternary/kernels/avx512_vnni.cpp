/* The bodies for AVX-512 with VNNI and VBMI; this file alone is compiled with their flags. */
#include "isa_avx512.h"
#include "qmm_body.h"
#include "qmv_body.h"
#include "vnni_body.h"

namespace t5 {
const Bodies kVnniBodies = {vnni_small_rows, large_rows<Avx512>};
}
