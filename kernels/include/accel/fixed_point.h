/* accel/fixed_point.h: rows of numbers as 24-bit fixed point, for integer dot products. C++17, AVX-512 F, BW, VL.
 *
 * A row x becomes integers v with x ~ v * unit, |v| < 2^23, unit a power of two, and each v three digits of base 256:
 * v = (hi * 256 + mid) * 256 + lo, every digit in -128..127. unit is that of the largest number of the row:
 * |x - v * unit| <= 2^-23 * max|x|; float16 numbers are kept exactly down to 2^-12 of the largest.
 *
 * Fitness      A number far below the largest keeps few bits. Rounding errors are independent and grow with the square
 *              root of k, the bound of class `rounding` with k: unit_of says whether a row stays inside the
 *              bound by kSafety standard deviations even if the largest quarter of its numbers meets nothing but
 *              weights of zero, or as many as there are weights of zero in a row of W. Rows with NaN, infinity or
 *              subnormal maximum do not fit either. The row and what is known of the weights alone decide.
 */
#ifndef ACCEL_FIXED_POINT_H
#define ACCEL_FIXED_POINT_H

#include <accel/half.h>
#include <immintrin.h>

namespace accel_fixed {
namespace {

/* Neither 2^-149 nor infinity may come up when the unit is divided by or multiplied with. */
constexpr float kSmallestMax = 1e-25f, kLargestMax = 1e30f, kSafety = 5.0f;

inline float power_of_two(int32_t e) { return accel_float_of_bits((uint32_t)(e + 127) << 23); }

/* How many of k numbers are smaller than `limit`, and what they amount to. */
inline int64_t below(const float* x, int64_t k, float limit, float* sum) {
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)), l = _mm512_set1_ps(limit);
  __m512 total = _mm512_setzero_ps();
  int64_t n = 0;
  for (int64_t i = 0; i < k; i += 16) {
    const __m512 f = _mm512_and_ps(_mm512_loadu_ps(x + i), magnitude);
    const __mmask16 small = _mm512_cmp_ps_mask(f, l, _CMP_LT_OQ);
    n += __builtin_popcount(small);
    if (sum) total = _mm512_mask_add_ps(total, small, total, f);
  }
  if (sum) *sum = _mm512_reduce_add_ps(total);
  return n;
}

/* The unit of a row, 0 if it does not fit, 1 if it is all zeros. k is a multiple of 16.
 *   spread  root mean square over mean of the magnitudes of the weights, of the row of W where that is largest
 *   zeros   share of weights of zero in the row of W that has most of them */
inline float unit_of(const float* x, int64_t k, float spread, float zeros) {
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
  __m512 m = _mm512_setzero_ps(), nan = m;
  for (int64_t i = 0; i < k; i += 16) {
    const __m512 f = _mm512_loadu_ps(x + i);
    m = _mm512_max_ps(m, _mm512_and_ps(f, magnitude));
    nan = _mm512_add_ps(nan, _mm512_sub_ps(f, f)); /* max forgets NaN; inf - inf is one too */
  }
  const float max = _mm512_reduce_max_ps(m), bad = _mm512_reduce_add_ps(nan);
  if (bad != 0) return 0;
  if (max == 0) return 1;
  if (!(max >= kSmallestMax && max <= kLargestMax)) return 0;
  if (!(spread < 1e3f)) return 0;
  const float left_out = zeros + 0.05f < 0.25f ? 0.25f : zeros + 0.05f;
  const int64_t counted = left_out < 1.0f ? (int64_t)((float)k * (1.0f - left_out)) : 0;
  /* The largest power of two below the maximum that no more numbers than those are below: all of them count, and the
   * others for no more than it. */
  const int32_t exponent = (int32_t)(accel_bits_of_float(max) >> 23);
  int32_t low = -1, high = 24; /* max * 2^-low has too many below it, max * 2^-high few enough or is small */
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (below(x, k, accel_float_of_bits((uint32_t)(exponent - middle) << 23), NULL) > counted) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const float limit = accel_float_of_bits((uint32_t)(exponent - high) << 23);
  float sum;
  const int64_t n = below(x, k, limit, &sum);
  if (n < counted) sum += (float)(counted - n) * limit;
  /* A rounding error has standard deviation 0.29 * unit <= 0.58 * 2^-23 * max, all of them that times sqrt(k) times the
   * root mean square of the weights, which is spread times the mean weight; the bound is 4 * sqrt(k) * 2^-24 * sum|x|
   * times the mean weight. */
  if (!(max * (kSafety * 0.29f) * spread <= sum)) return 0;
  /* A factor of 1 + 1/128 before the exponent is taken keeps the highest digit in -127..127. */
  return power_of_two((int32_t)(accel_bits_of_float(max * 1.0078125f) >> 23) - 127 - 22);
}

/* Sixteen v as their three digits. */
inline void split_digits(__m512i v, int8_t* hi, int8_t* mid, int8_t* lo) {
  const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24);
  const __m512i rest = _mm512_srai_epi32(_mm512_sub_epi32(v, low), 8);
  const __m512i middle = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
  const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(rest, middle), 8);
  _mm_storeu_si128((__m128i*)hi, _mm512_cvtepi32_epi8(high));
  _mm_storeu_si128((__m128i*)mid, _mm512_cvtepi32_epi8(middle));
  _mm_storeu_si128((__m128i*)lo, _mm512_cvtepi32_epi8(low));
}

}  // namespace
}  // namespace accel_fixed
#endif /* ACCEL_FIXED_POINT_H */
