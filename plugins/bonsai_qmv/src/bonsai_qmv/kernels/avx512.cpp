/* The bodies for AVX-512; this file alone is compiled with -mavx512{f,bw,dq,vl}. */
#include "isa_avx512.h"
#include "qmm_body.h"
#include "qmv_body.h"

namespace bonsai {
const Bodies kAvx512Bodies = {small_rows<Avx512>, large_rows<Avx512>, NULL};
}
