/* Activations as three planes of signed bytes: fixed point per row, for integer dot products with packed codes.
 *
 * Layout     A row of x becomes integers v with x ~ v * unit, |v| < 2^23, unit a power of two, and each v three digits
 *            of base 256: v = (hi * 256 + mid) * 256 + lo, every digit in -128..127. A line is what 64 bytes of W meet:
 *            512 / bits numbers, as 3 planes (hi, mid, lo) of 8 / bits steps of 64 bytes. Byte b of step i belongs to
 *            the code at bits [8 b + i * bits, 8 b + (i + 1) * bits) of the 64 bytes, so that shifting a line of W
 *            right by i * bits within words and masking its bytes gives the codes that step i multiplies. After the
 *            planes a line has what is added to the sums of its quads of words, or of its groups where these are smaller:
 *            -center * (sum of the v that they meet); for 8 bits twice (of hi * 256 + mid, of lo). Lines lie
 *            [line][row]; the last is filled up with zeros.
 * Exactness  unit is that of the largest number of the row: |x - v * unit| <= 2^-23 * max|x|; float16 numbers are kept
 *            exactly down to 2^-12 of the largest. What follows is exact integer arithmetic until one rounding a group.
 * Fitness    A number far below the largest keeps few bits. Rounding errors are independent and grow with the square
 *            root of k, the bound with k: unit_of says if the row stays inside the bound by `kSafety` standard deviations
 *            even if the largest quarter of its numbers meets nothing but weights of zero, or as many as there are weights
 *            next to zero in a row of W (`zeros`): only the smaller numbers of the row count; and if a group of large
 *            numbers meets nothing but weights of zero (kTogether). Rows with NaN, infinity or subnormal maximum do not
 *            fit either. Rows that do not fit take the float32 kernel (qmv_body.h); the row and what is known of the
 *            layer alone decide.
 * Source     Written for this library; numbers as several digits are the classic way to exact long multiplication.
 */
#ifndef BONSAI_QMV_PLANES_H
#define BONSAI_QMV_PLANES_H

#include <accel/fixed_point.h>
#include <accel/lines.h>
#include <math.h>

#include "problem.h"

namespace bonsai {
namespace {

/* The code that is subtracted from every code, so that sums are as small as weights are. */
template <int BITS>
constexpr int kCenter = BITS == 1 ? 0 : BITS == 2 ? 1 : 1 << (BITS - 1);

template <int BITS>
struct Line {
  static constexpr int kWeights = 512 / BITS, kSteps = 8 / BITS;
  __m512i plane[3][kSteps];
  int32_t start[BITS == 8 ? 2 : 1][BITS == 2 ? 8 : 4];
};

using accel_lines::some_floats;
using accel_lines::store16;
using accel_lines::transpose16;
using accel_fixed::split_digits;

/* What the numbers of a group may come to together, in the measure of spread and in units of the largest number: their
 * sum is rounded as one where it meets weights of zero whose bias is not. Half of what one number is allowed for (kPieces
 * of amx_rows.h), since spread counts one. */
constexpr float kTogether = 0.05f;

/* The root of the sum of squares of the groups' sums of magnitudes, over max. */
inline float together(const float* x, int64_t k, int group, float max) {
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)), inverse = _mm512_set1_ps(1.0f / max);
  float squares = 0;
  for (int64_t g = 0; g < k; g += group) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = g; i < g + group; i += 16) {
      sum = _mm512_add_ps(sum, _mm512_and_ps(_mm512_loadu_ps(x + i), magnitude));
    }
    const float all = _mm512_reduce_add_ps(_mm512_mul_ps(sum, inverse));
    squares += all * all;
  }
  return sqrtf(squares);
}

/* accel_fixed::unit_of, which looks for the power of two that says most about a row. Nearly every row fits by what one of
 * them says, a 64th of the largest number's: the more of them is known, the larger is the sum that must be large
 * enough. k is a multiple of 32. spread 0: any finite row fits. `of_one` is what the errors of single numbers come to, of
 * spread; see kTogether for those of groups. */
