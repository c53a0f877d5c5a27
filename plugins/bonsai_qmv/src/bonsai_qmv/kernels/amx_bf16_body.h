/* y = x @ W.T (+ bias) for many rows of x by bfloat16 tile products, AMX-BF16: groups of 32, and others where
 * rows of x do not fit fixed point.
 *
 * Layout     W as in amx_body.h.
 * Rows       any number; meant for more than 16.
 * Exactness  rounding. A code minus the center has at most 8 bits and is a bfloat16 number exactly; a float32 x is the
 *            sum of three bfloat16 numbers exactly (8 bits of its 24 each, cut off, not rounded). The products are exact,
 *            their sum over 32 numbers is one of 96 terms in float32 inside the tile, and from there on everything is
 *            as with integers, 32 numbers at a time. Rows of x with NaN, infinity or next to nothing in them take the float32 kernel.
 * Rows       Results depend on nothing but the row, the weights and the group.
 * Method     A group of 32 fills half of an integer tile, whose product takes no less time, and its three sums have to
 *            be taken out and put together; of bfloat16 it fills a whole one, and the three pieces of x share one sum.
 * Source     Written for this library; splitting a float32 in three bfloat16 is common practice.
 */
#ifndef BONSAI_QMV_AMX_BF16_BODY_H
#define BONSAI_QMV_AMX_BF16_BODY_H

#include "amx_body.h"

namespace bonsai {
namespace {

/* Along k, so that 24 KB of x stay in the first-level cache. */
constexpr int64_t kPieceDepth = 256;

/* A group is one of 32 here, whatever the scales' are. Pieces of tiles of sixteen rows, [tile][group][piece][16 pairs][16 rows][2], and totals. */
inline void bf16_pieces(void* arg, int64_t begin, int64_t end) {
  const AmxJob& job = *(const AmxJob*)arg;
  const Problem& p = *job.p;
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  alignas(64) int32_t code[32];
  for (int q = 0; q < 32; ++q) code[q] = job.order->code[q];
  const __m512i first = _mm512_load_si512(code), second = _mm512_load_si512(code + 16);
  const __m512i high_half = _mm512_set1_epi32((int32_t)0xffff0000u);
  for (int64_t tile = begin; tile < end; ++tile) {
    uint16_t* out = (uint16_t*)job.x + tile * job.groups * 1536;
    float* totals = job.totals + tile * job.groups * 16;
    int64_t offset[16];
    bool used[16];
    for (int i = 0; i < 16; ++i) {
      const int64_t m = tile * 16 + i;
      used[i] = m < job.rows && job.unit[job.m0 + m] != 0;
      offset[i] = used[i] ? accel_row_offset(p.x, job.m0 + m) : 0;
    }
    for (int64_t g = 0; g < job.groups; ++g, out += 1536) {
      alignas(64) uint16_t piece[3][16][32];
      for (int i = 0; i < 16; ++i) {
        alignas(64) float line[32];
        const float* x = line;
        if (!used[i]) {
          _mm512_store_ps(line, _mm512_setzero_ps());
          _mm512_store_ps(line + 16, _mm512_setzero_ps());
        } else if (p.x->dtype == ACCEL_FLOAT32 && stride == 1) {
          x = (const float*)p.x->data + offset[i] + g * 32;
        } else {
          load_floats<Avx512>(p.x->data, offset[i] + g * 32 * stride, stride, p.x->dtype, line, 32);
        }
        const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        totals[g * 16 + i] = _mm512_reduce_add_ps(_mm512_add_ps(a, b));
        __m512 v[2] = {_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b)};
        for (int q = 0; q < 3; ++q) {
          for (int h = 0; h < 2; ++h) {
            const __m512i top = _mm512_and_si512(_mm512_castps_si512(v[h]), high_half);
            _mm256_store_si256((__m256i*)(piece[q][i] + 16 * h), _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16)));
            v[h] = _mm512_sub_ps(v[h], _mm512_castsi512_ps(top));
          }
        }
      }
      for (int q = 0; q < 3; ++q) {
        const uint8_t* rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = (const uint8_t*)piece[q][i];
        transpose16(rows, (__m512i*)(out + q * 512));
      }
    }
  }
}

