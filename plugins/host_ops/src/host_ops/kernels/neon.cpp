/* The kernels for 64-bit ARM, where NEON is always there. */
#if defined(__aarch64__)
#include "isa_neon.h"
#include "elementwise_body.h"
#include "norms_body.h"
#include "reduce_body.h"
#include "rope_body.h"

namespace host_ops {
const Bodies kNeonBodies = {
    rms_norm<Neon>, residual_rms_norm<Neon>, layer_norm<Neon>, rope<Neon>,
    activate<Neon>, logsumexp<Neon>, softmax<Neon>, argmax<Neon>};
}
#endif
