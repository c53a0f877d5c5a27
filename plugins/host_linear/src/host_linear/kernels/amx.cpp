/* bfloat16 weights by tile products; this file alone is compiled with -mamx-tile and -mamx-bf16. */
#include "amx_body.h"

namespace linear {
const Bodies kAmxBodies = {tile_rows, tile_rows, kSmallRows};
}
