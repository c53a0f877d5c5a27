/* bonsai_affine_facts: what is known about the weights of a layer before it is used, for the fixed-point kernels.
 *
 * Output     Four float32 numbers:
 *            0  spread: sqrt(mean(a^2)) / mean(|weight|) of the row of W where that is largest, a the weights, or scale *
 *               (code - center) where that is more: by how much rounding errors of x count for more than a weight's size
 *               would say; and kOffset / sqrt(k) times the largest |bias + center * scale| over the mean, for the rounding
 *               of sums that cancel. Infinite if it is more than sqrt(k) or weights are not finite. Means are
 *               estimated from up to kSampled groups of each row, from all where those are zeros
 *            1  1 if bias = -ratio * scale holds bit for bit in every group of every row, else 0
 *            2  ratio, taken from the first scale that is not zero
 *            3  zeros: the share of weights below an eighth of their row's mean |weight|, of the row where it is largest
 * Exactness  spread and zeros are estimates; 1 and 2 are exact.
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_FACTS_BODY_H
#define BONSAI_QMV_FACTS_BODY_H

#include <math.h>

#include "planes.h"

namespace bonsai {
namespace {

/* Enough to estimate a mean of magnitudes, little next to the reading of a layer. */
constexpr int64_t kSampled = 8;
/* Three roundings to 2^-24 of the largest x times an offset, in the measure of spread (accel/fixed_point.h: 2^-22 times
 * kSafety * 0.29 times sqrt(k) of the largest x times a weight). */
constexpr float kOffset = 0.52f;

struct FactsJob {
  const Problem* p;
  float ratio;
  float *spread, *zeros; /* per row */
  uint8_t* symmetric;
};

template <int BITS>
void facts_rows(void* arg, int64_t begin, int64_t end) {
  const FactsJob& job = *(const FactsJob*)arg;
  const Problem& p = *job.p;
  const int chunks = p.group / 32;
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
  const int64_t groups = p.k / p.group;
  for (int64_t r = begin; r < end; ++r) {
    auto scale = [&](int64_t g) { return accel_load_float(p.scales, r * p.s_stride[0] + g * p.s_stride[1], p.s_dtype); };
    auto bias = [&](int64_t g) { return accel_load_float(p.biases, r * p.b_stride[0] + g * p.b_stride[1], p.b_dtype); };
    double size = 0, square = 0, whole = 0;
    float most = 0;
    int64_t seen = 0, step = ceil_div(groups, kSampled);
    bool symmetric = true, finite = true, any = false;
    for (int64_t g = 0; g < groups; ++g) {
      const float s = scale(g), b = bias(g), offset = fabsf(fmaf((float)kCenter<BITS>, s, b));
      symmetric = symmetric && b == -(job.ratio * s);
      finite = finite && fabsf(s) < INFINITY && fabsf(b) < INFINITY;
      any = any || s != 0 || b != 0;
      most = offset > most ? offset : most;
    }
    auto look = [&](int64_t g) {
      const float s = scale(g), b = bias(g);
      const uint8_t* w = p.w + r * p.w_stride + g * p.group * BITS / 8;
      const typename Avx512::template Group<BITS> group(s, b);
      const __m512 offset = _mm512_set1_ps(fmaf((float)kCenter<BITS>, s, b));
      __m512 a = _mm512_setzero_ps(), q = a, u = a;
      for (int c = 0; c < chunks; ++c, w += 4 * BITS) {
        const __m512 v0 = group.template weights<0>(w), v1 = group.template weights<1>(w);
        const __m512 d0 = _mm512_sub_ps(v0, offset), d1 = _mm512_sub_ps(v1, offset);
        a = _mm512_add_ps(a, _mm512_add_ps(_mm512_and_ps(v0, magnitude), _mm512_and_ps(v1, magnitude)));
        q = _mm512_fmadd_ps(d1, d1, _mm512_fmadd_ps(d0, d0, q));
        u = _mm512_fmadd_ps(v1, v1, _mm512_fmadd_ps(v0, v0, u));
      }
      size += _mm512_reduce_add_ps(a);
      square += _mm512_reduce_add_ps(q);
      whole += _mm512_reduce_add_ps(u);
      seen += p.group;
    };
    /* Other groups in each row; there is one, since step <= groups. */
    for (int64_t g = r % step; g < groups; g += step) look(g);
    if (size == 0 && any && step > 1) {
      seen = 0;
      step = 1;
      for (int64_t g = 0; g < groups; ++g) look(g);
    }
    /* Once more, now that the mean is known. */
    const __m512 limit = _mm512_set1_ps((float)(size / (double)(8 * seen)));
    int64_t small = 0;
    for (int64_t g = r % step; g < groups; g += step) {
      const uint8_t* w = p.w + r * p.w_stride + g * p.group * BITS / 8;
      const typename Avx512::template Group<BITS> group(scale(g), bias(g));
      for (int c = 0; c < chunks; ++c, w += 4 * BITS) {
        const __m512 v0 = group.template weights<0>(w), v1 = group.template weights<1>(w);
        small += __builtin_popcount(_mm512_cmp_ps_mask(_mm512_and_ps(v0, magnitude), limit, _CMP_LT_OQ));
        small += __builtin_popcount(_mm512_cmp_ps_mask(_mm512_and_ps(v1, magnitude), limit, _CMP_LT_OQ));
      }
    }
    job.zeros[r] = any ? (float)small / (float)seen : 0;
    const double root = sqrt((square > whole ? square : whole) * (double)seen);
    const double more = kOffset / sqrt((double)p.k) * most * (double)seen;
    /* Weights of nothing but zeros are no trouble if they are no sums that cancel. */
    const double spread = size > 0 ? (root + more) / size : square > 0 || most > 0 ? INFINITY : 0;
    /* Beyond that, roundings of sums that cancel are more than the bound by themselves. */
    job.spread[r] = finite && spread * spread <= (double)p.k ? (float)spread : INFINITY;
    job.symmetric[r] = symmetric;
  }
}

