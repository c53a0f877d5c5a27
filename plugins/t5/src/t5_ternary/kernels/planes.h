/* Activations as three planes of signed bytes, in the order in which lines of t5 weights want them.
 *
 * Layout     A line is a register of sixteen words of W. Words that hold the end of one group and the beginning of the
 *            next occur in it twice or in two lines, so that each copy counts for one group only:
 *              block  groups of 128 only: 832 bytes of a row, 4096 weights, are thirteen lines of 64 bytes, in which
 *                     shared words count for their first group, and one line with nothing but the sixteen shared words,
 *                     for their second. (By luck no two of them lie in the same lane.)
 *              tail   what is left of a row, in lines of 52 bytes, 256 weights: lanes 0..12 hold thirteen words, lanes
 *                     13..15 the shared ones once more. Three of thirteen words are shared in groups of 64: for these
 *                     a block would need as many lines
 *            Line::plane[p][i] holds, where the register has byte b of a group, digit p of the fixed-point number that
 *            meets weight 5b + i of that group, and 0 where the byte counts for the word's other copy or where there is
 *            no weight. Line::start is what the sums of the sixteen lanes begin with: -(sum of the v that a lane
 *            meets), since weights are digit - 1. Lines lie [line][row]; what is missing at the end of k are zeros.
 * Exactness  see accel/fixed_point.h.
 */
#ifndef T5_PLANES_H
#define T5_PLANES_H

#include <accel/fixed_point.h>

#include "problem.h"

namespace t5 {
namespace {

struct Line {
  __m512i plane[3][5];
  __m512i start;
};

/* The lanes of a block and of a line of the tail; SIZE is the group's. */
template <int SIZE>
struct LaneMap {
  static constexpr int kBytes = SIZE / 64 * 13, kLines = 14;
  static constexpr bool kBlocks = SIZE == 128;
  static constexpr int64_t kBlockBytes = 832, kBlockWeights = 4096, kBlockGroups = kBlockWeights / SIZE;
  static constexpr int64_t kTailBytes = 52, kTailWeights = 256, kTailGroups = kTailWeights / SIZE;

  /* Blocks: the first group of a line, and the group of each lane from there on; for the line of shared words from the
   * block's first group on. */
  int32_t base[13];
  alignas(64) int32_t group[kLines][16];
  uint64_t counts[kLines]; /* bytes that count in this line */
  uint16_t shared[13];     /* lanes of line j whose words are repeated in the last line */
  /* The tail: which word each lane holds, its group, and the bytes that count. */
  alignas(64) int32_t tail_word[16];
  alignas(64) int32_t tail_group[16];
  uint64_t tail_counts;

  static constexpr int first_group(int word) { return 4 * word / kBytes; }
  static constexpr int last_group(int word) { return (4 * word + 3) / kBytes; }
  /* Bytes of a word that belong to a group, at lane l. */
  static constexpr uint64_t bytes_of(int word, int group, int l) {
    uint64_t found = 0;
    for (int b = 0; b < 4; ++b) {
      if ((4 * word + b) / kBytes == group) found |= (uint64_t)1 << (4 * l + b);
    }
    return found;
  }

  constexpr LaneMap() : base(), group(), counts(), shared(), tail_word(), tail_group(), tail_counts() {
    for (int d = 0; kBlocks && d < 208; ++d) {
      const int j = d / 16, l = d % 16, first = first_group(d), last = last_group(d);
      if (l == 0) base[j] = first;
      group[j][l] = first - base[j];
      counts[j] |= bytes_of(d, first, l);
      if (first == last) continue;
      shared[j] = (uint16_t)(shared[j] | 1 << l);
      group[13][l] = last;
      counts[13] |= bytes_of(d, last, l);
    }
    int next = 13;
    for (int d = 0; d < 13; ++d) {
      const int first = first_group(d), last = last_group(d);
      tail_word[d] = d;
      tail_group[d] = first;
      tail_counts |= bytes_of(d, first, d);
      if (first == last) continue;
      tail_word[next] = d;
      tail_group[next] = last;
      tail_counts |= bytes_of(d, last, next++);
    }
  }

