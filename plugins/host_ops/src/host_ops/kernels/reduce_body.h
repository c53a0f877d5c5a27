/* Reductions of logits along the last dimension. Included once per instruction set.
 *
 *   logsumexp  y (..., 1) = log(sum(e^x))
 *   softmax    y = e^x / sum(e^x)
 *   argmax     y (...) uint32 = where x is largest, the first of equals; a NaN is larger than all numbers
 * Exactness  rounding. Each piece of a row is taken relative to its own maximum; exponentials are float32, four are
 *            added in float32, and such sums in float64. argmax is exact.
 * Special    logsumexp: a NaN gives NaN, else inf gives inf, and a row of -inf gives -inf. softmax: NaN, inf or nothing
 *            but -inf in a row gives NaN in all of it.
 * Rows       Each depends on itself alone. A row is cut into pieces by its length only, and what the pieces give is
 *            put together in their order, so that bits do not depend on threads.
 */
#ifndef HOST_OPS_REDUCE_BODY_H
#define HOST_OPS_REDUCE_BODY_H

#include "blocks.h"
#include "functions.h"

namespace host_ops {
namespace {

/* Elements of one piece (float32: a first-level cache), and those that are worth a second thread. */
constexpr int64_t kReducePiece = 16 * kBlock, kReduceWorth = 1 << 15;

/* What is known of a piece of a row. */
struct Piece {
  double sum;   /* of e^(x - shift) */
  float top;    /* largest number; -inf if there is none */
  int32_t best; /* number of the first block with `top` in it */
  int32_t nan;  /* number of the first block with a NaN in it, or -1 */

  /* Shifting by an infinity would make NaN of it. */
  float shift() const { return isinf(top) ? 0.0f : top; }
};

/* The largest number among n elements and `top`; `nan` is set if there is a NaN. */
template <class I>
float largest(const float* x, int64_t n, float top, bool& nan) {
  using F = typename I::F;
  constexpr int lanes = I::kLanes;
  F m[4];
  typename I::I odd = {};
  for (F& v : m) v = I::set1(top);
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (int k = 0; k < 4; ++k) {
      const F v = I::load(x + i + k * lanes);
      odd |= (typename I::I)(v != v);
      m[k] = v > m[k] ? v : m[k];
    }
  }
  const F a = m[0] > m[1] ? m[0] : m[1], b = m[2] > m[3] ? m[2] : m[3];
  float part[lanes];
  int32_t any[lanes];
  I::store(part, a > b ? a : b);
  memcpy(any, &odd, sizeof any);
  for (int k = 0; k < lanes; ++k) {
    top = part[k] > top ? part[k] : top;
    nan = nan || any[k];
  }
  for (; i < n; ++i) {
    top = x[i] > top ? x[i] : top;
    nan = nan || x[i] != x[i];
  }
  return top;
}

/* e^x for x <= 0, 0 where it is below 2^-125. */
template <class I>
typename I::F small_exp(typename I::F x) {
  const typename I::F limit = I::set1(-86.0f);
  const Exp<I> e(x < limit ? limit : x);
  return x < limit ? I::set1(0.0f) : e.p * power_of_two<I>(e.n);
}

/* Adds the sum of e^(x - shift) over n elements to `sum`. */
template <class I>
void add_exponentials(const float* x, int64_t n, float shift, typename I::D& sum) {
  using F = typename I::F;
  constexpr int lanes = I::kLanes;
  const F s = I::set1(shift);
  int64_t i = 0;
  F four;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    four = (small_exp<I>(I::load(x + i) - s) + small_exp<I>(I::load(x + i + lanes) - s)) +
           (small_exp<I>(I::load(x + i + 2 * lanes) - s) + small_exp<I>(I::load(x + i + 3 * lanes) - s));
    sum = sum + (I::lower(four) + I::upper(four));
  }
  for (; i < n; i += lanes) {
    const int64_t left = min64(n - i, lanes);
    float part[lanes];
    I::store(part, small_exp<I>((left == lanes ? I::load(x + i) : I::load_part(x + i, left)) - s));
    for (int64_t k = left; k < lanes; ++k) part[k] = 0;
    four = I::load(part);
    sum = sum + (I::lower(four) + I::upper(four));
  }
}

/* Rows cut into pieces; `all` is NULL if there is no memory, which has been reported. */
template <class I>
struct Pieces {
  Rows x;
  int64_t per_row;
  Piece* all;

  explicit Pieces(const accel_call* call) : x(call->inputs[0]) {
    per_row = ceil_div(x.n, kReducePiece);
    all = (Piece*)accel_scratch(call, (size_t)(x.rows * per_row) * sizeof(Piece));
  }

  /* body(values, first element's place in the row, n) for each block of piece `item`. */
  template <class Body>
  void blocks(int64_t item, const Body& body) const {
    alignas(64) float in[kBlock];
    const int64_t row = item / per_row, first = item % per_row * kReducePiece, last = min64(first + kReducePiece, x.n);
    const int64_t from = x.offset(row);
    for (int64_t j = first; j < last; j += kBlock) {
      const int64_t n = min64(kBlock, last - j);
      body(fetch<I>(x.array->data, from + j * x.stride, x.stride, x.array->dtype, in, n), j, n);
    }
  }

