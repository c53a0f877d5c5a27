/* The bodies for AVX-512; this file alone is compiled with -mavx512{f,bw,dq,vl}. */
#include "isa_avx512.h"
#include "large_body.h"
#include "small_body.h"
#include "write_body.h"

namespace cider {
const Bodies kAvx512Bodies = {small_rows<Avx512>, large_rows<Avx512>, write_rows<Avx512>};
}
