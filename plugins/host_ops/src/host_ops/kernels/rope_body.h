/* Rotary positions. Included once per instruction set.
 *
 * x (..., L, D), frequencies f (dims / 2), dims <= D. At position p = offset + index along L, pair i of a row turns by
 * the angle p * f[i] and grows by the factor a[i], which is 1 if there are no factors:
 *     y1 = a (x1 * cos - x2 * sin),  y2 = a (x1 * sin + x2 * cos)
 * where the pair is (x[2i], x[2i + 1]) if traditional, else (x[i], x[i + dims / 2]). Elements from dims on are copied.
 * Exactness  rounding. The angle and its distance from the next multiple of pi / 2 are made in float64; sine and cosine
 *            of that distance, and the rotation, in float32.
 * Rows       Each depends on itself and its position alone.
 * Method     Sines and cosines of a position are made once and used for all rows (heads, sequences) at it.
 */
#ifndef HOST_OPS_ROPE_BODY_H
#define HOST_OPS_ROPE_BODY_H

#include "blocks.h"

namespace host_ops {
namespace {

/* Pairs whose sines and cosines are made at a time. */
constexpr int64_t kPairs = kBlock / 2;
/* Elements that are worth a second thread, and that it takes at a time. */
constexpr int64_t kRopeWorth = 1 << 15, kRopePiece = 1 << 13;

/* Sines and cosines of position * f[i] for n <= kPairs frequencies. Plain loops, which compilers vectorise. */
inline void sines_and_cosines(double position, const double* f, int64_t n, float* sine, float* cosine) {
  /* Adding and subtracting 1.5 * 2^52 rounds to an integer. pi / 2 comes in parts of 26 bits, so that their products
   * with a number of quarter turns of up to 26 bits are exact. */
  constexpr double kRound = 6755399441055744.0, kQuarters = 0.6366197723675814;
  constexpr double kHigh = 0x1.921fb58p+0, kMiddle = -0x1.dde974p-27, kLow = 0x1.1a62633145c07p-54;
  float distance[kPairs];
  int32_t quarter[kPairs];
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double angle = position * f[i];
    largest = fabs(angle) <= largest ? largest : fabs(angle); /* NaN is kept */
    const double turns = (angle * kQuarters + kRound) - kRound;
    distance[i] = (float)(((angle - turns * kHigh) - turns * kMiddle) - turns * kLow);
    quarter[i] = (int32_t)turns;
  }
  if (!(largest < 1e8)) { /* too many turns for the parts of pi / 2, or not finite */
    for (int64_t i = 0; i < n; ++i) {
      sine[i] = (float)sin(position * f[i]);
      cosine[i] = (float)cos(position * f[i]);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float r = distance[i], s = r * r;
    const float a = r + r * (s * (-0.166666642f + s * (0.0083327461f + s * -0.000195873872f)));
    const float b = (1.0f - 0.5f * s) + s * (s * (0.0416666642f + s * (-0.00138883002f + s * 2.45474366e-05f)));
    const bool odd = quarter[i] & 1;
    const float first = odd ? b : a, second = odd ? a : b;
    sine[i] = quarter[i] & 2 ? -first : first;
    cosine[i] = (quarter[i] + 1) & 2 ? -second : second;
  }
}

/* What a position's turns are: n pairs from pair `begin` on. For halves, cosine and sine per pair; for neighbours,
 * cosine twice and -sine, sine per pair, so that y = x * cosine + swapped x * sine. */
struct Turns {
  alignas(64) float cosine[kBlock], sine[kBlock];
  int64_t begin, n;

