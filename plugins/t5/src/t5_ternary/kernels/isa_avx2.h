/* AVX2 with FMA and F16C: sixteen floats in two registers.
 *
 * Of a byte v in a lane of its own, floor(v / 3^i) is one 16-bit multiplication with 2^16 / 3^i rounded up, exact for
 * all bytes. A digit is floor(v / 3^i) - 3 floor(v / 3^(i+1)), which modulo 4 is their sum; a permutation of eight
 * floats looks up digit - 1 by the three lowest bits of that sum.
 */
#ifndef T5_ISA_AVX2_H
#define T5_ISA_AVX2_H

#include <immintrin.h>

#include "problem.h"

namespace t5 {
namespace {

/* The five values of digit - 1 of eight bytes, one in each 32-bit lane. */
inline void digits8(__m256i v, __m256* out) {
  const __m256 table = _mm256_setr_ps(-1, 0, 1, 0, -1, 0, 1, 0);
  const __m256i q1 = _mm256_mulhi_epu16(v, _mm256_set1_epi32(21846));
  const __m256i q2 = _mm256_mulhi_epu16(v, _mm256_set1_epi32(7282));
  const __m256i q3 = _mm256_mulhi_epu16(v, _mm256_set1_epi32(2428));
  const __m256i q4 = _mm256_mulhi_epu16(v, _mm256_set1_epi32(810));
  out[0] = _mm256_permutevar8x32_ps(table, _mm256_add_epi32(v, q1));
  out[1] = _mm256_permutevar8x32_ps(table, _mm256_add_epi32(q1, q2));
  out[2] = _mm256_permutevar8x32_ps(table, _mm256_add_epi32(q2, q3));
  out[3] = _mm256_permutevar8x32_ps(table, _mm256_add_epi32(q3, q4));
  out[4] = _mm256_permutevar8x32_ps(table, q4);
}

struct Avx2 {
  struct V {
    __m256 lo, hi;
  };

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
  static float sum(const float* lanes) {
    const __m256 h = _mm256_add_ps(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static void digits(const uint8_t* chunk, V* out) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)chunk);
    __m256 lo[5], hi[5];
    digits8(_mm256_cvtepu8_epi32(bytes), lo);
    digits8(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), hi);
#pragma GCC unroll 5
    for (int i = 0; i < 5; ++i) out[i] = {lo[i], hi[i]};
  }
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i h = _mm_loadu_si128((const __m128i*)(p + i));
      _mm256_storeu_ps(out + i, dtype == ACCEL_FLOAT16
                                    ? _mm256_cvtph_ps(h)
                                    : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
    }
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }

  struct Wide {
    using F = __m256;
    static constexpr int kLanes = 8, kVectors = 2, kMaxPanel = 6;
    static F zero() { return _mm256_setzero_ps(); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F set1(float v) { return _mm256_set1_ps(v); }
    static void digits(const uint8_t* bytes, F* out) {
      digits8(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes)), out);
    }
  };
};

}  // namespace
}  // namespace t5
#endif
