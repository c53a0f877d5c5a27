/* AVX-512 (F, BW, DQ, VL): sixteen floats. Digits as in isa_avx2.h, sixteen bytes at a time. */
#ifndef T5_ISA_AVX512_H
#define T5_ISA_AVX512_H

#include <immintrin.h>

#include "problem.h"

namespace t5 {
namespace {

struct Avx512 {
  using V = __m512;

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float v) { return _mm512_set1_ps(v); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(const float* lanes) {
    const __m256 h = _mm256_add_ps(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static void digits(const uint8_t* chunk, V* out) {
    const __m512 table = _mm512_broadcast_f32x4(_mm_setr_ps(-1, 0, 1, 0));
    const __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)chunk));
    const __m512i q1 = _mm512_mulhi_epu16(v, _mm512_set1_epi32(21846));
    const __m512i q2 = _mm512_mulhi_epu16(v, _mm512_set1_epi32(7282));
    const __m512i q3 = _mm512_mulhi_epu16(v, _mm512_set1_epi32(2428));
    const __m512i q4 = _mm512_mulhi_epu16(v, _mm512_set1_epi32(810));
    out[0] = _mm512_permutexvar_ps(_mm512_add_epi32(v, q1), table);
    out[1] = _mm512_permutexvar_ps(_mm512_add_epi32(q1, q2), table);
    out[2] = _mm512_permutexvar_ps(_mm512_add_epi32(q2, q3), table);
    out[3] = _mm512_permutexvar_ps(_mm512_add_epi32(q3, q4), table);
    out[4] = _mm512_permutexvar_ps(q4, table);
  }
  /* Full stores, because a masked store cannot be forwarded to the loads that follow soon. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    const bool f16 = dtype == ACCEL_FLOAT16;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, widened(_mm256_loadu_si256((const __m256i*)(p + i)), f16));
    if (i < n) {
      const __mmask16 m = (__mmask16)((1u << (n - i)) - 1);
      _mm512_storeu_ps(out + i, widened(_mm256_maskz_loadu_epi16(m, p + i), f16));
    }
  }
  static __m512 widened(__m256i h, bool f16) {
    return f16 ? _mm512_cvtph_ps(h) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }

  struct Wide {
    using F = __m512;
    static constexpr int kLanes = 16, kVectors = 2, kMaxPanel = 12;
    static F zero() { return _mm512_setzero_ps(); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F set1(float v) { return _mm512_set1_ps(v); }
    static void digits(const uint8_t* bytes, F* out) { Avx512::digits(bytes, out); }
  };
};

}  // namespace
}  // namespace t5
#endif
