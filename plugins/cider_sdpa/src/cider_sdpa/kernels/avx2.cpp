/* The bodies for AVX2; this file alone is compiled with -mavx2 -mfma -mf16c. */
#include "isa_avx2.h"
#include "large_body.h"
#include "small_body.h"
#include "write_body.h"

namespace cider {
const Bodies kAvx2Bodies = {small_rows<Avx2>, large_rows<Avx2>, write_rows<Avx2>};
}
