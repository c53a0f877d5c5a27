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

}  // namespace
}  // namespace accel_lines
#endif /* ACCEL_LINES_H */
