/* exp, tanh and what activations are made of, on vectors of floats. Included once per instruction set.
 *
 * Each result depends on its own lane alone. Relative errors are stated in u = 2^-24, half a unit in the last place;
 * results below 2^-126 lose what subnormal numbers lose. NaN gives NaN.
 *
 * Coefficients are those of Chebyshev interpolation at 120 bits, rounded to float32; no table or routine of another
 * library is used.
 */
#ifndef HOST_OPS_FUNCTIONS_H
#define HOST_OPS_FUNCTIONS_H

#include "common.h"

namespace host_ops {
namespace {

template <class I>
typename I::F magnitude(typename I::F x) {
  return (typename I::F)((typename I::I)x & 0x7fffffff);
}

/* 2^n for -126 <= n <= 127. */
template <class I>
typename I::F power_of_two(typename I::I n) {
  return (typename I::F)((n + 127) << 23);
}

/* e^x = p * 2^n with p in [0.7, 1.42], for |x| <= 2^20; p is within 2 u. */
template <class I>
struct Exp {
  using F = typename I::F;
  F p;
  typename I::I n;
  explicit Exp(F x) {
    /* Adding and subtracting 1.5 * 2^23 rounds to an integer. The first part of ln 2 has 9 bits, so that its product
     * with n is exact. */
    const F big = I::set1(12582912.0f);
    const F t = I::fma(x, I::set1(1.44269504f), big), m = t - big;
    const F r = I::fma(m, I::set1(2.12194440e-4f), I::fma(m, I::set1(-0.693359375f), x));
    F q = I::set1(0.00139262504f);
    q = I::fma(q, r, I::set1(0.00836323295f));
    q = I::fma(q, r, I::set1(0.0416665524f));
    q = I::fma(q, r, I::set1(0.166665763f));
    q = I::fma(q, r, I::set1(0.5f));
    p = I::set1(1.0f) + I::fma(q, r * r, r);
    n = (typename I::I)t - (typename I::I)big;
  }
  /* 2^n in two factors, for -252 <= n <= 254. */
  F first() const { return power_of_two<I>(n >> 1); }
  F second() const { return power_of_two<I>(n - (n >> 1)); }
};

/* x * sigmoid(w), where w has the sign of x and grows at least like x / 2: 5 u, and what the error of w makes. As in
 * stock, x = -inf gives NaN. */
template <class I>
typename I::F times_sigmoid(typename I::F x, typename I::F w) {
  using F = typename I::F;
  const F a = magnitude<I>(w), limit = I::set1(126.0f), one = I::set1(1.0f), zero = I::set1(0.0f);
  const Exp<I> e(-(a > limit ? limit : a));
  const F p = a > limit ? zero : e.p, first = e.first(), second = e.second();
  /* sigmoid(w) = 1 / (1 + e^-|w|), times e^-|w| if w < 0; the small factor comes last, when nothing can overflow and
   * rounding to a subnormal number happens once. */
  const F q = x / (one + (p * first) * second);
  return w < zero ? ((q * p) * first) * second : q;
}

/* 4 u. */
template <class I>
typename I::F tanh_of(typename I::F x) {
  using F = typename I::F;
  const F a = magnitude<I>(x), limit = I::set1(10.0f), one = I::set1(1.0f), two = I::set1(2.0f);
  const F c = a > limit ? limit : a; /* tanh(10) rounds to 1 */
  const Exp<I> e(c + c);
  const F large = one - two / (e.p * power_of_two<I>(e.n) + one);
  const F s = a * a;
  F q = I::set1(-0.00652557239f);
  q = I::fma(q, s, I::set1(0.0212633535f));
  q = I::fma(q, s, I::set1(-0.0539017543f));
  q = I::fma(q, s, I::set1(0.133330733f));
  q = I::fma(q, s, I::set1(-0.333333313f));
  const F small = I::fma(q * s, a, a);
  const F t = a < I::set1(0.5625f) ? small : large;
  return (F)((typename I::I)t | ((typename I::I)x & (int32_t)0x80000000));
}

/* The error of the rounded product x * x, exact for 2^-40 <= |x| <= 2^40. */
template <class I>
typename I::F square_error(typename I::F x, typename I::F square) {
  using F = typename I::F;
  if constexpr (I::kFused) {
    return I::fma(x, x, -square);
  } else { /* halves of 12 bits */
    const F shifted = x * I::set1(4097.0f), high = shifted - (shifted - x), low = x - high;
    return ((high * high - square) + (high + high) * low) + low * low;
  }
}

/* x * Phi(x), Phi the distribution function of the normal distribution. With a = |x|, Phi(-a) = g(a) e^(-a^2 / 2)
 * where g is smooth: a polynomial in (a - 4) / (a + 4). 16 u, also where Phi is tiny. As in stock, x = -inf gives
 * NaN. */
template <class I>
typename I::F gelu(typename I::F x) {
  using F = typename I::F;
  const F a = magnitude<I>(x), limit = I::set1(15.0f), one = I::set1(1.0f), zero = I::set1(0.0f);
  const F c = a > limit ? limit : a;
  const F s = (c - I::set1(4.0f)) / (c + I::set1(4.0f));
  F g = I::set1(7.60598368e-06f);
  g = I::fma(g, s, I::set1(-5.50204968e-05f));
  g = I::fma(g, s, I::set1(-0.000173263412f));
  g = I::fma(g, s, I::set1(0.000648379326f));
  g = I::fma(g, s, I::set1(0.000504274503f));
  g = I::fma(g, s, I::set1(-0.00849490613f));
  g = I::fma(g, s, I::set1(0.030865116f));
  g = I::fma(g, s, I::set1(-0.0717071071f));
  g = I::fma(g, s, I::set1(0.124379247f));
  g = I::fma(g, s, I::set1(-0.170397729f));
  g = I::fma(g, s, I::set1(0.094410643f));
  const F square = c * c, lost = square_error<I>(c, square), half = I::set1(0.5f);
  const Exp<I> e(-(square * half));
  const F p = a > limit ? zero : g * I::fma(e.p, -(lost * half), e.p);
  const F first = e.first(), second = e.second();
  return x < zero ? ((x * p) * first) * second : x * (one - (p * first) * second);
}

/* x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is 0.5 x (1 + tanh(...)). */
template <class I>
typename I::F gelu_approx(typename I::F x) {
  using F = typename I::F;
  const F cubic = I::fma(I::set1(0.0713548162726009f), x * x, I::set1(1.5957691216057308f));
  return times_sigmoid<I>(x, x * cubic);
}

/* x * sigmoid(1.702 x). */
template <class I>
typename I::F gelu_fast_approx(typename I::F x) {
  return times_sigmoid<I>(x, x * I::set1(1.702f));
}

}  // namespace
}  // namespace host_ops
#endif
