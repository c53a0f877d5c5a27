/* AVX2 with FMA and F16C: sixteen floats in two registers, and codes to weights. Every load of codes stays inside
 * the sixteen weights it is for.
 */
#ifndef HOST_LINEAR_ISA_AVX2_H
#define HOST_LINEAR_ISA_AVX2_H

#include <immintrin.h>

#include "problem.h"

namespace linear {
namespace {

struct Avx2 {
  struct V {
    __m256 lo, hi;
  };
  static constexpr bool kReadsLines = false;
  static constexpr int kMaxTile = 4;
  static constexpr int tile_rows(int mt) { return mt == 1 ? 4 : mt == 2 ? 2 : 1; }

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }

  static V hold(const V& v) { return v; }

  /* out[i] = sum of the 16 lanes of i, for 8 values of i, each by the same tree of halvings. */
  static void sum8(const float (*lanes)[16], float* out) {
    for (int i = 0; i < 8; ++i) {
      const __m256 h = _mm256_add_ps(_mm256_load_ps(lanes[i]), _mm256_load_ps(lanes[i] + 8));
      const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
      const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
      out[i] = _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
    }
  }

  static __m256 eight_halves(const uint16_t* p, int32_t dtype) {
    const __m128i h = _mm_loadu_si128((const __m128i*)p);
    return dtype == ACCEL_FLOAT16 ? _mm256_cvtph_ps(h)
                                  : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }

  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, eight_halves(p + i, dtype));
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    int64_t i = 0;
    if (dtype == ACCEL_FLOAT16) {
      for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128((__m128i*)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(p + i), _MM_FROUND_TO_NEAREST_INT));
      }
    }
    for (; i < n; ++i) accel_store_float(out, i, dtype, p[i]);
  }

  template <Format F>
  static constexpr bool permutes() { return false; }
  template <Format F>
  static void permute_chunk(float*) {}

  /* E2M1: the size by a permute, which reads three bits of each lane, the sign from the fourth. */
  static __m256 eight_e2m1(const uint8_t* p, __m256 sizes) {
    int32_t word;
    memcpy(&word, p, 4);
    const __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(q, 28), _mm256_set1_epi32((int)0x80000000u));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, q), _mm256_castsi256_ps(sign));
  }

  /* E4M3 times 2^-8: as half-precision numbers, whose exponents have one more bit; NaN where all seven are set. */
  static __m256 eight_e4m3(const uint8_t* p) {
    const __m128i s = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    const __m128i carry = _mm_xor_si128(s, _mm_add_epi16(s, _mm_set1_epi16(0x80)));
    const __m128i top = _mm_set1_epi16(0x4000);
    return _mm256_cvtph_ps(_mm_or_si128(_mm_andnot_si128(top, s), _mm_and_si128(top, carry)));
  }

  template <Format F, int STEP>
  static V weights(const uint8_t* chunk, const uint8_t* scales) {
    if constexpr (F == kFloat32) {
      return load((const float*)chunk + 16 * STEP);
    } else if constexpr (F == kFloat16 || F == kBfloat16) {
      const uint16_t* h = (const uint16_t*)chunk + 16 * STEP;
      const int32_t dtype = F == kFloat16 ? ACCEL_FLOAT16 : ACCEL_BFLOAT16;
      return {eight_halves(h, dtype), eight_halves(h + 8, dtype)};
    } else if constexpr (F == kMxfp8) {
      const __m256 eight = _mm256_set1_ps(256.0f), scale = _mm256_set1_ps(scale_of<F>(scales[0]));
      const __m256 lo = eight_e4m3(chunk + 16 * STEP), hi = eight_e4m3(chunk + 16 * STEP + 8);
      return {_mm256_mul_ps(_mm256_mul_ps(lo, eight), scale), _mm256_mul_ps(_mm256_mul_ps(hi, eight), scale)};
    } else {
      const __m256 scale = _mm256_set1_ps(scale_of<F>(scales[F == kNvfp4 ? STEP : 0]));
      const __m256 sizes = _mm256_mul_ps(_mm256_load_ps(kE2M1.value), scale);
      return {eight_e2m1(chunk + 8 * STEP, sizes), eight_e2m1(chunk + 8 * STEP + 4, sizes)};
    }
  }

  struct Wide {
    using F = __m256;
    static constexpr int kLanes = 8, kVectors = 2, kColumns = 6;
    static F zero() { return _mm256_setzero_ps(); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F set1(const float* p) { return _mm256_broadcast_ss(p); }
  };

  /* out[j][i] = in[i][j], 8 by 8: pairs of lanes, pairs of pairs, then halves are exchanged. */
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in + i * in_stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
      _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
  }
};

}  // namespace
}  // namespace linear
#endif
