/* The kernels for AVX2, FMA and F16C; this file alone is compiled with -mavx2 -mfma -mf16c. */
#include "isa_avx2.h"
#include "elementwise_body.h"
#include "norms_body.h"
#include "reduce_body.h"
#include "rope_body.h"

namespace host_ops {
const Bodies kAvx2Bodies = {
    rms_norm<Avx2>, residual_rms_norm<Avx2>, layer_norm<Avx2>, rope<Avx2>,
    activate<Avx2>, logsumexp<Avx2>, softmax<Avx2>, argmax<Avx2>};
}
