/* t5_facts: what is known about the weights of a layer before it is used, for the fixed-point kernels.
 *
 * Output     0  spread: root mean square over mean of the weights' magnitudes, of the row of W where that is largest:
 * by
 *               how much rounding errors of x count for more than a weight's size would say. Infinite if a scale is not
 *               finite
 *            1  zeros: the share of weights of zero, of the row where it is largest
 * Exactness  Estimates, from up to kSampled groups of each row.
 */
#ifndef T5_FACTS_H
#define T5_FACTS_H

#include <math.h>

#include "problem.h"

namespace t5 {
namespace {

constexpr int64_t kSampled = 8;

/* Digits of a byte that are not 1; the first three, four and all five. */
struct NotOne {
  uint8_t count[3][256];
  constexpr NotOne() : count() {
    for (int v = 0; v < 256; ++v) {
      int rest = v;
      for (int i = 0; i < 5; ++i, rest /= 3) {
        for (int t = 0; t < 3; ++t) count[t][v] = (uint8_t)(count[t][v] + (i < 3 + t && rest % 3 != 1));
      }
    }
  }
};
constexpr NotOne kNotOne{};

struct FactsJob {
  const Problem* p;
  float *spread, *zeros; /* per row */

  static void run(void* arg, int64_t begin, int64_t end) {
    const FactsJob& job = *(const FactsJob*)arg;
    const Problem& p = *job.p;
    const int64_t groups = p.k / p.group, step = ceil_div(groups, kSampled), bytes = p.group / 64 * kChunkBytes;
    const uint8_t* last = kNotOne.count[p.group == 64 ? 1 : 0];
    for (int64_t r = begin; r < end; ++r) {
      double size = 0, square = 0;
      int64_t seen = 0, nonzero = 0;
      bool finite = true;
      for (int64_t g = 0; g < groups; ++g) {
        const float s = accel_load_float(p.scales, r * p.s_stride[0] + g * p.s_stride[1], p.s_dtype);
        finite = finite && fabsf(s) < INFINITY;
        if (g % step != r % step) continue; /* other groups in each row; there is one, since step <= groups */
        const uint8_t* w = p.w + r * p.w_stride + g * bytes;
        int64_t count = last[w[bytes - 1]];
        for (int64_t b = 0; b < bytes - 1; ++b) count += kNotOne.count[2][w[b]];
        size += fabs((double)s) * (double)count;
        square += (double)s * (double)s * (double)count;
        nonzero += count;
        seen += p.group;
      }
      job.zeros[r] = 1.0f - (float)nonzero / (float)seen;
      const double spread = square == 0 ? 0 : sqrt(square * (double)seen) / size;
      job.spread[r] = finite && spread == spread ? (float)spread : INFINITY;
    }
  }
};

inline void facts(const Problem& p) {
  float* out = (float*)p.y;
  out[0] = out[1] = 0;
  if (p.n == 0) return;
  FactsJob job = {&p, NULL, NULL};
  job.spread = (float*)accel_scratch(p.call, (size_t)p.n * 2 * sizeof(float));
  if (!job.spread) return;
  job.zeros = job.spread + p.n;
  accel_parallel_for(p.call, p.n, ceil_div(1 << 20, p.k), FactsJob::run, &job);
  for (int64_t r = 0; r < p.n; ++r) {
    if (job.spread[r] > out[0]) out[0] = job.spread[r];
    if (job.zeros[r] > out[1]) out[1] = job.zeros[r];
  }
}

}  // namespace
}  // namespace t5
#endif
