/* The kernels for any processor. */
#include "isa_portable.h"
#include "elementwise_body.h"
#include "norms_body.h"
#include "reduce_body.h"
#include "rope_body.h"

namespace host_ops {
const Bodies kPortableBodies = {
    rms_norm<Portable>, residual_rms_norm<Portable>, layer_norm<Portable>, rope<Portable>,
    activate<Portable>, logsumexp<Portable>, softmax<Portable>, argmax<Portable>};
}
