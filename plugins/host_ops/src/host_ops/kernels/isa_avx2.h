/* AVX2, FMA and F16C: vectors of eight floats. */
#ifndef HOST_OPS_ISA_AVX2_H
#define HOST_OPS_ISA_AVX2_H

#include <immintrin.h>

#include "common.h"

namespace host_ops {
namespace {

struct Avx2 {
  using F = __m256;
  using D = __m256d;
  typedef int32_t I __attribute__((vector_size(32)));
  static constexpr int kLanes = 8;
  static constexpr bool kFused = true;

  static F set1(float v) { return _mm256_set1_ps(v); }
  static D set1d(double v) { return _mm256_set1_pd(v); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  /* The first n < kLanes elements; the others are 0. */
  static F load_part(const float* p, int64_t n) { return _mm256_maskload_ps(p, mask(n)); }
  static void store_part(float* p, F v, int64_t n) { _mm256_maskstore_ps(p, mask(n), v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static D fma(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }

  /* Lanes 0 ... kLanes / 2 - 1 and the others as float64, and back. */
  static D lower(F v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
  static D upper(F v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
  static F join(D lower, D upper) { return _mm256_set_m128(_mm256_cvtpd_ps(upper), _mm256_cvtpd_ps(lower)); }

  /* Neighbours 2i and 2i + 1 change places. */
  static F swap_pairs(F v) { return _mm256_permute_ps(v, 0xb1); }

  /* n contiguous half-precision numbers to floats and back. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i h = _mm_loadu_si128((const __m128i*)(p + i));
      store(out + i, dtype == ACCEL_FLOAT16 ? _mm256_cvtph_ps(h)
                                            : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
    }
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const F v = load(p + i);
      _mm_storeu_si128((__m128i*)(out + i), dtype == ACCEL_FLOAT16
                                                ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                                                : bfloat(v));
    }
    for (; i < n; ++i) out[i] = dtype == ACCEL_FLOAT16 ? accel_half_from_float(p[i]) : accel_bfloat_from_float(p[i]);
  }

 private:
  static __m256i mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m128i bfloat(F v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  }
};

}  // namespace
}  // namespace host_ops
#endif
