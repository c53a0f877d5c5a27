/* What the fixed-point kernels of 1..16 rows share: units of sixteen rows of W, the way through their strips, the order
 * of sums, and the end of them.
 *
 * Exactness  rounding. x enters as fixed point of 24 bits (planes.h), v * unit. For each group g of a row of W
 *
 *              T = sum of (digit - 1) * v         an exact integer below 2^31, rounded once to float32
 *              sum[g % 4] = fma(T, scale, sum[g % 4])
 *
 *            in the order of the groups, and y = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * unit (+ bias). All kernels
 *            do so and give the same bits (tests/test_order.py has it in numpy).
 * Rows       Independent of each other, whatever other rows, outputs or threads there are.
 */
#ifndef T5_FEW_ROWS_H
#define T5_FEW_ROWS_H

#include <accel/lines.h>
#include <math.h>

#include "planes.h"

namespace t5 {
namespace {

/* Outputs of a unit. */
constexpr int64_t kOutputs = 16;
/* Bytes to fetch ahead: far enough for memory to answer, by the second-level cache, which has room for more requests
 * than the first, and from there in time. */
constexpr int64_t kFar = 16384, kNear = 192;
/* Groups whose scales are brought into lanes at a time. */
constexpr int kLaneGroups = 16;

struct FewJob {
  const Problem* p;
  const Rows* x;
  int64_t grain, pieces, lanes; /* units per piece; how many pieces, and threads that take them in turns */
  int64_t far;                  /* bytes from what is read to what is fetched */
  accel_task run;               /* units begin ... end */
  const void* more;             /* what else this one needs */
};

/* Strips one after the other, across the ends of units; the last of a row may have fewer groups. */
template <int SIZE>
struct Walk {
  const Problem& p;
  const int64_t bytes, full, far, turn, end;
  int64_t unit, byte;
  const uint8_t* w[kOutputs];
  alignas(64) uint8_t ragged[kOutputs][64];

  Walk(const FewJob& job, int64_t begin, int64_t end)
      : p(*job.p), bytes(p.k / 64 * kChunkBytes), full(bytes / kStripBytes * kStripBytes), far(job.far),
        turn(kOutputs * p.w_stride - full), end(end), unit(begin), byte(0) {
    rows();
  }
  void rows() {
    for (int r = 0; r < kOutputs; ++r) w[r] = p.w + least(unit * kOutputs + r, p.n - 1) * p.w_stride;
  }
  inline __attribute__((always_inline)) void next(Strip<SIZE>& strip) {
    if (byte < full) {
      strip.load(w, byte, byte + kNear + (byte + kNear < full ? 0 : turn), byte + far);
      byte += kStripBytes;
      if (byte < bytes) return;
    } else {
      const __mmask64 have = ((__mmask64)1 << (bytes - full)) - 1;
      const uint8_t* from[kOutputs];
      for (int r = 0; r < kOutputs; ++r) {
        _mm512_store_si512(ragged[r], _mm512_maskz_loadu_epi8(have, w[r] + full));
        from[r] = ragged[r];
      }
      strip.load(from, 0, 0, 0);
    }
    byte = 0;
    unit = least(unit + 1, end - 1); /* what comes behind the end is read in vain */
    rows();
  }
};

/* acc += scale * T. */
inline __attribute__((always_inline)) __m512 collected(__m512i hi, __m512i mid, __m512i lo, __m512 scale, __m512 acc) {
  const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(hi, 8), mid);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), lo)), scale, acc);
}

/* y of sixteen outputs; acc: [group % 4][row]. */
inline void finish(const FewJob& job, int64_t n0, const float (*acc)[16]) {
  const Problem& p = *job.p;
  const Rows& x = *job.x;
  const int64_t columns = least(kOutputs, p.n - n0);
  const __mmask16 have = (__mmask16)((1u << columns) - 1);
  __m512 bias = _mm512_setzero_ps();
  if (p.bias) bias = some_floats(p.bias->data, p.bias->dtype, n0 * p.bias->strides[0], p.bias->strides[0], columns);
  for (int m = 0, n = x.count; m < n; ++m, ++acc) {
    const __m512 a = _mm512_add_ps(_mm512_load_ps(acc[0]), _mm512_load_ps(acc[n]));
    const __m512 b = _mm512_add_ps(_mm512_load_ps(acc[2 * n]), _mm512_load_ps(acc[3 * n]));
    __m512 v = _mm512_mul_ps(_mm512_add_ps(a, b), _mm512_set1_ps(x.unit[m]));
    if (p.bias) v = _mm512_add_ps(v, bias);
    accel_lines::store16(p.y, p.y_dtype, x.row[m] * p.n + n0, have, v);
  }
}

/* Threads that take pieces in turns would each read every other piece of W, and what is fetched ahead at the end of a
 * piece would be for somebody else: so that piece i is part i / lanes of stretch i % lanes, and a thread that takes
 * every lanes-th piece reads on where it was. */
inline void few_piece(void* arg, int64_t begin, int64_t) {
  const FewJob& job = *(const FewJob*)arg;
  const int64_t i = begin / job.grain, length = job.pieces / job.lanes, longer = job.pieces % job.lanes;
  const int64_t lane = i % job.lanes, first = lane * length + least(lane, longer) + i / job.lanes;
  job.run(arg, first * job.grain, least((first + 1) * job.grain, ceil_div(job.p->n, kOutputs)));
}

inline void run_few(const Problem& p, const Rows& x, accel_task run, const void* more) {
  const int64_t units = ceil_div(p.n, kOutputs), wanted = count_pieces(p), unit_bytes = kOutputs * p.w_stride;
  FewJob job = {};
  job.p = &p;
  job.x = &x;
  job.grain = ceil_div(units, wanted < 1 ? 1 : wanted);
  job.pieces = ceil_div(units, job.grain);
  job.lanes = p.call->threads;
  job.far = unit_bytes > 0 ? unit_bytes * ceil_div(kFar, unit_bytes) : 0; /* whole units: each line is asked for once */
  job.run = run;
  job.more = more;
  if (job.pieces < 2 || p.call->threads < 2) {
    run(&job, 0, units);
  } else {
    accel_parallel_for(p.call, units, job.grain, few_piece, &job);
  }
}

}  // namespace
}  // namespace t5
#endif
