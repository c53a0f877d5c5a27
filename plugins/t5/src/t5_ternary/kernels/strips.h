/* Strips of W: 52 bytes, 256 weights, of each of sixteen rows, brought to the other side.
 *
 * Layout     A strip is four groups of 64 or two of 128, and thirteen words of each row. Turned, a register holds a word
 *            of sixteen rows, and its digits are rows of a tile: four codes of each row of W. Groups end within words:
 *            bytes of the words that two groups share change places with bytes at the same place of other words, until
 *            twelve words are whole, three to each thirteen bytes, all of whose five digits count. The thirteenth, the
 *            rest, has what is left, the last byte of each group of 64 or the last two of 128: four or eight digits,
 *            which make one or two rows more. So 64 weights are sixteen rows, and nothing is multiplied in vain.
 * Source     Written for this library.
 */
#ifndef T5_STRIPS_H
#define T5_STRIPS_H

#include <accel/lines.h>

#include "digits.h"
#include "isa_avx512.h"

namespace t5 {
namespace {

using accel_lines::some_floats;
using accel_lines::Square;

constexpr int64_t kStripBytes = 4 * kChunkBytes, kStripWeights = 256;

/* SIZE: of a group. Which weight of its group stands at place b (0..3) of a row of group q of a strip. */
template <int SIZE>
struct StripMap {
  static constexpr int kGroups = 256 / SIZE, kBytes = SIZE / 64 * (int)kChunkBytes, kWords = SIZE / 64 * 3;
  alignas(64) uint8_t weight[kGroups][SIZE]; /* [4 * row + place] */

  /* Byte of the strip at place b of whole word f, of the rest if f is 12. */
  static constexpr int byte_of(int f, int b) {
    if (SIZE == 64) {
      if (f == 3) return b < 1 ? 24 : 12 + b;
      if (f == 6) return b < 2 ? 36 + b : 24 + b;
      if (f == 9) return b < 3 ? 48 + b : 39;
      if (f == 12) return 12 + 13 * b;
      return 4 * f + b;
    }
    if (f == 6) return b < 2 ? 48 + b : 24 + b;
    if (f == 12) return b < 2 ? 24 + b : 48 + b;
    return 4 * f + b;
  }
  constexpr StripMap() : weight() {
    for (int q = 0; q < kGroups; ++q) {
      for (int f = 0; f < kWords; ++f) {
        for (int i = 0; i < 5; ++i) {
          for (int b = 0; b < 4; ++b) {
            weight[q][4 * (5 * f + i) + b] = (uint8_t)(5 * (byte_of(kWords * q + f, b) - kBytes * q) + i);
          }
        }
      }
      uint8_t* last = weight[q] + 20 * kWords;
      for (int i = 0; i < SIZE / 16; ++i) {
        /* Of 64: digits 0 to 3 of a byte. Of 128: digits 0 to 2 of two bytes by turns, and two more of the first. */
        const int byte = SIZE == 64 ? 12 : i < 6 ? 24 + i % 2 : 24, digit = SIZE == 64 ? i : i < 6 ? i / 2 : i - 3;
        last[i] = (uint8_t)(5 * byte + digit);
      }
    }
  }
};
template <int SIZE>
constexpr StripMap<SIZE> kStrips{};

/* Bytes of a where mask has zeros, of b where it has ones. */
inline __attribute__((always_inline)) __m512i choose(unsigned mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32((int)mask), b, a, 0xca);
}

/* The words of a strip, in order of the groups, and the rest. */
template <int SIZE>
struct Strip {
  __m512i word[13];

