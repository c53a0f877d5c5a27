/* The bodies for AMX-INT8 and what such processors have besides; this file alone is compiled with their flags. */
#include "amx_body.h"
#include "amx_few_body.h"

namespace t5 {
const Bodies kAmxBodies = {amx_small_rows, amx_large_rows};
}
