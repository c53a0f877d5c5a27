/* AVX-512 (F, BW, DQ, VL): vectors of sixteen floats. */
#ifndef HOST_OPS_ISA_AVX512_H
#define HOST_OPS_ISA_AVX512_H

#include <immintrin.h>

#include "common.h"

namespace host_ops {
namespace {

struct Avx512 {
  using F = __m512;
  using D = __m512d;
  typedef int32_t I __attribute__((vector_size(64)));
  static constexpr int kLanes = 16;
  static constexpr bool kFused = true;

  static F set1(float v) { return _mm512_set1_ps(v); }
  static D set1d(double v) { return _mm512_set1_pd(v); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  /* The first n < kLanes elements; the others are 0. */
  static F load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static void store_part(float* p, F v, int64_t n) { _mm512_mask_storeu_ps(p, mask(n), v); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static D fma(D a, D b, D c) { return _mm512_fmadd_pd(a, b, c); }

  /* Lanes 0 ... kLanes / 2 - 1 and the others as float64, and back. */
  static D lower(F v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
  static D upper(F v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
  static F join(D lower, D upper) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(lower)), _mm512_cvtpd_ps(upper), 1);
  }

  /* Neighbours 2i and 2i + 1 change places. */
  static F swap_pairs(F v) { return _mm512_permute_ps(v, 0xb1); }

  /* n contiguous half-precision numbers to floats and back. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, wide(_mm256_loadu_si256((const __m256i*)(p + i)), dtype));
    if (i < n) store_part(out + i, wide(_mm256_maskz_loadu_epi16(mask(n - i), p + i), dtype), n - i);
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) _mm256_storeu_si256((__m256i*)(out + i), half(load(p + i), dtype));
    if (i < n) _mm256_mask_storeu_epi16(out + i, mask(n - i), half(load_part(p + i, n - i), dtype));
  }

 private:
  static __mmask16 mask(int64_t n) { return (__mmask16)((1u << n) - 1u); }
  static F wide(__m256i h, int32_t dtype) {
    if (dtype == ACCEL_FLOAT16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  static __m256i half(F v, int32_t dtype) {
    if (dtype == ACCEL_FLOAT16) return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i nan = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, nan), 16));
  }
};

}  // namespace
}  // namespace host_ops
#endif