  /* From sixteen rows at `byte`. Fetches lines at `near` and `far`. */
  inline __attribute__((always_inline)) void load(const uint8_t* const* w, int64_t byte, int64_t near, int64_t far) {
    Square square;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) { /* the last quarter overlaps with the one before: 52 bytes and none more */
        const int64_t at = byte + (q < 3 ? 16 * q : 36);
        __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(w[i] + at)));
        v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const __m128i*)(w[4 + i] + at)));
        v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const __m128i*)(w[8 + i] + at)));
        square.t[q][i] = _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const __m128i*)(w[12 + i] + at)));
      }
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        __builtin_prefetch(w[4 * r + i] + near);
        __builtin_prefetch(w[4 * r + i] + far, 0, 2);
      }
    }
    square.words(0, word);
    square.words(1, word + 4);
    square.words(2, word + 8);
    __m512i last[4];
    square.words(3, last);
    word[12] = last[3];
    if constexpr (SIZE == 64) {
      const __m512i w3 = word[3], w6 = word[6], w9 = word[9], w12 = word[12];
      word[3] = choose(0x000000ff, w3, w6);
      word[6] = choose(0x0000ffff, w6, w9);
      word[9] = choose(0xff000000, w12, w9);
      word[12] = choose(0xffff0000, choose(0x0000ff00, w3, w6), choose(0xff000000, w9, w12));
    } else {
      const __m512i w6 = word[6], w12 = word[12];
      word[6] = choose(0xffff0000, w12, w6);
      word[12] = choose(0xffff0000, w6, w12);
    }
  }

  /* The rows of the rest, one or two for each group: `to(group, row, codes)`. LESS: what digits are less as codes. */
  template <int LESS, class To>
  inline __attribute__((always_inline)) void rest(To to) const {
    const Split split(word[12]);
    const __m512i d0 = split.digit<LESS, 0>(), d1 = split.digit<LESS, 1>(), d2 = split.digit<LESS, 2>();
    const __m512i d3 = split.digit<LESS, 3>();
    if constexpr (SIZE == 64) { /* four by four bytes */
      const __m512i a = choose(0xff00ff00, d0, _mm512_slli_epi16(d1, 8));
      const __m512i b = choose(0xff00ff00, d2, _mm512_slli_epi16(d3, 8));
      const __m512i c = choose(0xff00ff00, _mm512_srli_epi16(d0, 8), d1);
      const __m512i d = choose(0xff00ff00, _mm512_srli_epi16(d2, 8), d3);
      to(0, 15, choose(0xffff0000, a, _mm512_slli_epi32(b, 16)));
      to(1, 15, choose(0xffff0000, c, _mm512_slli_epi32(d, 16)));
      to(2, 15, choose(0xffff0000, _mm512_srli_epi32(a, 16), b));
      to(3, 15, choose(0xffff0000, _mm512_srli_epi32(c, 16), d));
    } else {
      const __m512i d4 = split.digit<LESS, 4>(), both = choose(0xff00ff00, d3, _mm512_slli_epi16(d4, 8));
      to(0, 30, choose(0xffff0000, d0, _mm512_slli_epi32(d1, 16)));
      to(1, 30, choose(0xffff0000, _mm512_srli_epi32(d0, 16), d1));
      to(0, 31, choose(0xffff0000, d2, _mm512_slli_epi32(both, 16)));
      to(1, 31, choose(0xffff0000, _mm512_srli_epi32(d2, 16), both));
    }
  }

  /* The five rows of whole word f of group q. */
  template <int LESS, class To>
  inline __attribute__((always_inline)) void whole(int q, int f, To to) const {
    const Split split(word[StripMap<SIZE>::kWords * q + f]);
    to(q, 5 * f, split.digit<LESS, 0>());
    to(q, 5 * f + 1, split.digit<LESS, 1>());
    to(q, 5 * f + 2, split.digit<LESS, 2>());
    to(q, 5 * f + 3, split.digit<LESS, 3>());
    to(q, 5 * f + 4, split.digit<LESS, 4>());
  }
};

/* Scales of `groups` groups, sixteen at most, from g0 on, of rows n0 ... n0 + 15, as [group][row]. Rows beyond the last
 * repeat it. Fetches those of the next sixteen rows. */
inline void scales_to_lanes(const Problem& p, int64_t n0, int64_t g0, int64_t groups, float (*to)[16]) {
  const int64_t size = p.s_dtype == ACCEL_FLOAT32 ? 4 : 2;
  const uint8_t* scales = (const uint8_t*)p.scales + g0 * p.s_stride[1] * size;
#pragma GCC unroll 16
  for (int64_t i = 16; i < 32; ++i) __builtin_prefetch(scales + least(n0 + i, p.n - 1) * p.s_stride[0] * size);
  accel_lines::scales_to_lanes(p.scales, p.s_dtype, p.s_stride, p.n, n0, g0, groups, to);
}

}  // namespace
}  // namespace t5
#endif
