/* The kernels for any processor. */
#include "isa_portable.h"
#include "norms_body.h"
#include "rope_body.h"

namespace host_ops {
const Bodies kPortableBodies = {rms_norm<Portable>, rope<Portable>};
}
