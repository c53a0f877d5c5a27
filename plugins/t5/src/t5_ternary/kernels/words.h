/* t5_words: t5 bytes as the 2-bit words of mlx's affine format, whose codes are the digits.
 *
 * Input      0  W  (..., k / 64 * 13) uint8, rows without gaps, any other strides
 * Output     0     (..., k / 16) uint32, code j of a row at bits [2 j, 2 j + 2) of its little-endian words
 * Parameters 0  group (64, 128)
 * Bytes      above 242 give any codes
 * Method     A byte is ten bits by a table; bits are collected in 64 and leave in words.
 */
#ifndef T5_WORDS_H
#define T5_WORDS_H

#include "problem.h"

namespace t5 {
namespace {

struct TenBits {
  uint16_t of[256];
  constexpr TenBits() : of() {
    for (int v = 0; v < 256; ++v) {
      for (int i = 0, rest = v; i < 5; ++i, rest /= 3) of[v] = (uint16_t)(of[v] | rest % 3 << (2 * i));
    }
  }
};
constexpr TenBits kTenBits{};

struct WordsJob {
  const accel_array* w;
  uint32_t* out;
  int64_t groups; /* of a row */

  template <int GROUP>
  static void run(void* arg, int64_t begin, int64_t end) {
    const WordsJob& job = *(const WordsJob*)arg;
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* from = (const uint8_t*)job.w->data + accel_row_offset(job.w, r);
      uint32_t* to = job.out + r * job.groups * (GROUP / 16);
      for (int64_t g = 0; g < job.groups; ++g, from += GROUP / 64 * kChunkBytes) {
        uint64_t bits = 0;
        int have = 0;
#pragma GCC unroll 26
        for (int b = 0; b < GROUP / 64 * (int)kChunkBytes; ++b) {
          bits |= (uint64_t)kTenBits.of[from[b]] << have;
          have += 10;
          if (have >= 32) {
            *to++ = (uint32_t)bits;
            bits >>= 32;
            have -= 32;
          }
        }
      }
    }
  }
};

inline void make_words(const accel_call* call, const accel_array* w, uint32_t* out, int64_t rows, int64_t groups,
                       int64_t group) {
  WordsJob job = {w, out, groups};
  const int64_t grain = ceil_div(1 << 17, groups * group);
  accel_parallel_for(call, rows, grain, group == 64 ? WordsJob::run<64> : WordsJob::run<128>, &job);
}

}  // namespace
}  // namespace t5
#endif
