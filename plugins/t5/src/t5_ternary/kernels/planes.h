/* Activations as three planes of signed bytes, in the order in which lines of t5 weights want them.
 *
 * Layout     A line of W is 52 bytes, thirteen words; a register holds them in lanes 0..12 and repeats in lanes
 *            13..15 the words that two groups share. Line::plane[p][i] holds, where the register has byte b of a group,
 *            digit p of the fixed-point number that meets weight 5b + i of that group, and 0 where the byte belongs to
 *            the word's other copy or where there is no weight. Line::start is what the sums of the sixteen lanes begin
 *            with: -(sum of the v that a lane meets), since weights are digit - 1.
 *            Lines lie [line][row]; what is missing at the end of k are zeros.
 * Exactness  see accel/fixed_point.h.
 */
#ifndef T5_PLANES_H
#define T5_PLANES_H

#include <accel/fixed_point.h>

#include "problem.h"

namespace t5 {
namespace {

constexpr int64_t kLineBytes = 52, kLineWeights = 256;

struct Line {
  __m512i plane[3][5];
  __m512i start;
};

/* Which word of a line each lane holds, which group of the line its bytes belong to, and for digit i of each byte of
 * the register the weight of the line, or none. */
struct LaneMap {
  alignas(64) int32_t word[16];
  alignas(64) int32_t group[16];
  alignas(64) uint8_t weight[5][64];
  uint64_t some[5]; /* bit set: there is a weight */

  constexpr explicit LaneMap(int size) : word(), group(), weight(), some() {
    const int bytes = size / 64 * 13;
    int next = 13;
    for (int l = 0; l < 13; ++l) {
      word[l] = l;
      group[l] = 4 * l / bytes;
      const int last = (4 * l + 3) / bytes;
      if (last != group[l]) { /* the second copy, for the group that begins in this word */
        word[next] = l;
        group[next++] = last;
      }
    }
    for (int l = 0; l < next; ++l) {
      for (int j = 0; j < 4; ++j) {
        const int at = 4 * word[l] + j, b = at % bytes;
        if (at / bytes != group[l]) continue;
        for (int i = 0; i < 5; ++i) {
          if (5 * b + i >= size) continue;
          weight[i][4 * l + j] = (uint8_t)(group[l] * size + 5 * b + i);
          some[i] |= (uint64_t)1 << (4 * l + j);
        }
      }
    }
  }
};
constexpr LaneMap kLanes64{64}, kLanes128{128};

/* Lines of one row whose unit is known.
 *   x      floats, zeros from k to the end of the last line
 *   lines  the row's first; `rows` from line to line */
inline void make_lines(const float* x, int64_t k, int32_t group, float unit, Line* lines, int64_t rows) {
  const LaneMap& map = group == 64 ? kLanes64 : kLanes128;
  const __m512 inverse = _mm512_set1_ps(1.0f / unit);
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t k0 = 0; k0 < k; k0 += kLineWeights, lines += rows) {
    alignas(64) int8_t digits[3][kLineWeights];
    for (int64_t j = 0; j < kLineWeights; j += 16) {
      const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k0 + j), inverse));
      accel_fixed::split_digits(v, digits[0] + j, digits[1] + j, digits[2] + j);
    }
    __m512i part[3];
    for (int p = 0; p < 3; ++p) {
      const __m512i a = _mm512_load_si512(digits[p]), b = _mm512_load_si512(digits[p] + 64);
      const __m512i c = _mm512_load_si512(digits[p] + 128), d = _mm512_load_si512(digits[p] + 192);
      part[p] = _mm512_setzero_si512();
      for (int i = 0; i < 5; ++i) {
        const __m512i from = _mm512_load_si512(map.weight[i]);
        const __mmask64 upper = _mm512_movepi8_mask(from); /* weights 128 and beyond */
        const __m512i low = _mm512_permutex2var_epi8(a, from, b), high = _mm512_permutex2var_epi8(c, from, d);
        lines->plane[p][i] = _mm512_maskz_mov_epi8(map.some[i], _mm512_mask_mov_epi8(low, upper, high));
        part[p] = _mm512_dpbusd_epi32(part[p], ones, lines->plane[p][i]);
      }
    }
    const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(part[0], 8), part[1]);
    lines->start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_add_epi32(_mm512_slli_epi32(high, 8), part[2]));
  }
}

}  // namespace
}  // namespace t5
#endif
