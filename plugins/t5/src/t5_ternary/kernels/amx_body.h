/* y = x @ W.T (+ bias) for many rows of x by integer tile products (accel/tiles.h): AMX-INT8 and VBMI.
 *
 * Layout     W as in product.cpp. 26 bytes, a group of 128 or two of 64, are two rows of 64 codes in a tile.
 * Rows       Any; meant for more than 16. Rows that do not fit fixed point take the float32 kernel, one by one, or all
 *            of them if they are many.
 * Exactness  rounding, see accel/tiles.h; codes are -1, 0 and 1.
 * Method     Bytes v are split, v - 9 c in one half of a register and c in the other. Each place of a
 *            row picks one of these numbers, adds the place where its digit's table begins, and looks the code up. In
 *            groups of 128 one row has digits 2, 3 and half of digits 0, the other digits 4, 1 and the rest, since a
 *            table has 64 entries and those for c have 27 and those for v - 9 c nine. Digits 0 and 1 of v - 9 c are
 *            digits 2 and 3 of a small c: with this, four digits have room in one table, and a group of 64 takes two.
 * Source     Written for this library.
 */
#ifndef T5_AMX_BODY_H
#define T5_AMX_BODY_H

#include <accel/tiles.h>

#include "qmm_body.h"
#include "vnni_body.h"

namespace t5 {
namespace {

/* Places of a tile row: a byte of the group and one of its digits. */
template <int SIZE>
struct Places {
  static constexpr bool kSecond = SIZE == 64; /* a second table, for digit 4 alone */
  uint8_t order[SIZE];
  alignas(64) uint8_t from[2][64], base[2][64];
  alignas(64) int8_t code[2][64], code4[64];
  uint64_t is4[2];

  /* Digit i of j as a code. */
  static constexpr int8_t code_of(int i, int j) {
    const int power = i == 0 || i == 2 ? 1 : i == 1 || i == 3 ? 3 : 9;
    return (int8_t)(j / power % 3 - 1);
  }
  constexpr void put(int row, int place, int byte, int digit, int table) {
    const int bytes = SIZE / 64 * kChunkBytes, in_group = SIZE == 64 ? byte % bytes : byte;
    if (SIZE == 128 || row == 0) order[row * 64 + place] = (uint8_t)(5 * in_group + digit);
    from[row][place] = (uint8_t)(byte + (digit < 2 ? 0 : 32));
    base[row][place] = (uint8_t)table;
  }
  constexpr Places() : order(), from(), base(), code(), code4(), is4() {
    /* {digit, first byte, bytes} of the parts of each row. */
    constexpr int part128[2][3][3] = {{{2, 0, 26}, {3, 0, 25}, {0, 0, 13}}, {{4, 0, 25}, {1, 0, 26}, {0, 13, 13}}};
    for (int row = 0; row < 2; ++row) {
      int place = 0, table = 0;
      if (SIZE == 128) {
        for (const auto& part : part128[row]) {
          const int entries = part[0] < 2 ? 9 : 27;
          for (int j = 0; j < entries; ++j) code[row][table + j] = code_of(part[0], j);
          for (int b = 0; b < part[2]; ++b) put(row, place++, part[1] + b, part[0], table);
          table += entries;
        }
      } else {
        for (int j = 0; j < 54; ++j) code[row][j] = code_of(2 + j / 27, j % 27);
        for (int j = 0; j < 27; ++j) code4[j] = code_of(4, j);
        for (int digit = 0; digit < 5; ++digit) {
          for (int b = 0; b < 13 && 5 * b + digit < 64; ++b) {
            if (digit == 4) is4[row] |= (uint64_t)1 << place;
            put(row, place++, 13 * row + b, digit, digit % 2 && digit < 4 ? 27 : 0);
          }
        }
      }
    }
  }
};
template <int SIZE>
constexpr Places<SIZE> kPlaces{};

template <int SIZE>
struct Tiles {
  const Problem* p;
  const uint8_t* order;
  /* How far ahead, in rows of W, bytes are fetched. */
  static constexpr int64_t kAhead = 16;

