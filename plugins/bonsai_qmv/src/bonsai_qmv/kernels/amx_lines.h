/* Sixteen lines of sixteen words on their way to the other side, in two halves: after the first their quarters are
 * together, from each of which the second makes four words in the order of the line. Codes are so ready from the
 * beginning of a line on, and other work goes between the quarters.
 *
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_AMX_LINES_H
#define BONSAI_QMV_AMX_LINES_H

#include <immintrin.h>

#include "planes.h"

namespace bonsai {
namespace {

/* [quarter][i] has the quarters of rows i, 4 + i, 8 + i and 12 + i. */
struct Lines {
  __m512i t[4][4];

  /* Puts in rows i, 4 + i, 8 + i and 12 + i. */
  inline __attribute__((always_inline)) void put(int i, const __m512i (&row)[4]) {
    const __m512i a = _mm512_shuffle_i32x4(row[0], row[1], 0x44), b = _mm512_shuffle_i32x4(row[2], row[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(row[0], row[1], 0xee), d = _mm512_shuffle_i32x4(row[2], row[3], 0xee);
    t[0][i] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[1][i] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[2][i] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[3][i] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }

  /* Those of sixteen rows at `byte`, of which `bytes` are there; zeros behind. Fetches lines at `near` and `far`. */
  inline __attribute__((always_inline)) void load(const uint8_t* const* w, int64_t byte, int64_t bytes, int64_t near,
                                                  int64_t far) {
    const __mmask16 have = bytes >= 64 ? (__mmask16)0xffff : (__mmask16)((1u << (bytes / 4)) - 1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i row[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        row[r] = _mm512_maskz_loadu_epi32(have, w[4 * r + i] + byte);
        __builtin_prefetch(w[4 * r + i] + near);
        __builtin_prefetch(w[4 * r + i] + far, 0, 2);
      }
      put(i, row);
    }
  }

  /* Words 4 * quarter ... 4 * quarter + 3, sixteen rows in the lanes. */
  inline __attribute__((always_inline)) void words(int quarter, __m512i (&word)[4]) const {
    const __m512i* q = t[quarter];
    const __m512i a = _mm512_unpacklo_epi32(q[0], q[1]), b = _mm512_unpackhi_epi32(q[0], q[1]);
    const __m512i c = _mm512_unpacklo_epi32(q[2], q[3]), d = _mm512_unpackhi_epi32(q[2], q[3]);
    word[0] = _mm512_unpacklo_epi64(a, c);
    word[1] = _mm512_unpackhi_epi64(a, c);
    word[2] = _mm512_unpacklo_epi64(b, d);
    word[3] = _mm512_unpackhi_epi64(b, d);
  }
};

/* What is read once for every set of outputs, in as many parts as W is read in. */
struct Soon {
  const char* from;
  int64_t bytes, part; /* of a set; of a part, whole lines, four at most */

  Soon(const void* data, int32_t dtype, int64_t numbers, int64_t parts)
      : from((const char*)data), bytes(numbers * (dtype == ACCEL_FLOAT32 ? 4 : 2)),
        part(bytes > 0 ? min64(ceil_div(bytes, parts * 64), 4) * 64 : 0) {}
  inline __attribute__((always_inline)) void fetch(int64_t set, int64_t i) const {
    const char* at = from + set * bytes + i * part;
    for (int64_t b = 0; b < part; b += 64) __builtin_prefetch(at + b, 0, 2);
  }
};

/* Two halves of sixteen rows each -> [group][output], sixteen groups; group 4 * l + c is where 4 * c + l is. */
inline __attribute__((always_inline)) void halves_to_lanes(const uint16_t* from, int64_t stride, uint16_t (*to)[16]) {
  alignas(64) static constexpr auto together = [] {
    struct { uint16_t at[32]; } o{};
    for (int i = 0; i < 32; ++i) o.at[i] = (uint16_t)(i / 2 + i % 2 * 16);
    return o;
  }();
  const __m512i order = _mm512_load_si512(together.at);
  __m512i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i, from += 2 * stride) {
    const __m256i first = _mm256_loadu_si256((const __m256i*)from);
    const __m256i second = _mm256_loadu_si256((const __m256i*)(from + stride));
    a[i] = _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm512_store_si512(to[4 * c], _mm512_permutex2var_epi64(a[c], low, a[4 + c]));
    _mm512_store_si512(to[4 * c + 2], _mm512_permutex2var_epi64(a[c], high, a[4 + c]));
  }
}

/* Scales or biases of `groups` groups, sixteen at most, from g0 on, of outputs n0 ... n0 + 15 of n, as [group][output];
 * zeros behind them. */
__attribute__((noinline)) inline void scales_to_lanes(const void* from, int32_t dtype, const int64_t* stride, int64_t n,
                                                      int64_t n0, int64_t g0, int64_t groups, float (*to)[16]) {
  if (dtype != ACCEL_FLOAT32 && stride[1] == 1 && groups == 16 && n0 + 16 <= n) {
    alignas(64) uint16_t half[16][16];
    halves_to_lanes((const uint16_t*)from + n0 * stride[0] + g0, stride[0], half);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
      const __m256i h = _mm256_load_si256((const __m256i*)half[g % 4 * 4 + g / 4]);
      _mm512_store_ps(to[g], dtype == ACCEL_FLOAT16
                                 ? _mm512_cvtph_ps(h)
                                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)));
    }
    return;
  }
  Lines lines;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int64_t at = min64(n0 + 4 * r + i, n - 1) * stride[0] + g0 * stride[1];
      row[r] = _mm512_castps_si512(some_floats(from, dtype, at, stride[1], groups));
    }
    lines.put(i, row);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    __m512i word[4];
    lines.words(q, word);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_store_si512(to[4 * q + j], word[j]);
  }
}

}  // namespace
}  // namespace bonsai
#endif
