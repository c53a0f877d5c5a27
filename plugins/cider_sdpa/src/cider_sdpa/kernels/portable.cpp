/* The bodies for any processor. */
#include "isa_portable.h"
#include "large_body.h"
#include "small_body.h"
#include "write_body.h"

namespace cider {
const Bodies kPortableBodies = {small_rows<Portable>, large_rows<Portable>, write_rows<Portable>};
}
