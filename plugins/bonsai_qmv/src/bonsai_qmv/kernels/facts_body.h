/* bonsai_affine_facts: what is known about the weights of a layer before it is used, for the fixed-point kernels.
 *
 * Output     Per row of W three float32 numbers:
 *            0  spread: sqrt(mean((scale * (code - center))^2)) / mean(|weight|), by how much rounding errors of x count
 *               for more than a weight's size would say; infinite for a row whose weights cancel
 *            1  1 if bias = -ratio * scale holds bit for bit in every group of the row, else 0
 *            2  ratio, taken from the first scale of the layer that is not zero; the same in every row
 * Exactness  spread is an estimate in float32; 1 and 2 are exact.
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_FACTS_BODY_H
#define BONSAI_QMV_FACTS_BODY_H

#include <math.h>

#include "planes.h"

namespace bonsai {
namespace {

struct FactsJob {
  const Problem* p;
  float ratio;
};

template <int BITS>
void facts_rows(void* arg, int64_t begin, int64_t end) {
  const FactsJob& job = *(const FactsJob*)arg;
  const Problem& p = *job.p;
  const int chunks = p.group / 32;
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* w = p.w + r * p.w_stride;
    double size = 0, square = 0;
    bool symmetric = true;
    for (int64_t g = 0; g < p.k / p.group; ++g) {
      const float s = load_as_float(p.scales, r * p.s_stride[0] + g * p.s_stride[1], p.s_dtype);
      const float b = load_as_float(p.biases, r * p.b_stride[0] + g * p.b_stride[1], p.b_dtype);
      symmetric = symmetric && b == -(job.ratio * s);
      const typename Avx512::template Group<BITS> group(s, b);
      const __m512 offset = _mm512_set1_ps(fmaf((float)kCenter<BITS>, s, b));
      __m512 a = _mm512_setzero_ps(), q = a;
      for (int c = 0; c < chunks; ++c, w += 4 * BITS) {
        const __m512 v0 = group.template weights<0>(w), v1 = group.template weights<1>(w);
        const __m512 d0 = _mm512_sub_ps(v0, offset), d1 = _mm512_sub_ps(v1, offset);
        a = _mm512_add_ps(a, _mm512_add_ps(_mm512_and_ps(v0, magnitude), _mm512_and_ps(v1, magnitude)));
        q = _mm512_fmadd_ps(d1, d1, _mm512_fmadd_ps(d0, d0, q));
      }
      size += _mm512_reduce_add_ps(a);
      square += _mm512_reduce_add_ps(q);
    }
    float* out = (float*)p.y + 3 * r;
    const double spread = square == 0 ? 0 : size > 0 ? sqrt(square * (double)p.k) / size : INFINITY;
    out[0] = spread == spread ? (float)spread : INFINITY;
    out[1] = symmetric;
    out[2] = job.ratio;
  }
}

inline void vnni_facts(const Problem& p) {
  FactsJob job = {&p, 0};
  for (int64_t i = 0; i < p.n * (p.k / p.group); ++i) {
    const int64_t r = i / (p.k / p.group), g = i % (p.k / p.group);
    const float s = load_as_float(p.scales, r * p.s_stride[0] + g * p.s_stride[1], p.s_dtype);
    if (s == 0) continue;
    job.ratio = -load_as_float(p.biases, r * p.b_stride[0] + g * p.b_stride[1], p.b_dtype) / s;
    break;
  }
  const accel_task task = p.bits == 1   ? facts_rows<1>
                          : p.bits == 2 ? facts_rows<2>
                          : p.bits == 4 ? facts_rows<4>
                                        : facts_rows<8>;
  accel_parallel_for(p.call, p.n, ceil_div(262144, p.k), task, &job);
}

}  // namespace
}  // namespace bonsai
#endif