  void make(double position, const double* f, const double* a, int64_t from, int64_t count, bool traditional) {
    begin = from;
    n = count;
    sines_and_cosines(position, f + from, count, sine, cosine);
    for (int64_t i = 0; a && i < count; ++i) {
      const float factor = (float)a[from + i];
      sine[i] *= factor;
      cosine[i] *= factor;
    }
    if (!traditional) return;
    for (int64_t i = count - 1; i >= 0; --i) {
      cosine[2 * i] = cosine[2 * i + 1] = cosine[i];
      sine[2 * i + 1] = sine[i];
      sine[2 * i] = -sine[i];
    }
  }
};

/* One row of x and its place in y, in elements. */
struct RopeRow {
  const void* x;
  int64_t from, stride;
  int32_t dtype;
  void* y;
  int64_t to;
};

template <class I>
void turn_neighbours(const RopeRow& r, const Turns& t) {
  using F = typename I::F;
  alignas(64) float in[kBlock], out[kBlock];
  const int64_t first = 2 * t.begin, n = 2 * t.n;
  const float* p = fetch<I>(r.x, r.from + first * r.stride, r.stride, r.dtype, in, n);
  float* q = target(r.y, r.to + first, r.dtype, out);
  map<I>(n, q, [](F x, F c, F s) { return I::fma(x, c, I::swap_pairs(x) * s); }, p, t.cosine, t.sine);
  deliver<I>(q, r.y, r.to + first, r.dtype, n);
}

template <class I>
void turn_halves(const RopeRow& r, const Turns& t, int64_t half) {
  using F = typename I::F;
  alignas(64) float in[2][kPairs], out[2][kPairs];
  const int64_t low = t.begin, high = half + t.begin;
  const float* p1 = fetch<I>(r.x, r.from + low * r.stride, r.stride, r.dtype, in[0], t.n);
  const float* p2 = fetch<I>(r.x, r.from + high * r.stride, r.stride, r.dtype, in[1], t.n);
  float* q1 = target(r.y, r.to + low, r.dtype, out[0]);
  float* q2 = target(r.y, r.to + high, r.dtype, out[1]);
  map<I>(t.n, q1, [](F a, F b, F c, F s) { return I::fma(a, c, -(b * s)); }, p1, p2, t.cosine, t.sine);
  map<I>(t.n, q2, [](F a, F b, F c, F s) { return I::fma(a, s, b * c); }, p1, p2, t.cosine, t.sine);
  deliver<I>(q1, r.y, r.to + low, r.dtype, t.n);
  deliver<I>(q2, r.y, r.to + high, r.dtype, t.n);
}

/* Inputs x, offsets (may be missing; int32 or int64, one or one per sequence, x.shape[0]), frequencies (float64;
 * with factors, a second row of as many). Parameters offset (added to offsets), traditional. */
template <class I>
void rope(const accel_call* call) {
  const Rows x(call->inputs[0]);
  const accel_array* offsets = call->n_inputs > 2 ? call->inputs[1] : NULL;
  const accel_array* table = call->inputs[call->n_inputs - 1];
  const int64_t half = table->shape[table->ndim - 1], length = x.array->shape[x.array->ndim - 2];
  const double *f = (const double*)table->data, *a = table->ndim == 2 ? f + half : NULL;
  const int64_t step = x.array->strides[x.array->ndim - 2];
  const bool traditional = call->params[1].i != 0, each = offsets && offsets->size > 1;
  const int64_t groups = each ? offsets->size : 1, rows = x.rows / length / groups; /* rows per position */
  run(call, groups * length, x.array->size, kRopePiece, kRopeWorth, [&](int64_t begin, int64_t end) {
    Turns turns;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / length, l = item % length;
      int64_t position = call->params[0].i + l;
      if (offsets) {
        const int64_t at = each ? group * offsets->strides[0] : 0;
        position += offsets->dtype == ACCEL_INT32 ? ((const int32_t*)offsets->data)[at]
                                                  : ((const int64_t*)offsets->data)[at];
      }
      for (int64_t pair = 0; pair < half; pair += kPairs) {
        turns.make((double)position, f, a, pair, min64(kPairs, half - pair), traditional);
        const bool last = pair + kPairs >= half;
        for (int64_t row = group * rows; row < (group + 1) * rows; ++row) {
          const RopeRow r = {x.array->data, x.offset(row, 2) + l * step, x.stride, x.array->dtype,
                             call->outputs[0]->data, (row * length + l) * x.n};
          if (traditional) {
            turn_neighbours<I>(r, turns);
          } else {
            turn_halves<I>(r, turns, half);
          }
          if (!last) continue;
          alignas(64) float in[kBlock];
          for (int64_t j = 2 * half; j < x.n; j += kBlock) {
            const int64_t n = min64(kBlock, x.n - j);
            const float* p = fetch<I>(r.x, r.from + j * r.stride, r.stride, r.dtype, in, n);
            if (r.dtype == ACCEL_FLOAT32) memcpy((float*)r.y + r.to + j, p, (size_t)n * sizeof(float));
            deliver<I>(p, r.y, r.to + j, r.dtype, n);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace host_ops
#endif
