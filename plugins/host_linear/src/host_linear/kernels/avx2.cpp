/* The bodies for AVX2, FMA and F16C; this file alone is compiled with -mavx2 -mfma -mf16c. */
#include "isa_avx2.h"
#include "large_body.h"
#include "small_body.h"

namespace linear {
const Bodies kAvx2Bodies = {small_rows<Avx2>, large_rows<Avx2>, 24};
}
