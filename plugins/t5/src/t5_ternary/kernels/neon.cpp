/* The bodies for 64-bit ARM, where NEON is always there. */
#if defined(__aarch64__)
#include "isa_neon.h"
#include "qmm_body.h"
#include "qmv_body.h"

namespace t5 {
const Bodies kNeonBodies = {small_rows<Neon>, large_rows<Neon>};
}
#endif
