/* The bodies for any processor. */
#include "isa_portable.h"
#include "large_body.h"
#include "small_body.h"

namespace linear {
const Bodies kPortableBodies = {small_rows<Portable>, large_rows<Portable>, 16};
}
