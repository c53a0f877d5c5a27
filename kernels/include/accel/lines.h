/* accel/lines.h: sixteen numbers at a time, for kernels that hold them in one register. C++17, AVX-512 F, BW, VL.
 */
#ifndef ACCEL_LINES_H
#define ACCEL_LINES_H

#include <accel/half.h>
#include <immintrin.h>

namespace accel_lines {
namespace {

/* out[j] holds word j of each of sixteen rows of sixteen words. */
template <class Row>
void transpose16(Row* const* rows, __m512i* out) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i p = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), q = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    const __m512i r = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd), s = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(p, q, 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(p, q, 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(r, s, 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(r, s, 0xdd);
  }
}

/* Sixteen neighbours of y from element `at` on, those that `have` names, as float32, float16 or bfloat16. */
inline void store16(void* y, int32_t dtype, int64_t at, __mmask16 have, __m512 v) {
  if (dtype == ACCEL_FLOAT32) {
    _mm512_mask_storeu_ps((float*)y + at, have, v);
  } else if (dtype == ACCEL_FLOAT16) {
    _mm256_mask_storeu_epi16((uint16_t*)y + at, have, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  } else {
    alignas(64) float values[16];
    _mm512_store_ps(values, v);
    for (int c = 0; c < 16; ++c) {
      if (have >> c & 1) ((uint16_t*)y)[at + c] = accel_bfloat_from_float(values[c]);
    }
  }
}

/* Up to sixteen numbers `stride` apart from element `at` on, of any float dtype; zeros beyond n. */
inline __m512 some_floats(const void* from, int32_t dtype, int64_t at, int64_t stride, int64_t n) {
  const __mmask16 have = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  if (stride == 1) {
    if (dtype == ACCEL_FLOAT16) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(have, (const uint16_t*)from + at));
    if (dtype == ACCEL_FLOAT32) return _mm512_maskz_loadu_ps(have, (const float*)from + at);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(have, (const uint16_t*)from + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  alignas(64) float v[16] = {0};
  for (int64_t i = 0; i < n && i < 16; ++i) v[i] = accel_load_float(from, at + i * stride, dtype);
  return _mm512_load_ps(v);
}

/* Sixteen rows of sixteen words on their way to the other side, in two halves, so that other work goes between the
 * quarters: [quarter][i] has the quarters of rows i, 4 + i, 8 + i and 12 + i. */
struct Square {
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

  /* Words 4 * quarter ... 4 * quarter + 3, sixteen rows in the lanes. */
  inline __attribute__((always_inline)) void words(int quarter, __m512i* word) const {
    const __m512i* q = t[quarter];
    const __m512i a = _mm512_unpacklo_epi32(q[0], q[1]), b = _mm512_unpackhi_epi32(q[0], q[1]);
    const __m512i c = _mm512_unpacklo_epi32(q[2], q[3]), d = _mm512_unpackhi_epi32(q[2], q[3]);
    word[0] = _mm512_unpacklo_epi64(a, c);
    word[1] = _mm512_unpackhi_epi64(a, c);
    word[2] = _mm512_unpacklo_epi64(b, d);
    word[3] = _mm512_unpackhi_epi64(b, d);
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
  Square square;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int64_t at = (n0 + 4 * r + i < n ? n0 + 4 * r + i : n - 1) * stride[0] + g0 * stride[1];
      row[r] = _mm512_castps_si512(some_floats(from, dtype, at, stride[1], groups));
    }
    square.put(i, row);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    __m512i word[4];
    square.words(q, word);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_store_si512(to[4 * q + j], word[j]);
  }
}

}  // namespace
}  // namespace accel_lines
#endif /* ACCEL_LINES_H */
