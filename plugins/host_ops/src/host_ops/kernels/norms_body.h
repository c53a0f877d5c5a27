/* Normalisation of rows. Included once per instruction set.
 *
 * rms_norm   y = x * r * weight with r = 1 / sqrt(mean(x^2) + eps), over the last dimension
 * Exactness  rounding: the sum of squares is made in float64, where each square is exact; then r, x * r and the
 *            product with weight are rounded to float32, and the result to its dtype.
 * Rows       Each depends on itself alone; the order of additions depends on the row's length only.
 */
#ifndef HOST_OPS_NORMS_BODY_H
#define HOST_OPS_NORMS_BODY_H

#include "blocks.h"

namespace host_ops {
namespace {

/* Elements that are worth a second thread, and that it takes at a time. */
constexpr int64_t kNormWorth = 1 << 16, kNormPiece = 1 << 14;

/* Four partial sums per lane, added to by eight vectors of float64. */
template <class I>
struct Sums {
  typename I::D part[4];
  Sums() {
    for (auto& p : part) p = I::set1d(0.0);
  }
  double result() const { return total<I>((part[0] + part[1]) + (part[2] + part[3])); }

  /* Adds term(x as float64) for n elements of x; term(0) need not be 0. */
  template <class Term>
  void add(const float* x, int64_t n, const Term& term) {
    constexpr int lanes = I::kLanes;
    int64_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto a = I::load(x + i), b = I::load(x + i + lanes);
      part[0] = term(I::lower(a), part[0]);
      part[1] = term(I::upper(a), part[1]);
      part[2] = term(I::lower(b), part[2]);
      part[3] = term(I::upper(b), part[3]);
    }
    for (int j = 0; i < n; i += lanes, j = 2) {
      const int64_t left = min64(n - i, lanes);
      const auto a = left == lanes ? I::load(x + i) : I::load_part(x + i, left);
      part[j] = term(I::lower(a), part[j]);
      part[j + 1] = term(I::upper(a), part[j + 1]);
    }
  }
};

/* A parameter vector of n elements, or NULL, as floats: where it lies or in scratch. `failed` is set if there is no
 * scratch. */
template <class I>
const float* parameter(const accel_call* call, const accel_array* a, int64_t n, bool& failed) {
  if (!a) return NULL;
  const int64_t stride = n > 1 ? a->strides[0] : 1;
  if (a->dtype == ACCEL_FLOAT32 && stride == 1) return (const float*)a->data;
  float* copy = (float*)accel_scratch(call, (size_t)n * sizeof(float));
  if (!copy) {
    failed = true;
    return NULL;
  }
  return fetch<I>(a->data, 0, stride, a->dtype, copy, n);
}

/* Inputs x, weight (may be missing); parameter eps. */
template <class I>
void rms_norm(const accel_call* call) {
  using F = typename I::F;
  using D = typename I::D;
  const Rows x(call->inputs[0]);
  const accel_array* y = call->outputs[0];
  const double eps = call->params[0].f;
  bool failed = false;
  const float* weight = parameter<I>(call, call->n_inputs > 1 ? call->inputs[1] : NULL, x.n, failed);
  if (failed) return;
  run(call, x.rows, x.array->size, kNormPiece, kNormWorth, [&](int64_t begin, int64_t end) {
    alignas(64) float in[kBlock], out[kBlock];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = x.offset(row), to = row * x.n;
      Sums<I> squares;
      for (int64_t j = 0; j < x.n; j += kBlock) {
        const int64_t n = min64(kBlock, x.n - j);
        squares.add(fetch<I>(x.array->data, from + j * x.stride, x.stride, x.array->dtype, in, n), n,
                    [](D v, D sum) { return I::fma(v, v, sum); });
      }
      const F r = I::set1((float)(1.0 / sqrt(squares.result() / (double)x.n + eps)));
      for (int64_t j = 0; j < x.n; j += kBlock) {
        const int64_t n = min64(kBlock, x.n - j);
        const float* p = fetch<I>(x.array->data, from + j * x.stride, x.stride, x.array->dtype, in, n);
        float* q = target(y->data, to + j, y->dtype, out);
        if (weight) {
          map<I>(n, q, [&](F v, F w) { return v * r * w; }, p, weight + j);
        } else {
          map<I>(n, q, [&](F v) { return v * r; }, p);
        }
        deliver<I>(q, y->data, to + j, y->dtype, n);
      }
    }
  });
}

}  // namespace
}  // namespace host_ops
#endif