inline void vnni_facts(const Problem& p) {
  float* out = (float*)p.y;
  out[0] = out[1] = out[2] = out[3] = 0;
  FactsJob job = {&p, 0, NULL, NULL, NULL};
  job.spread = (float*)accel_scratch(p.call, (size_t)p.n * 2 * sizeof(float));
  job.symmetric = (uint8_t*)accel_scratch(p.call, (size_t)p.n);
  if (!job.spread || !job.symmetric) return;
  job.zeros = job.spread + p.n;
  const int64_t groups = p.k / p.group;
  for (int64_t i = 0; i < p.n * groups; ++i) {
    const float s = accel_load_float(p.scales, i / groups * p.s_stride[0] + i % groups * p.s_stride[1], p.s_dtype);
    if (s == 0) continue;
    const float b = accel_load_float(p.biases, i / groups * p.b_stride[0] + i % groups * p.b_stride[1], p.b_dtype);
    job.ratio = -b / s;
    break;
  }
  const accel_task task = p.bits == 1   ? facts_rows<1>
                          : p.bits == 2 ? facts_rows<2>
                          : p.bits == 3 ? facts_rows<3>
                          : p.bits == 4 ? facts_rows<4>
                          : p.bits == 5 ? facts_rows<5>
                          : p.bits == 6 ? facts_rows<6>
                                        : facts_rows<8>;
  accel_parallel_for(p.call, p.n, ceil_div(262144, p.k), task, &job);
  out[1] = 1;
  out[2] = job.ratio;
  for (int64_t r = 0; r < p.n; ++r) {
    if (job.spread[r] > out[0]) out[0] = job.spread[r];
    if (job.zeros[r] > out[3]) out[3] = job.zeros[r];
    if (!job.symmetric[r]) out[1] = 0;
  }
}

}  // namespace
}  // namespace bonsai
#endif
