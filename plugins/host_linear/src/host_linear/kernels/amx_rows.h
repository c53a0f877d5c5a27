/* x for the tile products of amx_body.h: rows scaled by powers of two and split into bfloat16 pieces. AVX-512.
 *
 * A float32 number is the sum of three bfloat16 numbers, a float16 number that of two: each piece is the nearest to what
 * the pieces before it left. Tile products take numbers below 2^-126 for zero. So that nothing of x is lost, a row is
 * scaled to a largest number of 2^30 ... 2^31; a row that then still holds something below 2^-100, or NaN or
 * infinity, is not fit for tiles.
 */
#ifndef HOST_LINEAR_AMX_ROWS_H
#define HOST_LINEAR_AMX_ROWS_H

#include "isa_avx512.h"

namespace linear {
namespace {

constexpr int kRows = 16; /* of x at a time */

/* v * 2^exponent. */
inline __m512 times_power(__m512 v, float exponent) {
  return _mm512_maskz_scalef_ps((__mmask16)0xffff, v, _mm512_set1_ps(exponent));
}

/* Up to kRows rows of x. */
struct TileRows {
  const Problem* p;
  int64_t first; /* row of the problem */
  int rows, pieces;
  bool packed;     /* the pieces of all rows share one tile */
  uint32_t* pairs; /* [chunk][piece][16 pairs][rows], packed [chunk][16 pairs][piece][rows]; two bfloat16 numbers each */
  float scale[kRows]; /* a row was multiplied by 2^scale */
  float least[kRows]; /* sums below this may have lost something; infinity if the row is not fit */

  /* Numbers k0 ... k0 + n of row m, with zeros up to a whole chunk. */
  void load(int m, int64_t k0, int64_t n, float* out) const {
    const int64_t stride = p->x->strides[p->x->ndim - 1];
    load_floats<Avx512>(p->x->data, accel_row_offset(p->x, first + m) + k0 * stride, stride, p->x->dtype, out, n);
    for (int64_t j = n; j < round_up(n, kChunk); ++j) out[j] = 0.0f;
  }

  void measure() {
    constexpr int64_t kBlock = 1024;
    alignas(64) float line[kBlock];
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int m = 0; m < kRows; ++m) {
      scale[m] = 0.0f;
      least[m] = 0.0f;
    }
    for (int m = 0; m < rows; ++m) {
      /* Zeros become the largest number of all when one is subtracted. */
      __m512i most = _mm512_setzero_si512(), fewest = _mm512_set1_epi32(-1);
      for (int64_t k0 = 0; k0 < p->k; k0 += kBlock) {
        const int64_t n = min64(kBlock, p->k - k0);
        load(m, k0, n, line);
        for (int64_t k = 0; k < n; k += 16) {
          const __m512i u = _mm512_and_si512(_mm512_load_si512(line + k), magnitude);
          most = _mm512_max_epu32(most, u);
          fewest = _mm512_min_epu32(fewest, _mm512_sub_epi32(u, _mm512_set1_epi32(1)));
        }
      }
      const uint32_t top = _mm512_reduce_max_epu32(most), low = _mm512_reduce_min_epu32(fewest) + 1;
      if (top == 0) continue; /* zeros give zero */
      const float large = accel_float_of_bits(top), small = accel_float_of_bits(low);
      least[m] = kInfinity;
      if (top >= 0x7f800000u) continue;
      scale[m] = 30.0f - exponent(large);
      if (exponent(small) + scale[m] < -100.0f) continue;
      /* What is lost is at most 2^-126 of a weight times x, which is below 2^31, for each k, and 2^-126 of a few sums; it
       * must not be more than 2^-25 of the result. */
      least[m] = (float)p->k * power_of_two(-68);
    }
  }
  static float exponent(float v) { return _mm_cvtss_f32(_mm_getexp_ss(_mm_set_ss(v), _mm_set_ss(v))); }

  /* Chunks c0 ... c1. */
  void split(int64_t c0, int64_t c1) const {
    const __m512i half = _mm512_set1_epi32(0x8000), top = _mm512_set1_epi32((int)0xffff0000u);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    alignas(64) uint32_t piece[3 * kRows][16], zero[16] = {};
    uint32_t* out = pairs + c0 * pieces * 16 * rows;
    for (int64_t c = c0; c < c1; ++c) {
      for (int m = 0; m < rows; ++m) {
        alignas(64) float line[kChunk];
        load(m, c * kChunk, min64(kChunk, p->k - c * kChunk), line);
        __m512 v[2] = {_mm512_load_ps(line), _mm512_load_ps(line + 16)};
        const __m512 a = v[0];
        v[0] = _mm512_permutex2var_ps(a, even, v[1]);
        v[1] = _mm512_permutex2var_ps(a, odd, v[1]);
        for (int h = 0; h < 2; ++h) v[h] = least[m] == kInfinity ? _mm512_setzero_ps() : times_power(v[h], scale[m]);
        for (int q = 0; q < pieces; ++q) {
          __m512i near[2];
          for (int h = 0; h < 2; ++h) {
            near[h] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(v[h]), half), top);
            v[h] = _mm512_sub_ps(v[h], _mm512_castsi512_ps(near[h]));
          }
          _mm512_store_si512(piece[q * rows + m], _mm512_or_si512(_mm512_srli_epi32(near[0], 16), near[1]));
        }
      }
      /* Tiles of x: all pieces, or one. */
      const int wide = packed ? pieces * rows : rows;
      for (int first = 0; first < pieces * rows; first += wide) {
        const uint32_t* from[16];
        __m512i column[16];
        for (int i = 0; i < 16; ++i) from[i] = i < wide ? piece[first + i] : zero;
        accel_lines::transpose16(from, column);
        const __mmask16 have = (__mmask16)((1u << wide) - 1);
        for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(out + first * 16 + i * wide, have, column[i]);
      }
      out += pieces * 16 * rows;
    }
  }
};

}  // namespace
}  // namespace linear
#endif