  static int64_t blocks(int64_t k) { return kBlocks ? k / kBlockWeights : 0; }
  static int64_t lines(int64_t k) {
    return blocks(k) * kLines + ceil_div(k - blocks(k) * kBlockWeights, kTailWeights);
  }
};
template <int SIZE>
constexpr LaneMap<SIZE> kLanes{};

/* From the numbers of a group to those that meet digit i of its bytes. */
template <int SIZE>
struct DigitMap {
  alignas(64) uint8_t from[5][64];
  uint64_t some[5];
  constexpr DigitMap() : from(), some() {
    for (int b = 0; b < LaneMap<SIZE>::kBytes; ++b) {
      for (int i = 0; i < 5 && 5 * b + i < SIZE; ++i) {
        from[i][b] = (uint8_t)(5 * b + i);
        some[i] |= (uint64_t)1 << b;
      }
    }
  }
};
template <int SIZE>
constexpr DigitMap<SIZE> kDigitMap{};

/* Bytes of a plane of a row: as many as the row of W has, and what a load may take too much. */
inline int64_t plane_bytes(int64_t k) { return (k / 64 * kChunkBytes + 64 + 63) / 64 * 64; }

/* The planes of one row in the order of W's bytes: out[p][i] are plane_bytes(k) bytes. */
template <int SIZE>
void make_planes(const float* x, int64_t k, float unit, int8_t* out) {
  const DigitMap<SIZE>& map = kDigitMap<SIZE>;
  const __m512 inverse = _mm512_set1_ps(1.0f / unit);
  const int64_t size = plane_bytes(k), bytes = LaneMap<SIZE>::kBytes;
  for (int64_t g = 0; g < k / SIZE; ++g) {
    alignas(64) int8_t digits[3][SIZE];
    for (int j = 0; j < SIZE; j += 16) {
      const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + g * SIZE + j), inverse));
      accel_fixed::split_digits(v, digits[0] + j, digits[1] + j, digits[2] + j);
    }
    for (int p = 0; p < 3; ++p) {
      const __m512i a = _mm512_load_si512(digits[p]), b = _mm512_load_si512(digits[p] + (SIZE - 64));
      for (int i = 0; i < 5; ++i) {
        const __m512i from = _mm512_load_si512(map.from[i]);
        /* Whatever is written beyond the group, the next group overwrites. */
        _mm512_storeu_si512(out + (5 * p + i) * size + g * bytes,
                            _mm512_maskz_permutex2var_epi8(map.some[i], a, from, b));
      }
    }
  }
}

inline void start_of(Line& line) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i part[3];
  for (int p = 0; p < 3; ++p) {
    part[p] = _mm512_setzero_si512();
    for (int i = 0; i < 5; ++i) part[p] = _mm512_dpbusd_epi32(part[p], ones, line.plane[p][i]);
  }
  const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(part[0], 8), part[1]);
  line.start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_add_epi32(_mm512_slli_epi32(high, 8), part[2]));
}

/* Lines of one row from its planes.
 *   lines  the row's first; `rows` from line to line */
template <int SIZE>
void make_lines(const int8_t* planes, int64_t k, Line* lines, int64_t rows) {
  using M = LaneMap<SIZE>;
  const M& map = kLanes<SIZE>;
  const int64_t size = plane_bytes(k);
  int64_t at = 0;
  for (int64_t block = 0; block < M::blocks(k); ++block, at += M::kBlockBytes, lines += M::kLines * rows) {
    for (int pi = 0; pi < 15; ++pi) {
      __m512i repeated = _mm512_setzero_si512();
      for (int j = 0; j < 13; ++j) {
        const __m512i v = _mm512_loadu_si512(planes + pi * size + at + 64 * j);
        repeated = _mm512_mask_mov_epi32(repeated, map.shared[j], v);
        lines[j * rows].plane[pi / 5][pi % 5] = _mm512_maskz_mov_epi8(map.counts[j], v);
      }
      lines[13 * rows].plane[pi / 5][pi % 5] = _mm512_maskz_mov_epi8(map.counts[13], repeated);
    }
    for (int j = 0; j < M::kLines; ++j) start_of(lines[j * rows]);
  }
  for (const int64_t end = k / 64 * kChunkBytes; at < end; at += M::kTailBytes, lines += rows) {
    const int64_t have = least(M::kTailBytes, end - at);
    for (int pi = 0; pi < 15; ++pi) {
      const __mmask64 there = ((__mmask64)1 << have) - 1;
      const __m512i v = _mm512_maskz_loadu_epi8(there, planes + pi * size + at);
      const __m512i lanes = _mm512_permutexvar_epi32(_mm512_load_si512(map.tail_word), v);
      lines->plane[pi / 5][pi % 5] = _mm512_maskz_mov_epi8(map.tail_counts, lanes);
    }
    start_of(*lines);
  }
}

}  // namespace
}  // namespace t5
#endif
