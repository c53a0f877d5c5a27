/* Five digits to base 3 of each of 64 bytes, by byte permutations: AVX-512 with VBMI.
 *
 * Method     Permutations look up by six bits; a byte v of 243 has eight. floor(57 v / 256) tells v / 9 and thereby the
 *            three high digits, 2 v less that the two low ones.
 * Source     Written for this library.
 */
#ifndef T5_DIGITS_H
#define T5_DIGITS_H

#include <immintrin.h>
#include <stdint.h>

namespace t5 {
namespace {

/* What digits are looked up by: the high index for the three high ones, the low index for the others. */
constexpr int high_index(int v) { return 57 * v >> 8; }
constexpr int low_index(int v) { return (2 * v - high_index(v)) & 63; }

/* Digits, less LESS. */
template <int LESS>
struct Tables {
  alignas(64) int8_t of[5][64];
  constexpr Tables() : of() {
    for (int v = 0; v < 243; ++v) {
      for (int i = 0, rest = v; i < 5; ++i, rest /= 3) of[i][index(i, v)] = (int8_t)(rest % 3 - LESS);
    }
  }
  static constexpr int index(int i, int v) { return i < 2 ? low_index(v) : high_index(v); }
  /* Whether bytes that meet in an index have the same digits there. */
  constexpr bool serve() const {
    for (int v = 0; v < 243; ++v) {
      for (int i = 0, rest = v; i < 5; ++i, rest /= 3) {
        if (of[i][index(i, v)] != rest % 3 - LESS) return false;
      }
    }
    return true;
  }
};
template <int LESS>
constexpr Tables<LESS> kTables{};
static_assert(kTables<0>.serve() && kTables<1>.serve());

/* 64 bytes before their digits are looked up. */
struct Split {
  __m512i low, high; /* indices, of which permutations take six bits */
  explicit Split(__m512i v) {
    const __m512i even = _mm512_maddubs_epi16(v, _mm512_set1_epi16(57));
    const __m512i odd = _mm512_maddubs_epi16(v, _mm512_set1_epi16(57 << 8));
    const __m512i swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    high = _mm512_mask_shuffle_epi8(odd, 0x5555555555555555ull, even, swap);
    low = _mm512_sub_epi8(_mm512_add_epi8(v, v), high);
  }
  template <int LESS, int I>
  __m512i digit() const {
    return _mm512_permutexvar_epi8(I < 2 ? low : high, _mm512_load_si512(kTables<LESS>.of[I]));
  }
};

}  // namespace
}  // namespace t5
#endif