inline float unit_of(const float* x, int64_t k, int group, float spread, float zeros, float of_one = 1.0f) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i m = _mm512_setzero_si512(), other = m; /* as integers: NaN is above infinity */
  for (int64_t i = 0; i < k; i += 32) {
    m = _mm512_max_epu32(m, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    other = _mm512_max_epu32(other, _mm512_and_si512(_mm512_loadu_si512(x + i + 16), magnitude));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(m, other));
  const float max = accel_float_of_bits(bits), left_out = zeros + 0.05f < 0.25f ? 0.25f : zeros + 0.05f;
  if (max >= accel_fixed::kSmallestMax && max <= accel_fixed::kLargestMax && left_out < 1.0f && spread < 1e3f) {
    const int64_t counted = (int64_t)((float)k * (1.0f - left_out));
    const float limit = accel_float_of_bits((bits >> 23 << 23) - (6u << 23));
    const __m512 l = _mm512_set1_ps(limit);
    __m512 total = _mm512_setzero_ps(), more = total;
    int64_t n = 0;
    for (int64_t i = 0; i < k; i += 32) {
      const __m512 a = _mm512_abs_ps(_mm512_loadu_ps(x + i)), b = _mm512_abs_ps(_mm512_loadu_ps(x + i + 16));
      const __mmask16 first = _mm512_cmp_ps_mask(a, l, _CMP_LT_OQ), second = _mm512_cmp_ps_mask(b, l, _CMP_LT_OQ);
      n += __builtin_popcount(_mm512_kunpackw(first, second));
      total = _mm512_mask_add_ps(total, first, total, a);
      more = _mm512_mask_add_ps(more, second, more, b);
    }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(total, more)) + (float)(counted - n) * limit;
    const auto fits = [&](float measure) { /* a thousandth for the rounding of sums: decided no differently below */
      return n <= counted && max * (accel_fixed::kSafety * 0.29f) * spread * measure * 1.001f <= sum;
    };
    /* A group comes to group numbers as large as the largest, at most. */
    const float most = kTogether * sqrtf((float)(k * group));
    const float unit = accel_fixed::power_of_two((int32_t)(accel_bits_of_float(max * 1.0078125f) >> 23) - 127 - 22);
    if (fits(most > of_one ? most : of_one)) return unit;
    const float some = kTogether * together(x, k, group, max);
    if (some > of_one) of_one = some;
    if (fits(of_one)) return unit;
  }
  return accel_fixed::unit_of(x, k, spread * of_one, zeros);
}

/* The rows of a call that fit, up to kSmallRows, at the front of unit and rows; `make(i)` is called with the floats of
 * row i of them in x. The others are left to the float32 kernel, one by one. */
template <class Make>
int fit_rows(const Problem& p, float* x, float* unit, int32_t* rows, Make make) {
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  int32_t left[kSmallRows];
  int fit = 0, unfit = 0;
  for (int64_t m = 0; m < p.rows; ++m) {
    load_floats<Avx512>(p.x->data, accel_row_offset(p.x, p.row0 + m), stride, p.x->dtype, x, p.k);
    unit[fit] = unit_of(x, p.k, p.group, p.spread, p.zeros);
    if (unit[fit] == 0) {
      left[unfit++] = (int32_t)(p.row0 + m);
      continue;
    }
    make(fit);
    rows[fit++] = (int32_t)(p.row0 + m);
  }
  for (int i = 0; i < unfit; ++i) {
    Problem one = p;
    one.row0 = left[i];
    one.rows = 1;
    small_rows<Avx512>(one);
  }
  return fit;
}

/* Sums over parts of `words` words of what one codes would add up to, times -center. */
template <int BITS>
inline void make_start(__m512i of_words, int words, int32_t* start) {
  const __m512i center = _mm512_set1_epi32(-kCenter<BITS>);
  __m512i sum = _mm512_mullo_epi32(of_words, center);
  if (words == 1) return;
  sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, (_MM_PERM_ENUM)0xb1));
  if (words > 2) sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, (_MM_PERM_ENUM)0x4e));
  const int step = words > 2 ? 4 : 2;
  const __m512i first = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0),
                                           _mm512_set1_epi32(step));
  _mm512_mask_storeu_epi32(start, (__mmask16)((1 << (16 / step)) - 1), _mm512_permutexvar_epi32(first, sum));
}

/* The planes of a line of 4-bit codes from 128 floats. v + 0x808080 has the digits, each plus 128, as its bytes. */
inline void nibble_planes(const float* x, __m512 inverse, Line<4>* to) {
  const __m512i offset = _mm512_set1_epi32(0x808080), sign = _mm512_set1_epi8((char)0x80);
  /* Bytes of 32 numbers: [digit hi, mid][even, odd numbers][16], and [lo, lo][even, odd][16]. */
  alignas(64) static constexpr auto order = [] {
    struct { uint8_t at[2][64]; } o{};
    for (int b = 0; b < 64; ++b) {
      const int number = b % 16 * 2 + b / 16 % 2;
      o.at[0][b] = (uint8_t)(number * 4 + 2 - b / 32);
      o.at[1][b] = (uint8_t)(number * 4);
    }
    return o;
  }();
  const __m512i upper = _mm512_load_si512(order.at[0]), lower = _mm512_load_si512(order.at[1]);
  __m512i a[4], b[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 32 * i), inverse));
    const __m512i w = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 32 * i + 16), inverse));
    const __m512i p = _mm512_add_epi32(v, offset), q = _mm512_add_epi32(w, offset);
    a[i] = _mm512_xor_si512(_mm512_permutex2var_epi8(p, upper, q), sign);
    b[i] = _mm512_xor_si512(_mm512_permutex2var_epi8(p, lower, q), sign);
  }
  const __m512i hi = _mm512_shuffle_i32x4(a[0], a[1], 0x44), more_hi = _mm512_shuffle_i32x4(a[2], a[3], 0x44);
  const __m512i mid = _mm512_shuffle_i32x4(a[0], a[1], 0xee), more_mid = _mm512_shuffle_i32x4(a[2], a[3], 0xee);
  const __m512i lo = _mm512_shuffle_i32x4(b[0], b[1], 0x44), more_lo = _mm512_shuffle_i32x4(b[2], b[3], 0x44);
  to->plane[0][0] = _mm512_shuffle_i32x4(hi, more_hi, 0x88);
  to->plane[0][1] = _mm512_shuffle_i32x4(hi, more_hi, 0xdd);
  to->plane[1][0] = _mm512_shuffle_i32x4(mid, more_mid, 0x88);
  to->plane[1][1] = _mm512_shuffle_i32x4(mid, more_mid, 0xdd);
  to->plane[2][0] = _mm512_shuffle_i32x4(lo, more_lo, 0x88);
  to->plane[2][1] = _mm512_shuffle_i32x4(lo, more_lo, 0xdd);
}

