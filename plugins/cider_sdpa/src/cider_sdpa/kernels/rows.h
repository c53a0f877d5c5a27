/* What both kernels do with rows of scores: exponentials, masks, weighted sums of values, and writing results.
 * I is an instruction set: sixteen floats in an I::V. Included once per instruction set. */
#ifndef CIDER_SDPA_ROWS_H
#define CIDER_SDPA_ROWS_H

#include <accel/slots.h>

#include "problem.h"

namespace cider {
namespace {

/* e^x for x <= 0 within one unit in the last place; 0 below e^-87 (-inf included), NaN for NaN, exactly 1 for 0.
 * x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by a polynomial whose own error is 2^-28. ln 2 is taken in two parts, of
 * which the first has so few bits that n times it is exact, with or without a fused multiply-add. */
template <class I>
typename I::V exponential(typename I::V x) {
  using V = typename I::V;
  constexpr float limit = -87.0f;
  const V clamped = I::max(I::set1(limit), x);
  const V n = I::nearest(I::mul(clamped, I::set1(1.44269504f)));
  const V r = I::fma(n, I::set1(2.12194440e-4f), I::fma(n, I::set1(-0.693359375f), clamped));
  V t = I::fma(I::set1(0.0013814540579915047f), r, I::set1(0.00836874544620514f));
  t = I::fma(t, r, I::set1(0.04166838899254799f));
  t = I::fma(t, r, I::set1(0.1666652113199234f));
  t = I::fma(t, r, I::set1(0.4999999403953552f));
  t = I::fma(I::mul(r, r), t, r);
  return I::times_power(I::add(t, I::set1(1.0f)), n, x, limit);
}

template <class I>
float exponential_of(float x) {
  alignas(64) float lanes[16];
  I::store(lanes, exponential<I>(I::set1(x)));
  return lanes[0];
}

/* What scores are measured from: their maximum, or 0 where all are -inf, since -inf - -inf is no number. */
inline float base_of(float top) { return top == -kInf ? 0.0f : top; }

/* How many keys row i sees, under the causal mask. */
inline int64_t keys_seen(const Problem& p, int64_t i) {
  return p.kind == kCausal ? max64(0, min64(p.keys, p.keys - p.rows + i + 1)) : p.keys;
}

inline bool is_hidden(const Problem& p, int64_t b, int64_t head, int64_t i, int64_t key) {
  if (p.kind == kCausal) return key >= keys_seen(p, i);
  if (p.kind != kArray || p.mask.dtype != ACCEL_BOOL) return false;
  const int64_t* s = p.mask.stride;
  return !((const uint8_t*)p.mask.data)[b * s[0] + head * s[1] + i * s[2] + key * s[3]];
}

/* The mask of n keys of one row as floats: for bool 1 where a key is hidden and 0 where it is visible, else what is
 * added. Writes up to the next multiple of 16. False: all keys are hidden by a bool mask. */
template <class I>
bool load_mask(const Problem& p, int64_t b, int64_t head, int64_t i, int64_t key, int64_t n, float* out) {
  const int64_t* s = p.mask.stride;
  const int64_t at = b * s[0] + head * s[1] + i * s[2] + key * s[3], step = s[3];
  if (p.mask.dtype == ACCEL_BOOL) {
    const uint8_t* m = (const uint8_t*)p.mask.data + at;
    uint8_t any = 0;
    if (step == 1) {
      for (int64_t j = 0; j < n; ++j) any |= m[j];
      if (!any) return false;
      for (int64_t j = 0; j < n; ++j) out[j] = m[j] ? 0.0f : 1.0f;
    } else {
      for (int64_t j = 0; j < n; ++j) {
        any |= m[j * step];
        out[j] = m[j * step] ? 0.0f : 1.0f;
      }
    }
    return any != 0;
  }
  if (step == 1 && p.mask.dtype == ACCEL_FLOAT32) {
    memcpy(out, (const float*)p.mask.data + at, (size_t)n * sizeof(float));
  } else {
    for (int64_t j = 0; j < n; ++j) out[j] = accel_load_float(p.mask.data, at + j * step, p.mask.dtype);
  }
  return true;
}

template <class I>
typename I::V apply_mask(const Problem& p, typename I::V scores, const float* mask) {
  const typename I::V m = I::load(mask);
  return p.mask.dtype == ACCEL_BOOL ? I::replace(scores, m, -kInf) : I::add(scores, m);
}

/* acc[r][c] = (fresh ? 0 : acc[r][c]) + sum over keys j, in order, of weights[r][j] * v[j][c], for RT rows and CT
 * vectors of 16 columns; of the last vector `last` columns exist if PART. */
template <class I, class T, int RT, int CT, bool PART>
void weigh_tile(const float* weights, int64_t ws, const typename T::Element* v, int64_t vs, int64_t keys, int last,
                float* acc, int64_t as, bool fresh, const Ahead& ahead) {
  using V = typename I::V;
  V sum[RT][CT];
#pragma GCC unroll 8
  for (int r = 0; r < RT; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < CT; ++c) sum[r][c] = fresh ? I::zero() : I::load(acc + r * as + 16 * c);
  }
  for (int64_t j = 0; j < keys; ++j, v += vs, ++weights) {
    if (ahead.at) ahead.fetch(j);
    if constexpr (RT == 1) {
      const V w = I::set1(weights[0]);
#pragma GCC unroll 8
      for (int c = 0; c < CT; ++c) {
        const V value = PART && c == CT - 1 ? I::get_part(T(), v + 16 * c, last) : I::get(T(), v + 16 * c);
        sum[0][c] = I::fma(w, value, sum[0][c]);
      }
    } else if constexpr (RT <= CT) {
      V w[RT];
#pragma GCC unroll 8
      for (int r = 0; r < RT; ++r) w[r] = I::set1(weights[r * ws]);
#pragma GCC unroll 8
      for (int c = 0; c < CT; ++c) {
        const V value = PART && c == CT - 1 ? I::get_part(T(), v + 16 * c, last) : I::get(T(), v + 16 * c);
#pragma GCC unroll 8
        for (int r = 0; r < RT; ++r) sum[r][c] = I::fma(w[r], value, sum[r][c]);
      }
    } else {
      V value[CT];
#pragma GCC unroll 8
      for (int c = 0; c < CT; ++c) {
        value[c] = PART && c == CT - 1 ? I::get_part(T(), v + 16 * c, last) : I::get(T(), v + 16 * c);
      }
#pragma GCC unroll 8
      for (int r = 0; r < RT; ++r) {
        const V w = I::set1(weights[r * ws]);
#pragma GCC unroll 8
        for (int c = 0; c < CT; ++c) sum[r][c] = I::fma(w, value[c], sum[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < RT; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < CT; ++c) I::store(acc + r * as + 16 * c, sum[r][c]);
  }
}

template <class I, class T, int RT, int CT>
void weigh_columns(int64_t cols, const float* weights, int64_t ws, const typename T::Element* v, int64_t vs,
                   int64_t keys, int last, float* acc, int64_t as, bool fresh, const Ahead& ahead) {
  if (cols == CT) {
    if (last) {
      weigh_tile<I, T, RT, CT, true>(weights, ws, v, vs, keys, last, acc, as, fresh, ahead);
    } else {
      weigh_tile<I, T, RT, CT, false>(weights, ws, v, vs, keys, 0, acc, as, fresh, ahead);
    }
  } else if constexpr (CT > 1) {
    weigh_columns<I, T, RT, CT - 1>(cols, weights, ws, v, vs, keys, last, acc, as, fresh, ahead);
  }
}

template <class I, class T, int RT>
void weigh_rows(int64_t rows, const float* weights, int64_t ws, const typename T::Element* v, int64_t vs, int64_t keys,
                int64_t width, float* acc, int64_t as, bool fresh, const Ahead& ahead) {
  if (rows == RT) {
    constexpr int cols = RT <= I::kThinRows ? I::kThinCols : I::kCols;
    for (int64_t c = 0; c < width; c += 16 * cols) {
      const int64_t here = min64(width - c, 16 * cols);
      weigh_columns<I, T, RT, cols>(ceil_div(here, 16), weights, ws, v + c, vs, keys, (int)(here % 16), acc + c, as,
                                    fresh, c ? Ahead() : ahead);
    }
  } else if constexpr (RT > 1) {
    weigh_rows<I, T, RT - 1>(rows, weights, ws, v, vs, keys, width, acc, as, fresh, ahead);
  }
}

/* The same for 1..kRows rows and any width; acc has room for whole vectors. Row j of `ahead` is fetched with key j. */
template <class I, class T>
void weigh(int64_t rows, const float* weights, int64_t ws, const void* v, int64_t vs, int64_t keys, int64_t width,
           float* acc, int64_t as, bool fresh, const Ahead& ahead) {
  weigh_rows<I, T, I::kRows>(rows, weights, ws, (const typename T::Element*)v, vs, keys, width, acc, as, fresh, ahead);
}
using Weigh = void (*)(int64_t, const float*, int64_t, const void*, int64_t, int64_t, int64_t, float*, int64_t, bool,
                       const Ahead&);

/* n rows of values as floats, zeros up to whole vectors. */
template <class I, class T>
void widen_rows(const void* values, int64_t vs, int64_t n, int64_t width, float* out, int64_t stride) {
  const typename T::Element* v = (const typename T::Element*)values;
  for (int64_t j = 0; j < n; ++j, v += vs, out += stride) {
    int64_t c = 0;
    for (; c + 16 <= width; c += 16) I::store(out + c, I::get(T(), v + c));
    if (c < width) I::store(out + c, I::get_part(T(), v + c, (int)(width - c)));
  }
}
using Widen = void (*)(const void*, int64_t, int64_t, int64_t, float*, int64_t);

/* scale * q[b, head, i] as floats, zeros up to the next multiple of 16. */
template <class I>
void load_query(const Problem& p, int64_t b, int64_t head, int64_t i, float* out) {
  const int64_t* s = p.q.stride;
  const int64_t at = b * s[0] + head * s[1] + i * s[2];
  const typename I::V scale = I::set1(p.scale);
  for (int64_t d = 0; d < p.depth; d += 16) {
    const int n = (int)min64(16, p.depth - d);
    typename I::V x;
    if (s[3] == 1 && p.q.dtype == ACCEL_FLOAT32) {
      x = n == 16 ? I::load((const float*)p.q.data + at + d) : I::get_part(F32(), (const float*)p.q.data + at + d, n);
    } else {
      alignas(64) float lane[16] = {};
      for (int j = 0; j < n; ++j) lane[j] = accel_load_float(p.q.data, at + (d + j) * s[3], p.q.dtype);
      x = I::load(lane);
    }
    /* 0 * scale must stay 0 where scale is no number, so that what lies beyond depth adds nothing. */
    I::store(out + d, n == 16 ? I::mul(x, scale) : I::keep_first(I::mul(x, scale), n, 0.0f));
  }
}

template <class I, class T>
void put_row(const Problem& p, int64_t at, const float* acc, float total) {
  using V = typename I::V;
  const V t = I::set1(total);
  typename T::Element* y = (typename T::Element*)p.y + at;
  for (int64_t c = 0; c < p.width; c += 16) {
    const V v = I::div(I::load(acc + c), t);
    I::put(T(), y + c, v, (int)min64(16, p.width - c));
  }
}

/* y[b, head, i] = acc / total. */
template <class I>
void write_row(const Problem& p, int64_t b, int64_t head, int64_t i, const float* acc, float total) {
  const int64_t at = ((b * p.heads + head) * p.rows + i) * p.width;
  switch (p.y_dtype) {
    case ACCEL_FLOAT32: put_row<I, F32>(p, at, acc, total); break;
    case ACCEL_FLOAT16: put_row<I, F16>(p, at, acc, total); break;
    default: put_row<I, BF16>(p, at, acc, total); break;
  }
}

/* A row whose visible scores are all -inf, or that sees no key. Stock gives the keys that a bool or causal mask hides
 * a score that is low but finite: they all weigh the same. Where nothing is hidden the result is NaN. Rare and slow. */
template <class I>
void write_hopeless_row(const Problem& p, int64_t b, int64_t head, int64_t i, float* acc) {
  const int64_t* s = p.v.stride;
  int64_t hidden = 0;
  for (int64_t c = 0; c < round_up(p.width, 16); ++c) acc[c] = 0.0f;
  for (int64_t j = 0; j < p.keys; ++j) {
    if (!is_hidden(p, b, head, i, j)) continue;
    ++hidden;
    const int64_t at = b * s[0] + head / p.group * s[1] + j * s[2];
    for (int64_t c = 0; c < p.width; ++c) {
      acc[c] += p.quantized ? code_value(p.vq, b, head / p.group, j, c) : accel_load_float(p.v.data, at + c, p.v.dtype);
    }
  }
  write_row<I>(p, b, head, i, acc, (float)hidden);
}

inline float sink_of(const Problem& p, int64_t head) {
  return p.sinks ? accel_load_float(p.sinks->data, head * p.sinks->strides[0], p.sinks->dtype) : -kInf;
}

/* The larger one, and NaN if the second is NaN. */
inline float larger(float a, float b) { return a > b ? a : b; }

using accel_slots::Slots;

}  // namespace
}  // namespace cider
#endif
