/* AVX-512 (F, BW, DQ, VL): sixteen floats. */
#ifndef CIDER_SDPA_ISA_AVX512_H
#define CIDER_SDPA_ISA_AVX512_H

#include <immintrin.h>

#include "problem.h"
#include "unpack.h"

namespace cider {
namespace {

struct Avx512 {
  using V = __m512;
  /* Accumulators: rows x vectors of values, the wide tile for few rows; rows x keys of dot products. */
  static constexpr int kRows = 6, kCols = 4, kThinRows = 3, kThinCols = 8, kDotRows = 4, kTreeRows = 2, kTreeCols = 2;
  /* From how many rows on turning keys round pays. */
  static constexpr int64_t kTurn = 10;

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float v) { return _mm512_set1_ps(v); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); } /* b if either is NaN */
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }

  static V get(F32, const float* p) { return _mm512_loadu_ps(p); }
  static V get(F16, const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static V get(BF16, const uint16_t* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
  /* The first n of 16, zeros after them; nothing beyond is read. */
  static V get_part(F32, const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static V get_part(F16, const uint16_t* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
  static V get_part(BF16, const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
  static V widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

  static V codes(const uint8_t* p, const Unpacker& u) {
    const __m128i raw = _mm_maskz_loadu_epi8((__mmask16)((1u << u.bytes) - 1), p);
    const __m512i x = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(raw), _mm512_load_si512(u.control));
    const __m512i code = _mm512_srlv_epi32(x, _mm512_load_si512(u.shift));
    return _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32((int)u.mask)));
  }
  static V affine(V scale, V code, V bias) { return fma(scale, code, bias); } /* rounded once */

  static V keep_first(V v, int n, float other) { return _mm512_mask_mov_ps(_mm512_set1_ps(other), first(n), v); }
  /* other where m is not 0 */
  static V replace(V v, V m, float other) {
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(m, _mm512_setzero_ps(), _CMP_NEQ_UQ), _mm512_set1_ps(other));
  }
  static float sum(V v) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static float highest(V v) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
  }

  static V nearest(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /* v * 2^n for integral n in -126 ... 0, and 0 where x < limit */
  static V times_power(V v, V n, V x, float limit) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), v, n);
  }

  /* Sums over the lanes of 16 vectors. fold4(x0, x4, x8, x12) ... fold4(x3, x7, x11, x15) each leave four lanes per
   * vector, fold16 of these four leaves the sum of x_i in lane i. Lane j is added to j + 8, then + 4, + 2, + 1. */
  static V fold4(V a, V b, V c, V d) {
    const V ac = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, c), _mm512_shuffle_f32x4(a, c, 0x4e));
    const V bd = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, b, d), _mm512_shuffle_f32x4(b, d, 0x4e));
    const __m512i swap = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, ac, bd), _mm512_permutex2var_ps(ac, swap, bd));
  }
  static V fold16(V p, V q, V r, V s) {
    const V pr = pairs(p, r), qs = pairs(q, s);
    const V even = _mm512_mask_blend_ps(0xaaaa, pr, qs);
    const V odd = _mm512_permute_ps(_mm512_mask_blend_ps(0xaaaa, qs, pr), 0xb1);
    return _mm512_add_ps(even, odd);
  }
  static V pairs(V a, V b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b),
                         _mm512_castpd_ps(_mm512_shuffle_pd(_mm512_castps_pd(a), _mm512_castps_pd(b), 0x55)));
  }

  /* out[i * stride + j] = r[j][i] */
  static void transpose(const V* r, float* out, int64_t stride) {
    V t[16], u[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
      const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
      u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) { /* u[4 g + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4 g .. 4 g + 3 */
      const V a = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd);
      const V c = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88), d = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
      _mm512_storeu_ps(out + i * stride, _mm512_shuffle_f32x4(a, c, 0x88));
      _mm512_storeu_ps(out + (4 + i) * stride, _mm512_shuffle_f32x4(b, d, 0x88));
      _mm512_storeu_ps(out + (8 + i) * stride, _mm512_shuffle_f32x4(a, c, 0xdd));
      _mm512_storeu_ps(out + (12 + i) * stride, _mm512_shuffle_f32x4(b, d, 0xdd));
    }
  }

  static void put(F32, float* p, V v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
  static void put(F16, uint16_t* p, V v, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void put(BF16, uint16_t* p, V v, int n) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i r = _mm512_mask_or_epi32(near, nan, u, _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
  }
};

}  // namespace
}  // namespace cider
#endif
