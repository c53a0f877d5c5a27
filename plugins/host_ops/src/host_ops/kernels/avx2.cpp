/* The kernels for AVX2, FMA and F16C; this file alone is compiled with -mavx2 -mfma -mf16c. */
#include "isa_avx2.h"
#include "norms_body.h"
#include "rope_body.h"

namespace host_ops {
const Bodies kAvx2Bodies = {rms_norm<Avx2>, rope<Avx2>};
}
