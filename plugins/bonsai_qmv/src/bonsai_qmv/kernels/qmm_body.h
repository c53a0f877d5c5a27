/* y = x @ W.T (+ bias) for many rows of x. Included once per instruction set.
 *
 * Layout     as in qmv_body.h; weight = scale * code + bias, rounded once to float32.
 * Rows       Any; meant for more than 16. Not row-invariant: the bits of a row may depend on how many rows there
 *            are. They do not depend on the number of threads.
 * Exactness  rounding, as accel/gemm.h.
 * Method     The product of accel/gemm.h: a block of weights is decoded once into a small matrix of floats and multiplied
 *            with a block of rows of x; the matrix W as a whole is never made. Decoding keeps output columns in the
 *            vector lanes: with the packed words of a lane-full of rows side by side, code j lies at the same bit of the
 *            same word in every lane, so that all shifts are constants, also for codes that straddle words, and what is
 *            decoded lies ready for the product.
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_QMM_BODY_H
#define BONSAI_QMV_QMM_BODY_H

#include "problem.h"

namespace bonsai {
namespace {

using accel_gemm::kDepth; /* a multiple of every group size */

/* Codes 0..31 of a chunk in every lane: words[d] holds word d of the chunk of each lane's row. */
template <class W, int BITS, int J>
inline void decode_from(const uint32_t* words, typename W::F scale, typename W::F bias, float* out, int64_t ld) {
  if constexpr (J < 32) {
    constexpr int bit = BITS * J, word = bit / 32, shift = bit % 32;
    typename W::I q = W::template right<shift>(W::load_words(words + word * W::kLanes));
    if constexpr (shift + BITS > 32) {
      q = W::either(q, W::template left<32 - shift>(W::load_words(words + (word + 1) * W::kLanes)));
    }
    if constexpr (shift + BITS != 32) q = W::mask(q, (1u << BITS) - 1);
    W::store(out + J * ld, W::decode(scale, q, bias));
    decode_from<W, BITS, J + 1>(words, scale, bias, out, ld);
  }
}

/* Rows n0 ... of W (`columns` of them exist, the rest of `wide` repeats the last), weights k0 ... k0 + depth, to
 * out[panel][k][kPanel], a panel being kVectors * kLanes columns. */
template <class I, int BITS>
void decode_block(const Problem& p, int64_t n0, int64_t columns, int64_t wide, int64_t k0, int64_t depth, float* out) {
  using W = typename I::Wide;
  constexpr int L = W::kLanes, panel = W::kVectors * L;
  alignas(64) uint32_t words[kDepth / 32 * BITS * L];
  alignas(64) float scale[kDepth / 32 * L], bias[kDepth / 32 * L];
  const int64_t n_words = depth / 32 * BITS, groups = depth / p.group, g0 = k0 / p.group;
  for (int64_t c = 0; c < wide; c += L) {
    for (int l = 0; l < L; ++l) {
      const int64_t row = n0 + min64(c + l, columns - 1);
      const uint8_t* from = p.w + row * p.w_stride + k0 / 32 * 4 * BITS;
      for (int64_t d = 0; d < n_words; ++d) memcpy(&words[d * L + l], from + 4 * d, 4);
      alignas(64) float s[16], b[16];
      load_floats<I>(p.scales, row * p.s_stride[0] + g0 * p.s_stride[1], p.s_stride[1], p.s_dtype, s, groups);
      load_floats<I>(p.biases, row * p.b_stride[0] + g0 * p.b_stride[1], p.b_stride[1], p.b_dtype, b, groups);
      for (int64_t g = 0; g < groups; ++g) {
        scale[g * L + l] = s[g];
        bias[g * L + l] = b[g];
      }
    }
    float* to = out + c / panel * panel * depth + c % panel;
    for (int64_t k = 0; k < depth; k += 32) {
      const int64_t g = k / p.group;
      decode_from<W, BITS, 0>(words + k / 32 * BITS * L, W::load(scale + g * L), W::load(bias + g * L),
                              to + k * panel, panel);
    }
  }
}

template <class I>
struct Decode {
  const Problem* p;
  void (*block)(const Problem&, int64_t, int64_t, int64_t, int64_t, int64_t, float*);

  void operator()(int64_t n0, int64_t columns, int64_t wide, int64_t k0, int64_t depth, float* out) const {
    block(*p, n0, columns, wide, k0, depth, out);
  }
};

template <class I>
void large_rows(const Problem& p) {
  Decode<I> decode = {&p, decode_block<I, 8>};
  switch (p.bits) {
    case 1: decode.block = decode_block<I, 1>; break;
    case 2: decode.block = decode_block<I, 2>; break;
    case 3: decode.block = decode_block<I, 3>; break;
    case 4: decode.block = decode_block<I, 4>; break;
    case 5: decode.block = decode_block<I, 5>; break;
    case 6: decode.block = decode_block<I, 6>; break;
    default: break;
  }
  const accel_gemm::Product product = {p.call, p.rows, p.n, p.k, p.x, p.bias, p.y, p.y_dtype};
  accel_gemm::run<I>(product, decode);
}

}  // namespace
}  // namespace bonsai
#endif
