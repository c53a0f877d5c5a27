/* The bodies for 64-bit ARM, where NEON is always there. */
#if defined(__aarch64__)
#include "isa_neon.h"
#include "large_body.h"
#include "small_body.h"

namespace linear {
const Bodies kNeonBodies = {small_rows<Neon>, large_rows<Neon>, 24};
}
#endif
