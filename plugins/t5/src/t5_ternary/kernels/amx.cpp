/* The bodies for AMX-INT8 and what such processors have besides; this file alone is compiled with their flags. */
#include "amx_body.h"

namespace t5 {
const Bodies kAmxBodies = {vnni_small_rows, amx_large_rows};
}
