/* Functions of single elements. Included once per instruction set.
 *
 * y[i] = f(x[i]) or f(x0[i], x1[i]) with inputs of one shape; each result depends on its own elements alone.
 *   silu              x / (1 + e^-x)
 *   gelu              x * Phi(x), Phi the distribution function of the normal distribution
 *   gelu_approx       0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
 *   gelu_fast_approx  x / (1 + e^(-1.702 x))
 *   relu2             max(x, 0)^2
 *   swiglu            silu(x0) * x1;  geglu, geglu_approx  gelu(x0) * x1, gelu_approx(x0) * x1
 *   swiglu_oai        g / (1 + e^(-alpha g)) * (1 + u), g = min(x0, limit), u = x1 within [-limit, limit]; parameters
 *                     alpha >= 0.5 and limit
 *   softcap           c * tanh(x / c), c a parameter
 *   residual          x0 + x1
 * Exactness  rounding: float32 arithmetic as functions.h states it, one rounding to the result's dtype. residual has stock's
 *            bits.
 * Special    NaN gives NaN; x = -inf gives NaN for silu and gelu, as stock does.
 */
#ifndef HOST_OPS_ELEMENTWISE_BODY_H
#define HOST_OPS_ELEMENTWISE_BODY_H

#include "blocks.h"
#include "functions.h"

namespace host_ops {
namespace {

/* Elements of a row that are done in one go, those that are worth a second thread, and those it takes at a time. */
constexpr int64_t kChunk = 4096, kMapWorth = 1 << 15, kMapPiece = 1 << 13;

template <class I, int INPUTS, class Function>
void elementwise(const accel_call* call, const Function& f) {
  const accel_array* y = call->outputs[0];
  Rows x[INPUTS];
  bool dense = true;
  for (int i = 0; i < INPUTS; ++i) {
    x[i] = Rows(call->inputs[i]);
    dense = dense && x[i].dense;
  }
  const int64_t rows = dense ? 1 : x[0].rows, length = dense ? y->size : x[0].n, chunks = ceil_div(length, kChunk);
  run(call, rows * chunks, y->size, kMapPiece, kMapWorth, [&](int64_t begin, int64_t end) {
    alignas(64) float in[INPUTS][kBlock], out[kBlock];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / chunks, first = item % chunks * kChunk, last = min64(first + kChunk, length);
      int64_t from[INPUTS];
      for (int i = 0; i < INPUTS; ++i) from[i] = dense ? 0 : x[i].offset(row);
      for (int64_t j = first; j < last; j += kBlock) {
        const int64_t n = min64(kBlock, last - j), to = row * length + j;
        const float* p[INPUTS];
        for (int i = 0; i < INPUTS; ++i) {
          const int64_t stride = dense ? 1 : x[i].stride;
          p[i] = fetch<I>(x[i].array->data, from[i] + j * stride, stride, x[i].array->dtype, in[i], n);
        }
        float* q = target(y->data, to, y->dtype, out);
        if constexpr (INPUTS == 1) {
          map<I>(n, q, f, p[0]);
        } else {
          map<I>(n, q, f, p[0], p[1]);
        }
        deliver<I>(q, y->data, to, y->dtype, n);
      }
    }
  });
}

template <class I>
void activate(const accel_call* call, Activation which) {
  using F = typename I::F;
  switch (which) {
    case Activation::silu:
      return elementwise<I, 1>(call, [](F x) { return times_sigmoid<I>(x, x); });
    case Activation::gelu:
      return elementwise<I, 1>(call, [](F x) { return gelu<I>(x); });
    case Activation::gelu_approx:
      return elementwise<I, 1>(call, [](F x) { return gelu_approx<I>(x); });
    case Activation::gelu_fast_approx:
      return elementwise<I, 1>(call, [](F x) { return gelu_fast_approx<I>(x); });
    case Activation::relu2:
      return elementwise<I, 1>(call, [](F x) {
        const F zero = I::set1(0.0f);
        return x < zero ? zero : x * x;
      });
    case Activation::swiglu_oai: {
      const F alpha = I::set1((float)call->params[0].f), limit = I::set1((float)call->params[1].f);
      return elementwise<I, 2>(call, [=](F gate, F x) { /* written so that NaN is kept */
        const F g = gate > limit ? limit : gate, low = x < -limit ? -limit : x, u = low > limit ? limit : low;
        return times_sigmoid<I>(g, alpha * g) * (u + I::set1(1.0f));
      });
    }
    case Activation::swiglu:
      return elementwise<I, 2>(call, [](F gate, F x) { return times_sigmoid<I>(gate, gate) * x; });
    case Activation::geglu:
      return elementwise<I, 2>(call, [](F gate, F x) { return gelu<I>(gate) * x; });
    case Activation::geglu_approx:
      return elementwise<I, 2>(call, [](F gate, F x) { return gelu_approx<I>(gate) * x; });
    case Activation::softcap: {
      const F cap = I::set1((float)call->params[0].f);
      return elementwise<I, 1>(call, [=](F x) { return cap * tanh_of<I>(x / cap); });
    }
    case Activation::residual:
      return elementwise<I, 2>(call, [](F x, F y) { return x + y; });
  }
}

}  // namespace
}  // namespace host_ops
#endif