/* Sums over quads of words. */
inline __m128i quad_sums(__m512i words) {
  words = _mm512_add_epi32(words, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0xb1));
  words = _mm512_add_epi32(words, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0x4e));
  return _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, words));
}

/* Lines of one row whose unit is known.
 *   x       floats, zeros from k to the end of the last line
 *   lines   the row's first; `rows` from line to line
 *   totals  sums of v per group, as floats */
template <int BITS>
void make_planes(const float* x, int64_t k, int group, float unit, Line<BITS>* lines, int64_t rows, float* totals) {
  using L = Line<BITS>;
  const __m512 inverse = _mm512_set1_ps(1.0f / unit);
  const __m512i ones = _mm512_set1_epi8(1);
  const int words = group * BITS / 32;
  __m512i sum = _mm512_setzero_si512();
  [[maybe_unused]] int32_t total = 0; /* |sum of a group| < 2^30 */
  for (int64_t k0 = 0; k0 < k; k0 += L::kWeights, lines += rows) {
    if constexpr (BITS == 4) {
      nibble_planes(x + k0, inverse, lines);
    } else {
      alignas(64) int8_t digits[3][L::kWeights];
      for (int j = 0; j < L::kWeights; j += 16) {
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k0 + j), inverse));
        split_digits(v, digits[0] + j, digits[1] + j, digits[2] + j);
        sum = _mm512_add_epi32(sum, v);
        if ((k0 + j + 16) % group == 0 && k0 + j < k) {
          totals[(k0 + j) / group] = (float)_mm512_reduce_add_epi32(sum);
          sum = _mm512_setzero_si512();
        }
      }
      for (int p = 0; p < 3; ++p) {
        for (int i = 0; i < L::kSteps; ++i) {
          uint8_t* to = (uint8_t*)&lines->plane[p][i];
          for (int j = 0; j < L::kWeights; j += 64) {
            const __m512i d = _mm512_load_si512(digits[p] + j);
            if constexpr (BITS == 8) {
              _mm512_store_si512(to, d);
            } else if constexpr (BITS == 2) {
              _mm_store_si128((__m128i*)(to + j / 4), _mm512_cvtepi32_epi8(_mm512_srli_epi32(d, (unsigned)(8 * i))));
            } else {
              _mm_storel_epi64((__m128i*)(to + j / 8), _mm512_cvtepi64_epi8(_mm512_srli_epi64(d, (unsigned)(8 * i))));
            }
          }
        }
      }
    }
    if constexpr (kCenter<BITS> != 0) {
      __m512i part[3];
      for (int p = 0; p < 3; ++p) {
        part[p] = _mm512_setzero_si512();
        for (int i = 0; i < L::kSteps; ++i) part[p] = _mm512_dpbusd_epi32(part[p], ones, lines->plane[p][i]);
      }
      const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(part[0], 8), part[1]);
      if constexpr (BITS == 8) {
        make_start<BITS>(high, words, lines->start[0]);
        make_start<BITS>(part[2], words, lines->start[1]);
      } else {
        const __m512i of_words = _mm512_add_epi32(_mm512_slli_epi32(high, 8), part[2]);
        make_start<BITS>(of_words, words, lines->start[0]);
        if constexpr (BITS == 4) { /* a quad is 32 numbers */
          const __m128i of_quads = quad_sums(of_words);
          if (group == 32) {
            const __mmask8 have = (__mmask8)((1 << min64(4, (k - k0) / 32)) - 1);
            _mm_mask_storeu_ps(totals + k0 / 32, have, _mm_cvtepi32_ps(of_quads));
          } else {
            alignas(16) int32_t some[4];
            _mm_store_si128((__m128i*)some, of_quads);
            for (int q = 0; q < 4 && k0 + 32 * q < k; ++q) {
              total += some[q];
              if ((k0 + 32 * (q + 1)) % group == 0) {
                totals[(k0 + 32 * q) / group] = (float)total;
                total = 0;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace bonsai
#endif
