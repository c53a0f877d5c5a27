/* y = x @ W.T (+ bias) for many rows of x: the blocked product of accel/gemm.h over t5 weights.
 *
 * Rows       Any; meant for more than 16. Not row-invariant: the bits of a row may depend on how many rows there are.
 *            They do not depend on the number of threads.
 * Exactness  rounding; weight = scale * (digit - 1) is exact in float32.
 * Method     Columns of the output lie in the lanes: byte b of a lane-full of rows side by side gives five vectors of
 *            weights.
 */
#ifndef T5_QMM_BODY_H
#define T5_QMM_BODY_H

#include "problem.h"

namespace t5 {
namespace {

template <class Isa>
struct Decode {
  const Problem* p;

  void operator()(int64_t n0, int64_t columns, int64_t wide, int64_t k0, int64_t depth, float* out) const {
    using W = typename Isa::Wide;
    constexpr int L = W::kLanes, panel = W::kVectors * L;
    const int64_t group = p->group, bytes = group / 64 * kChunkBytes, groups = depth / group, g0 = k0 / group;
    alignas(64) uint8_t side[2 * kChunkBytes * L + 64];
    alignas(64) float scales[L][16], scale[accel_gemm::kDepth / 64][L];
    for (int64_t c = 0; c < wide; c += L) {
      for (int l = 0; l < L; ++l) {
        const int64_t row = n0 + least(c + l, columns - 1);
        load_floats<Isa>(p->scales, row * p->s_stride[0] + g0 * p->s_stride[1], p->s_stride[1], p->s_dtype, scales[l],
                         groups);
        for (int64_t g = 0; g < groups; ++g) scale[g][l] = scales[l][g];
      }
      float* to = out + c / panel * panel * depth + c % panel;
      for (int64_t g = 0; g < groups; ++g) {
        for (int l = 0; l < L; ++l) {
          const uint8_t* from = p->w + (n0 + least(c + l, columns - 1)) * p->w_stride + (g0 + g) * bytes;
          for (int64_t b = 0; b < bytes; ++b) side[b * L + l] = from[b];
        }
        const typename W::F s = W::load(scale[g]);
        for (int64_t b = 0; b < bytes; ++b) {
          typename W::F digits[5];
          W::digits(side + b * L, digits);
          for (int64_t i = 0; i < 5 && 5 * b + i < group; ++i) W::store(to + (5 * b + i) * panel, W::mul(s, digits[i]));
        }
        to += group * panel;
      }
    }
  }
};

template <class Isa>
void large_rows(const Problem& p) {
  const accel_gemm::Product product = {p.call, p.rows, p.n, p.k, p.x, p.bias, p.y, p.y_dtype};
  accel_gemm::run<Isa>(product, Decode<Isa>{&p});
}

}  // namespace
}  // namespace t5
#endif
