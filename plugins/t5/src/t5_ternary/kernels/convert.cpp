/* Bytes of t5 as 2-bit words, and whether they are valid: what convert.py does in numpy, for the host's own use.
 *
 * The words are what kernels are verified with, so that nothing of the kernels is used here: a table from a byte to its
 * five digits, made by division, and a stream of bits. Plain functions of the shared library, called through ctypes.
 */
#include <stdint.h>

namespace {

struct Tables {
  uint16_t codes[256]; // ten bits, the first digit lowest; any for bytes above 242
  Tables() {
    for (int byte = 0; byte < 256; ++byte) {
      codes[byte] = 0;
      for (int i = 0, rest = byte; i < 5; ++i, rest /= 3) codes[byte] |= uint16_t(rest % 3 << 2 * i);
    }
  }
};

const Tables tables;

/* A group of SIZE bytes is a stream of 10 * SIZE bits, of which the first 32 * WORDS are weights. */
template <int SIZE, int WORDS>
void to_words(const uint8_t* packed, uint32_t* words, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g, packed += SIZE, words += WORDS) {
    uint64_t bits = 0;
    int held = 0, at = 0;
#pragma GCC unroll 26
    for (int i = 0; i < SIZE; ++i) {
      bits |= uint64_t(tables.codes[packed[i]]) << held;
      held += 10;
      if (held >= 32) {
        words[at++] = uint32_t(bits);
        bits >>= 32;
        held -= 32;
      }
    }
  }
}

/* Groups that are looked at as bytes, whatever group they belong to, before any is looked at alone. */
constexpr int64_t some = 64;

/* Counts groups in which something is wrong: a byte above 242, or a last byte below `padding` or at least `padding` +
 * `real`. Memory is the limit as long as nothing is wrong. */
template <int SIZE>
int64_t faults(const uint8_t* packed, int64_t groups, int padding, int real) {
  int64_t count = 0;
  for (int64_t from = 0; from < groups; from += some, packed += some * SIZE) {
    const int64_t here = groups - from < some ? groups - from : some;
    uint8_t largest = 0, unpadded = 0;
    for (int64_t i = 0; i < here * SIZE; ++i) largest = packed[i] > largest ? packed[i] : largest;
    for (int64_t g = 1; g <= here; ++g) unpadded |= uint8_t(packed[g * SIZE - 1] - padding) >= real;
    if (largest <= 242 && !unpadded) continue;
    for (int64_t g = 0; g < here; ++g) {
      const uint8_t* group = packed + g * SIZE;
      bool wrong = uint8_t(group[SIZE - 1] - padding) >= real;
      for (int i = 0; i < SIZE; ++i) wrong |= group[i] > 242;
      count += wrong;
    }
  }
  return count;
}

} // namespace

#define T5_EXPORT extern "C" __attribute__((visibility("default")))

/* packed: groups of 13 (64 weights) or 26 (128) bytes; words: 4 or 8 for each. */
T5_EXPORT void t5_host_words(const uint8_t* packed, uint32_t* words, int64_t groups, int group_size) {
  group_size == 64 ? to_words<13, 4>(packed, words, groups) : to_words<26, 8>(packed, words, groups);
}

/* How many groups hold something invalid. */
T5_EXPORT int64_t t5_host_faults(const uint8_t* packed, int64_t groups, int group_size) {
  return group_size == 64 ? faults<13>(packed, groups, 81, 81) : faults<26>(packed, groups, 27 + 81, 27);
}
