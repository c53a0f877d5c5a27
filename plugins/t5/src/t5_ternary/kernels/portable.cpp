/* The bodies for any processor. */
#include "isa_portable.h"
#include "qmm_body.h"
#include "qmv_body.h"

namespace t5 {
const Bodies kPortableBodies = {small_rows<Portable>, large_rows<Portable>};
}
