/* The bodies for AVX-512; this file alone is compiled with its flags. */
#include "isa_avx512.h"
#include "qmm_body.h"
#include "qmv_body.h"

namespace t5 {
const Bodies kAvx512Bodies = {small_rows<Avx512>, large_rows<Avx512>};
}
