/* Normalisation of rows. Included once per instruction set.
 *
 *   rms_norm           y = x * r * weight with r = 1 / sqrt(mean(x^2) + eps), over the last dimension
 *   residual_rms_norm  s = x + residual, rounded to its dtype, and rms_norm(s)
 *   layer_norm         y = (x - mean(x)) * r * weight + bias with r = 1 / sqrt(mean((x - mean(x))^2) + eps)
 * Exactness  rounding. Sums are made in float64, and so is the difference to the mean, which is then rounded to float32;
 *            r, and each product with r and weight, are rounded to float32, and the result to its dtype.
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

  /* sum = term(x as float64, sum) for n elements of x and, in the last vector, zeros. */
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

/* Sum of squares, in order, of n floats in blocks that are added one after the other. */
template <class I>
struct Squares : Sums<I> {
  void add(const float* x, int64_t n) {
    Sums<I>::add(x, n, [](typename I::D v, typename I::D sum) { return I::fma(v, v, sum); });
  }
  float reciprocal_root(int64_t n, double eps) const { return (float)(1.0 / sqrt(this->result() / (double)n + eps)); }
};

/* Block j of a row of x as floats. */
template <class I>
const float* block(const Rows& x, int64_t from, int64_t j, int64_t n, float* buffer) {
  return fetch<I>(x.array->data, from + j * x.stride, x.stride, x.array->dtype, buffer, n);
}

/* y[to ...] = rms_norm of the row of x that starts at `from`. */
template <class I>
void rms_norm_row(const Rows& x, int64_t from, const float* weight, double eps, const accel_array* y, int64_t to) {
  using F = typename I::F;
  alignas(64) float in[kBlock], out[kBlock];
  Squares<I> squares;
  for (int64_t j = 0; j < x.n; j += kBlock) {
    const int64_t n = min64(kBlock, x.n - j);
    squares.add(block<I>(x, from, j, n, in), n);
  }
  const F r = I::set1(squares.reciprocal_root(x.n, eps));
  for (int64_t j = 0; j < x.n; j += kBlock) {
    const int64_t n = min64(kBlock, x.n - j);
    const float* p = block<I>(x, from, j, n, in);
    float* q = target(y->data, to + j, y->dtype, out);
    if (weight) {
      map<I>(n, q, [&](F v, F w) { return v * r * w; }, p, weight + j);
    } else {
      map<I>(n, q, [&](F v) { return v * r; }, p);
    }
    deliver<I>(q, y->data, to + j, y->dtype, n);
  }
}

/* Inputs x, weight (may be missing); parameter eps. */
template <class I>
void rms_norm(const accel_call* call) {
  const Rows x(call->inputs[0]);
  bool failed = false;
  const float* weight = parameter<I>(call, call->n_inputs > 1 ? call->inputs[1] : NULL, x.n, failed);
  if (failed) return;
  run(call, x.rows, x.array->size, kNormPiece, kNormWorth, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      rms_norm_row<I>(x, x.offset(row), weight, call->params[0].f, call->outputs[0], row * x.n);
    }
  });
}

/* Inputs x, residual, weight (may be missing); outputs x + residual and its norm; parameter eps. */
template <class I>
void residual_rms_norm(const accel_call* call) {
  using F = typename I::F;
  const Rows x(call->inputs[0]), residual(call->inputs[1]), sum(call->outputs[0]);
  bool failed = false;
  const float* weight = parameter<I>(call, call->n_inputs > 2 ? call->inputs[2] : NULL, x.n, failed);
  if (failed) return;
  run(call, x.rows, x.array->size, kNormPiece, kNormWorth, [&](int64_t begin, int64_t end) {
    alignas(64) float in[2][kBlock], out[kBlock];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from_x = x.offset(row), from_r = residual.offset(row), to = row * x.n;
      for (int64_t j = 0; j < x.n; j += kBlock) {
        const int64_t n = min64(kBlock, x.n - j);
        const float* p = block<I>(x, from_x, j, n, in[0]);
        const float* r = block<I>(residual, from_r, j, n, in[1]);
        float* q = target(sum.array->data, to + j, sum.array->dtype, out);
        map<I>(n, q, [](F a, F b) { return a + b; }, p, r);
        deliver<I>(q, sum.array->data, to + j, sum.array->dtype, n);
      }
      rms_norm_row<I>(sum, to, weight, call->params[0].f, call->outputs[1], to);
    }
  });
}

/* Inputs x, weight and bias as parameters 1 and 2 say; parameter 0 eps. */
template <class I>
void layer_norm(const accel_call* call) {
  using F = typename I::F;
  using D = typename I::D;
  const Rows x(call->inputs[0]);
  const accel_array* y = call->outputs[0];
  const bool has_weight = call->params[1].i != 0, has_bias = call->params[2].i != 0;
  bool failed = false;
  const float* weight = parameter<I>(call, has_weight ? call->inputs[1] : NULL, x.n, failed);
  const float* bias = parameter<I>(call, has_bias ? call->inputs[1 + has_weight] : NULL, x.n, failed);
  if (failed) return;
  run(call, x.rows, x.array->size, kNormPiece, kNormWorth, [&](int64_t begin, int64_t end) {
    alignas(64) float in[kBlock], centred[kBlock], out[kBlock];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = x.offset(row), to = row * x.n;
      Sums<I> sums;
      for (int64_t j = 0; j < x.n; j += kBlock) {
        const int64_t n = min64(kBlock, x.n - j);
        sums.add(block<I>(x, from, j, n, in), n, [](D v, D sum) { return sum + v; });
      }
      const D mean = I::set1d(sums.result() / (double)x.n);
      const auto centre = [=](F v) { return I::join(I::lower(v) - mean, I::upper(v) - mean); };
      Squares<I> squares;
      for (int64_t j = 0; j < x.n; j += kBlock) {
        const int64_t n = min64(kBlock, x.n - j);
        map<I>(n, centred, centre, block<I>(x, from, j, n, in));
        squares.add(centred, n);
      }
      const F r = I::set1(squares.reciprocal_root(x.n, call->params[0].f));
      for (int64_t j = 0; j < x.n; j += kBlock) {
        const int64_t n = min64(kBlock, x.n - j);
        const float* p = block<I>(x, from, j, n, in);
        float* q = target(y->data, to + j, y->dtype, out);
        if (weight && bias) {
          map<I>(n, q, [&](F v, F w, F b) { return I::fma(centre(v) * r, w, b); }, p, weight + j, bias + j);
        } else if (weight) {
          map<I>(n, q, [&](F v, F w) { return centre(v) * r * w; }, p, weight + j);
        } else if (bias) {
          map<I>(n, q, [&](F v, F b) { return I::fma(centre(v), r, b); }, p, bias + j);
        } else {
          map<I>(n, q, [&](F v) { return centre(v) * r; }, p);
        }
        deliver<I>(q, y->data, to + j, y->dtype, n);
      }
    }
  });
}

}  // namespace
}  // namespace host_ops
#endif
