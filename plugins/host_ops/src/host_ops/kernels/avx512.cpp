/* The kernels for AVX-512 (F, BW, DQ, VL); this file alone is compiled for it. */
#include "isa_avx512.h"
#include "elementwise_body.h"
#include "norms_body.h"
#include "reduce_body.h"
#include "rope_body.h"

namespace host_ops {
const Bodies kAvx512Bodies = {
    rms_norm<Avx512>, residual_rms_norm<Avx512>, layer_norm<Avx512>, rope<Avx512>,
    activate<Avx512>, logsumexp<Avx512>, softmax<Avx512>, argmax<Avx512>};
}
