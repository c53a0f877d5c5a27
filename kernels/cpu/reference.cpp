#include "reference.h"

#include <algorithm>

#include "accel/kernel.h"
#include "isa.h"
#include "thread_pool.h"

namespace accel::reference {

#define ACCEL_DECLARE(variant)                                                                                 \
  namespace variant {                                                                                          \
  void affine(const Product&, const uint32_t*, const float*, const float*, int, int, int64_t, int64_t);        \
  void dense(const Product&, const void*, Dense, int64_t, int64_t);                                            \
  }
ACCEL_DECLARE(portable)
#if defined(__x86_64__)
ACCEL_DECLARE(avx2)
ACCEL_DECLARE(avx512)
#endif

namespace {

/* Rows per piece: about 64K weights, so that a piece outweighs its hand-out. */
int64_t grain(const Product& p) { return std::max<int64_t>(1, 65536 / std::max<int64_t>(1, p.k)); }

} // namespace

void affine(const Product& p, const uint32_t* w, const float* scales, const float* biases, int bits, int group) {
  auto run = &portable::affine;
#if defined(__x86_64__)
  if (isa_bits() & ACCEL_ISA_AVX512) {
    run = &avx512::affine;
  } else if (isa_bits() & ACCEL_ISA_AVX2) {
    run = &avx2::affine;
  }
#endif
  pool::for_range(p.row_end - p.row_begin, grain(p), [&](int64_t begin, int64_t end) {
    run(p, w, scales, biases, bits, group, begin, end);
  });
}

void dense(const Product& p, const void* w, Dense type) {
  auto run = &portable::dense;
#if defined(__x86_64__)
  if (isa_bits() & ACCEL_ISA_AVX512) {
    run = &avx512::dense;
  } else if (isa_bits() & ACCEL_ISA_AVX2) {
    run = &avx2::dense;
  }
#endif
  pool::for_range(p.row_end - p.row_begin, grain(p), [&](int64_t begin, int64_t end) {
    run(p, w, type, begin, end);
  });
}

} // namespace accel::reference
