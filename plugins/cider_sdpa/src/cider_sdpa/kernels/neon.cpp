/* The bodies for 64-bit ARM, where NEON is always there. */
#if defined(__aarch64__)
#include "isa_neon.h"
#include "large_body.h"
#include "small_body.h"
#include "write_body.h"

namespace cider {
const Bodies kNeonBodies = {small_rows<Neon>, large_rows<Neon>, write_rows<Neon>};
}
#endif