  void codes(int64_t n0, int8_t* out) const {
    const Places<SIZE>& map = kPlaces<SIZE>;
    const __m512i ninth = _mm512_set1_epi16(7282), bytes = _mm512_set1_epi16(0x00ff);
    const int64_t size = p->k / 64 * kChunkBytes;
    for (int r = 0; r < 16; ++r) {
      const uint8_t* w = p->w + least(n0 + r, p->n - 1) * p->w_stride;
      const uint8_t* ahead = p->w + least(n0 + r + kAhead, p->n - 1) * p->w_stride;
      int8_t* to = out + r * 64;
      for (int64_t at = 0; at < size; at += 26, to += 2048) {
        const int64_t have = least(26, size - at);
        const __m256i line = w + at + 32 <= p->w_end
                                 ? _mm256_loadu_si256((const __m256i*)(w + at))
                                 : _mm256_maskz_loadu_epi8((__mmask32)((1u << have) - 1), w + at);
        __builtin_prefetch(ahead + at, 0, 2);
        const __m512i v = _mm512_broadcast_i64x4(line);
        const __m512i even = _mm512_mulhi_epu16(_mm512_and_si512(v, bytes), ninth);
        const __m512i odd = _mm512_mulhi_epu16(v, ninth);
        const __m512i c = _mm512_ternarylogic_epi32(odd, _mm512_set1_epi16((short)0xff00), even, 0xea);
        const __m512i rest = _mm512_sub_epi8(v, c), eight = _mm512_slli_epi16(c, 3);
        const __m512i parts = _mm512_mask_sub_epi8(c, 0xffffffffull, rest, eight);
#pragma GCC unroll 2
        for (int row = 0; row < 2; ++row) {
          if (SIZE == 64 && row == 1 && have < 26) break;
          const __m512i picked = _mm512_permutexvar_epi8(_mm512_load_si512(map.from[row]), parts);
          const __m512i index = _mm512_add_epi8(picked, _mm512_load_si512(map.base[row]));
          __m512i code = _mm512_permutexvar_epi8(index, _mm512_load_si512(map.code[row]));
          if constexpr (SIZE == 64) {
            code = _mm512_mask_permutexvar_epi8(code, map.is4[row], index, _mm512_load_si512(map.code4));
          }
          _mm512_store_si512(to + row * 1024, code);
        }
      }
    }
  }
  void scales(int64_t n0, float* out) const {
    accel_tiles::lanes<Avx512>(p->scales, p->s_dtype, p->s_stride, p->n, p->k / SIZE, n0, out);
  }
};

template <int SIZE>
void amx_large(const Problem& p) {
  const accel_gemm::Product product = {p.call, p.rows, p.n, p.k, p.x, p.bias, p.y, p.y_dtype};
  float* unit = (float*)accel_scratch(p.call, (size_t)p.rows * sizeof(float));
  if (!unit) return;
  const Tiles<SIZE> tiles = {&p, kPlaces<SIZE>.order};
  const int64_t unfit = accel_tiles::run<Avx512, SIZE>(product, tiles, p.spread, p.zeros, unit);
  if (unfit < 0) return large_rows<Avx512>(p);
  float* of_row = unfit ? (float*)accel_scratch(p.call, small_rows_bytes(1, p.k)) : NULL;
  for (int64_t m = 0; of_row && m < p.rows; ++m) {
    if (unit[m] != 0) continue;
    Problem alone = p;
    alone.row0 = m;
    alone.rows = 1;
    small_rows_in<Avx512>(alone, of_row);
  }
}

inline void amx_large_rows(const Problem& p) {
  if (!(p.spread < INFINITY)) {
    large_rows<Avx512>(p);
  } else if (p.group == 64) {
    amx_large<64>(p);
  } else {
    amx_large<128>(p);
  }
}

}  // namespace
}  // namespace t5
#endif
