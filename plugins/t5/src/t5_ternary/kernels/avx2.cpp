/* The bodies for AVX2, FMA and F16C; this file alone is compiled with -mavx2 -mfma -mf16c. */
#include "isa_avx2.h"
#include "qmm_body.h"
#include "qmv_body.h"

namespace t5 {
const Bodies kAvx2Bodies = {small_rows<Avx2>, large_rows<Avx2>};
}