/* Codes of sixteen rows minus the center, [group][16 rows][32]; `bytes` is room for amx_codes. */
template <int BITS>
void bf16_codes(const AmxJob& job, int64_t n0, int8_t* bytes, uint16_t* out) {
  amx_codes<BITS>(job, n0, bytes);
  for (int64_t g = 0; g < job.groups; ++g) {
    const int8_t* from = bytes + g / 2 * 1024 + g % 2 * 32;
    for (int r = 0; r < 16; ++r, from += 64, out += 32) {
      for (int h = 0; h < 32; h += 16) {
        const __m512 f = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)(from + h))));
        const __m512i top = _mm512_srli_epi32(_mm512_castps_si512(f), 16);
        _mm256_store_si256((__m256i*)(out + h), _mm512_cvtepi32_epi16(top));
      }
    }
  }
}

/* Continues the sums of sixteen outputs of sixteen rows over groups g0 ... g1. */
inline void bf16_tile(const uint16_t* codes, const uint16_t* x, int64_t g0, int64_t g1, const float* scale,
                      const float* offset, const float* totals, float (*out)[16]) {
  alignas(64) float sums[3][16][16];
  __m512 acc[16];
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n) acc[n] = g0 ? _mm512_load_ps(out[n]) : _mm512_setzero_ps();
  auto collect = [&](int64_t g) __attribute__((always_inline)) {
    const float(*from)[16] = sums[g % 3];
    const float* s = scale + g * 16;
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) acc[n] = _mm512_fmadd_ps(_mm512_load_ps(from[n]), _mm512_set1_ps(s[n]), acc[n]);
    if (!offset) return;
    const __m512 t = _mm512_load_ps(totals + g * 16);
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) acc[n] = _mm512_fmadd_ps(t, _mm512_set1_ps(offset[g * 16 + n]), acc[n]);
  };
  for (int64_t g = g0; g < g1; ++g) {
    const uint16_t* b = x + g * 1536;
    _tile_zero(0);
    _tile_loadd(3, codes + g * 512, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 3, 5);
    _tile_loadd(6, b + 512, 64);
    _tile_dpbf16ps(0, 3, 6);
    _tile_loadd(7, b + 1024, 64);
    _tile_dpbf16ps(0, 3, 7);
    if (g - g0 >= 2) collect(g - 2);
    _tile_stored(0, sums[g % 3], 64);
  }
  for (int64_t g = g1 - g0 >= 2 ? g1 - 2 : g0; g < g1; ++g) collect(g);
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n) _mm512_store_ps(out[n], acc[n]);
}

/* Tiles of sixteen outputs, all rows at work. */
template <int BITS>
void bf16_run(void* arg, int64_t begin, int64_t end) {
  const AmxJob& job = *(const AmxJob*)arg;
  const Problem& p = *job.p;
  const int32_t slot = job.slots.take();
  const int64_t count = end - begin, lanes = job.groups * 16, depth = kPieceDepth / 32, words = job.groups * 512;
  uint16_t* codes = (uint16_t*)job.slots.of(slot);
  float* scale = (float*)(codes + count * words);
  float *offset = scale + count * lanes, *after = offset + count * lanes;
  float(*sums)[16] = (float(*)[16])after;
  int8_t* bytes = (int8_t*)(after + count * 256);
  bool has_offset = false;
  for (int64_t i = 0; i < count; ++i) {
    bf16_codes<BITS>(job, (begin + i) * 16, bytes, codes + i * words);
    has_offset = amx_scales<BITS>(job, (begin + i) * 16, scale + i * lanes, offset + i * lanes);
  }
  tile_configure(kTiles[1]);
  for (int64_t tile = 0; tile < job.tiles; ++tile) {
    const uint16_t* x = (const uint16_t*)job.x + tile * job.groups * 1536;
    const float* totals = job.totals + tile * lanes;
    for (int64_t g = 0; g < job.groups; g += depth) {
      const int64_t stop = min64(g + depth, job.groups);
      for (int64_t i = 0; i < count; ++i) {
        bf16_tile(codes + i * words, x, g, stop, scale + i * lanes, has_offset ? offset + i * lanes : NULL, totals,
                  sums + i * 16);
      }
    }
    for (int64_t i = 0; i < count; ++i) amx_finish(job, tile, (begin + i) * 16, sums + i * 16);
  }
  tile_release();
  job.slots.give(slot);
}

}  // namespace
}  // namespace bonsai
#endif