  void find_top(int64_t item) const {
    Piece& p = all[item];
    p = {0.0, -INFINITY, -1, -1};
    blocks(item, [&](const float* v, int64_t j, int64_t n) {
      bool nan = false;
      const float top = largest<I>(v, n, p.top, nan);
      if (top > p.top || p.best < 0) p.best = (int32_t)(j % kReducePiece / kBlock);
      if (nan && p.nan < 0) p.nan = (int32_t)(j % kReducePiece / kBlock);
      p.top = top;
    });
  }

  void find_sum(int64_t item) const {
    Piece& p = all[item];
    if (p.nan >= 0 || p.top == INFINITY) {
      p.sum = p.nan >= 0 ? (double)NAN : (double)INFINITY;
      return;
    }
    typename I::D sum = I::set1d(0.0);
    blocks(item, [&](const float* v, int64_t, int64_t n) { add_exponentials<I>(v, n, p.shift(), sum); });
    p.sum = total<I>(sum);
  }

  /* The pieces of a row as one. */
  Piece whole(int64_t row) const {
    Piece w = {0.0, -INFINITY, -1, -1};
    const Piece* p = all + row * per_row;
    for (int64_t i = 0; i < per_row; ++i) w.top = p[i].top > w.top ? p[i].top : w.top;
    for (int64_t i = 0; i < per_row; ++i) {
      if (p[i].sum != 0) w.sum += p[i].sum * exp((double)p[i].shift() - (double)w.shift());
    }
    return w;
  }
};

template <class I>
void logsumexp(const accel_call* call) {
  const Pieces<I> pieces(call);
  if (!pieces.all) return;
  const accel_array* y = call->outputs[0];
  const int64_t rows = pieces.x.rows;
  run(call, rows * pieces.per_row, pieces.x.array->size, kReducePiece, kReduceWorth, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      pieces.find_top(item);
      pieces.find_sum(item);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    const Piece w = pieces.whole(row);
    accel_store_float(y->data, row, y->dtype, (float)((double)w.shift() + log(w.sum)));
  }
}

template <class I>
void softmax(const accel_call* call) {
  using F = typename I::F;
  const Pieces<I> pieces(call);
  if (!pieces.all) return;
  const accel_array* y = call->outputs[0];
  const int64_t rows = pieces.x.rows, items = rows * pieces.per_row, size = pieces.x.array->size;
  Piece* wholes = (Piece*)accel_scratch(call, (size_t)rows * sizeof(Piece));
  if (!wholes) return;
  run(call, items, size, kReducePiece, kReduceWorth, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      pieces.find_top(item);
      pieces.find_sum(item);
    }
  });
  for (int64_t row = 0; row < rows; ++row) wholes[row] = pieces.whole(row);
  run(call, items, size, kReducePiece, kReduceWorth, [&](int64_t begin, int64_t end) {
    alignas(64) float out[kBlock];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / pieces.per_row;
      const Piece& w = wholes[row];
      /* An infinite sum is that of a row with inf in it. */
      const F inverse = I::set1(isinf(w.sum) ? NAN : (float)(1.0 / w.sum)), shift = I::set1(w.shift());
      const F limit = I::set1(-126.0f), zero = I::set1(0.0f);
      pieces.blocks(item, [&](const float* v, int64_t j, int64_t n) {
        const int64_t to = row * pieces.x.n + j;
        float* q = target(y->data, to, y->dtype, out);
        map<I>(n, q, [=](F x) {
          const F d = x - shift;
          const Exp<I> e(d < limit ? limit : d);
          const F p = d < limit ? zero : e.p;
          return ((p * e.first()) * inverse) * e.second(); /* subnormal results round once */
        }, v);
        deliver<I>(q, y->data, to, y->dtype, n);
      });
    }
  });
}

template <class I>
void argmax(const accel_call* call) {
  const Pieces<I> pieces(call);
  if (!pieces.all) return;
  const Rows& x = pieces.x;
  run(call, x.rows * pieces.per_row, x.array->size, kReducePiece, kReduceWorth, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) pieces.find_top(item);
  });
  for (int64_t row = 0; row < x.rows; ++row) {
    const Piece* p = pieces.all + row * pieces.per_row;
    int64_t best = 0;
    bool nan = false;
    for (int64_t i = 0; i < pieces.per_row && !nan; ++i) {
      nan = p[i].nan >= 0;
      if (nan || p[i].top > p[best].top) best = i;
    }
    int64_t j = best * kReducePiece + (nan ? p[best].nan : p[best].best) * kBlock;
    const int64_t from = x.offset(row);
    for (;; ++j) {
      const float v = accel_load_float(x.array->data, from + j * x.stride, x.array->dtype);
      if (nan ? v != v : v == p[best].top) break;
    }
    ((uint32_t*)call->outputs[0]->data)[row] = (uint32_t)j;
  }
}

}  // namespace
}  // namespace host_ops
#endif
