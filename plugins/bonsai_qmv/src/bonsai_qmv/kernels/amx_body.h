/* y = x @ W.T (+ bias) for many rows of x by integer tile products: 1 to 6 and 8 bits, AMX-INT8.
 *
 * Layout     W as in qmv_body.h; a stretch is 64 codes of a row of W, 8 * bits bytes.
 * Rows       any number; meant for more than 16.
 * Exactness  rounding. x enters as fixed point of 24 bits per row, three planes of signed digits (planes.h). The sums of
 *            (code - center) * digit over a group are exact integers; the three of them become one float32 with one
 *            rounding each, are multiplied by the group's scale and collected over the groups in float32, together with
 *            (bias + center * scale) * sum(v). Rows of x that do not fit fixed point take the float32 kernel, alone.
 * Rows       Results depend on nothing but the row, the weights and the group.
 * Method     Sixteen rows of W, unpacked once per block of rows of x to bytes in the order in which shifts and masks
 *            deliver them, are the left tile; sixteen rows of x, as groups of four digits, the right. A tile product of
 *            64 k takes 16 cycles for 16384 multiply-adds, three of them make up a group of 64. The sums leave the
 *            tiles after each group and are scaled in vector registers, sixteen rows of x in the lanes, while the next
 *            groups are multiplied. Tiles are loaded faster than the second-level cache delivers them: kTileDepth numbers of
 *            sixteen rows of x stay in the first-level cache while sixteen rows of W after the other pass by. The block
 *            of rows of x and that of rows of W are what the second-level cache holds.
 * Source     Written for this library; tile instructions as in Intel's architecture manuals.
 */
#ifndef BONSAI_QMV_AMX_BODY_H
#define BONSAI_QMV_AMX_BODY_H

#include <accel/amx.h>

#include "vnni_body.h"

namespace bonsai {
namespace {

using accel_amx::TileConfig;
using accel_amx::tile_configure;
using accel_amx::tile_load;
using accel_amx::tile_multiply_mixed;
using accel_amx::tile_multiply_signed;
using accel_amx::tile_release;
using accel_amx::tile_store;
using accel_amx::tile_zero;

/* Digits of a block of rows of x and codes of a block of rows of W, both in the second-level cache. */
constexpr int64_t kBlockBytes = 1 << 20, kCodeBytes = 1 << 18;
/* Along k, in the first-level cache: 24 KB of digits. */
constexpr int64_t kTileDepth = 512;

/* Tiles 0..2 are sums, 3 and 4 codes, 5..7 digits. */
#define BONSAI_TILES(T)                                                                   \
  {1, 0, {0}, {64, 64, 64, T, T, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0},                     \
   {16, 16, 16, 16, 16, T / 4, T / 4, T / 4, 0, 0, 0, 0, 0, 0, 0, 0}}
const TileConfig kTiles[2] = {BONSAI_TILES(32), BONSAI_TILES(64)};
#undef BONSAI_TILES

/* The order of the 64 codes of a stretch. Position q of a tile row holds code `code[q]`; codes of 1, 2, 4 and 8 bits are
 * brought there by moving byte `byte[q]` and shifting 16-bit lanes by `shift`, the others by gathering each eight codes
 * in one 64-bit lane and picking bits. A group of 32 has its own half. */
struct Order {
  alignas(64) uint8_t code[64], byte[64];
  alignas(64) uint16_t shift[32];
  Order(int bits, int group) {
    const bool whole = 8 % bits == 0;
    const int t = group < 64 ? group : 64, steps = whole ? 8 / bits : 1, chunk = t / steps;
    for (int q = 0; q < 64; ++q) {
      const int half = q / t, i = q % t / chunk, at = q % t % chunk;
      code[q] = (uint8_t)(half * t + at * steps + i);
      byte[q] = (uint8_t)(whole ? half * chunk + at : q % 8 < bits ? q / 8 * bits + q % 8 : 0);
      if (q % 2 == 0) shift[q / 2] = (uint16_t)(i * bits);
    }
  }
};

struct AmxJob {
  const Problem* p;
  const Order* order;
  float* unit; /* per row of x; 0 where it does not fit */
  float of_one; /* of unit_of */
  int64_t m0, rows, tiles; /* the rows at work, sixteen to a tile */
  int64_t stretches, groups; /* groups: of scales as they are used, not less than there are */
  int expand;                /* log2 of uses per scale */
  int8_t* x;      /* [tile][stretch][plane][16 groups of four][16 rows][4] */
  float* totals;  /* [tile][group][16 rows] */
  accel_slots::Slots slots;
};

/* Are rows fit for fixed point? */
inline void amx_units(void* arg, int64_t begin, int64_t end) {
  const AmxJob& job = *(const AmxJob*)arg;
  const Problem& p = *job.p;
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  const int32_t slot = job.slots.take();
  float* line = job.slots.of(slot);
  for (int64_t m = begin; m < end; ++m) {
    load_floats<Avx512>(p.x->data, accel_row_offset(p.x, m), stride, p.x->dtype, line, p.k);
    job.unit[m] = unit_of(line, p.k, p.group, p.spread, p.zeros, job.of_one);
  }
  job.slots.give(slot);
}

/* Digits and totals of tiles of sixteen rows. */
inline void amx_digits(void* arg, int64_t begin, int64_t end) {
  const AmxJob& job = *(const AmxJob*)arg;
  const Problem& p = *job.p;
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  const __m512i order = _mm512_load_si512(job.order->code);
  for (int64_t tile = begin; tile < end; ++tile) {
    int8_t* out = job.x + tile * job.stretches * 3072;
    float* totals = job.totals + tile * job.groups * 16;
    int64_t offset[16];
    bool used[16];
    float inverse[16];
    __m512i sum[16];
    for (int i = 0; i < 16; ++i) {
      const int64_t m = tile * 16 + i;
      used[i] = m < job.rows && job.unit[job.m0 + m] != 0;
      offset[i] = used[i] ? accel_row_offset(p.x, job.m0 + m) : 0;
      inverse[i] = used[i] ? 1.0f / job.unit[job.m0 + m] : 0;
      sum[i] = _mm512_setzero_si512();
    }
    for (int64_t s = 0; s < job.stretches; ++s, out += 3072) {
      alignas(64) int8_t row[3][16][64];
      const int64_t k0 = s * 64, depth = min64(64, p.k - k0);
      for (int i = 0; i < 16; ++i) {
        if (!used[i]) {
          for (int q = 0; q < 3; ++q) _mm512_store_si512(row[q][i], _mm512_setzero_si512());
          for (int64_t g = k0 / p.group; g * p.group < k0 + depth; ++g) totals[g * 16 + i] = 0;
          continue;
        }
        alignas(64) float line[64];
        const float* x = line;
        if (p.x->dtype == ACCEL_FLOAT32 && stride == 1 && depth == 64) {
          x = (const float*)p.x->data + offset[i] + k0;
        } else {
          for (int64_t k = depth; k < 64; ++k) line[k] = 0;
          load_floats<Avx512>(p.x->data, offset[i] + k0 * stride, stride, p.x->dtype, line, depth);
        }
        alignas(64) int8_t digits[3][64];
        const __m512 scale = _mm512_set1_ps(inverse[i]);
        for (int j = 0; j < 64; j += 16) {
          const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + j), scale));
          split_digits(v, digits[0] + j, digits[1] + j, digits[2] + j);
          sum[i] = _mm512_add_epi32(sum[i], v);
          if ((k0 + j + 16) % p.group == 0 && k0 + j < p.k) {
            totals[(k0 + j) / p.group * 16 + i] = (float)_mm512_reduce_add_epi32(sum[i]);
            sum[i] = _mm512_setzero_si512();
          }
        }
        for (int q = 0; q < 3; ++q) {
          _mm512_store_si512(row[q][i], _mm512_permutexvar_epi8(order, _mm512_load_si512(digits[q])));
        }
      }
      for (int q = 0; q < 3; ++q) {
        const uint8_t* rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = (const uint8_t*)row[q][i];
        transpose16(rows, (__m512i*)(out + q * 1024));
      }
    }
  }
}

/* Codes of sixteen rows, minus the center: [stretch][16 rows][64]. */
template <int BITS>
void amx_codes(const AmxJob& job, int64_t n0, int8_t* out) {
  const Problem& p = *job.p;
  const __m512i byte = _mm512_load_si512(job.order->byte), shift = _mm512_load_si512(job.order->shift);
  const __m512i mask = _mm512_set1_epi8((char)((1u << BITS) - 1)), center = _mm512_set1_epi8((char)kCenter<BITS>);
  const __m512i pick = _mm512_set1_epi64((long long)(0x0706050403020100ull * BITS));
  for (int64_t s = 0; s < job.stretches; ++s) {
    const int64_t bytes = min64(64, p.k - s * 64) * BITS / 8;
    const __mmask64 have = bytes == 64 ? ~0ull : (1ull << bytes) - 1;
    for (int r = 0; r < 16; ++r, out += 64) {
      const uint8_t* w = p.w + min64(n0 + r, p.n - 1) * p.w_stride + s * 8 * BITS;
      __m512i c = _mm512_permutexvar_epi8(byte, _mm512_maskz_loadu_epi8(have, w));
      if constexpr (8 % BITS != 0) {
        c = _mm512_and_si512(_mm512_multishift_epi64_epi8(pick, c), mask);
      } else if constexpr (BITS != 8) {
        c = _mm512_and_si512(_mm512_srlv_epi16(c, shift), mask);
      }
      _mm512_store_si512(out, _mm512_sub_epi8(c, center));
    }
  }
}

/* Scales, or what comes to them, of sixteen rows: [group][16]. */
inline void amx_lanes(const AmxJob& job, const void* from, int32_t dtype, const int64_t* stride, int64_t n0,
                      float* out) {
  alignas(64) float block[16][16];
  const int64_t groups = job.p->k / job.p->group;
  for (int64_t g = 0; g < groups; g += 16) {
    const int64_t n = min64(16, groups - g);
    const uint8_t* rows[16];
    for (int r = 0; r < 16; ++r) {
      const int64_t at = min64(n0 + r, job.p->n - 1) * stride[0] + (g)*stride[1];
      _mm512_store_ps(block[r], some_floats(from, dtype, at, stride[1], n));
      rows[r] = (const uint8_t*)block[r];
    }
    __m512i lanes[16];
    transpose16(rows, lanes);
    for (int64_t i = 0; i < n; ++i) _mm512_store_si512(out + (g + i) * 16, lanes[i]);
  }
}

/* Each of `count` vectors of sixteen 2^expand times. */
inline void amx_expand(float* lanes, int64_t count, int expand) {
  for (int64_t g = count << expand; expand && g-- > 0;) {
    _mm512_store_ps(lanes + g * 16, _mm512_load_ps(lanes + (g >> expand) * 16));
  }
}

/* Scales of sixteen rows, and what comes to them, bias + center * scale; false if that is nothing, everywhere. */
template <int BITS>
bool amx_scales(const AmxJob& job, int64_t n0, float* scale, float* offset) {
  const Problem& p = *job.p;
  const int64_t groups = p.k / p.group;
  const bool has_offset = !p.symmetric || (float)kCenter<BITS> != p.ratio;
  amx_lanes(job, p.scales, p.s_dtype, p.s_stride, n0, scale);
  if (has_offset) {
    if (!p.symmetric) amx_lanes(job, p.biases, p.b_dtype, p.b_stride, n0, offset);
    const __m512 center = _mm512_set1_ps((float)kCenter<BITS> - p.ratio);
    for (int64_t i = 0; i < groups * 16; i += 16) {
      const __m512 b = p.symmetric ? _mm512_setzero_ps() : _mm512_load_ps(offset + i);
      _mm512_store_ps(offset + i, _mm512_fmadd_ps(center, _mm512_load_ps(scale + i), b));
    }
    amx_expand(offset, groups, job.expand);
  }
  amx_expand(scale, groups, job.expand);
  return has_offset;
}

/* acc[n] += scale of (n, g) * sums, sixteen rows of x in the lanes. */
inline __attribute__((always_inline)) void amx_collect(const int32_t (*sums)[16][16], const float* scale,
                                                       const float* offset, const float* totals, __m512 (&acc)[16]) {
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n) {
    const __m512i hi = _mm512_load_si512(sums[0][n]), mid = _mm512_load_si512(sums[1][n]);
    const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), mid));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2][n]));
    const __m512 all = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
    acc[n] = _mm512_fmadd_ps(all, _mm512_set1_ps(scale[n]), acc[n]);
  }
  if (offset) {
    const __m512 t = _mm512_load_ps(totals);
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) acc[n] = _mm512_fmadd_ps(t, _mm512_set1_ps(offset[n]), acc[n]);
  }
}

/* Continues the sums of sixteen outputs of sixteen rows over groups g0 ... g1. GROUP 128 is two tile products, 32 half a
 * one. */
template <int GROUP>
void amx_tile(const int8_t* codes, const int8_t* x, int64_t g0, int64_t g1, const float* scale, const float* offset,
              const float* totals, float (*out)[16]) {
  /* Sums are collected two groups later: stores of tiles take long to be seen by loads. */
  alignas(64) int32_t sums[3][3][16][16];
  __m512 acc[16];
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n) acc[n] = g0 ? _mm512_load_ps(out[n]) : _mm512_setzero_ps();
  for (int64_t g = g0; g < g1; ++g) {
    const int64_t s = g * GROUP / 64, part = GROUP == 32 ? g % 2 : 0;
    const int8_t *a = codes + s * 1024 + part * 32, *b = x + s * 3072 + part * 512;
    int32_t(*to)[16][16] = sums[g % 3];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_loadd(3, a, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbssd(0, 3, 5);
    _tile_loadd(6, b + 1024, 64);
    _tile_dpbssd(1, 3, 6);
    _tile_loadd(7, b + 2048, 64);
    _tile_dpbssd(2, 3, 7);
    if constexpr (GROUP == 128) {
      _tile_loadd(4, a + 1024, 64);
      _tile_loadd(5, b + 3072, 64);
      _tile_dpbssd(0, 4, 5);
      _tile_loadd(6, b + 4096, 64);
      _tile_dpbssd(1, 4, 6);
      _tile_loadd(7, b + 5120, 64);
      _tile_dpbssd(2, 4, 7);
    }
    if (g - g0 >= 2) {
      const int64_t h = (g - 2) * 16;
      amx_collect(sums[(g - 2) % 3], scale + h, offset ? offset + h : NULL, totals + h, acc);
    }
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
    _tile_stored(2, to[2], 64);
  }
  for (int64_t g = g1 - g0 >= 2 ? g1 - 2 : g0; g < g1; ++g) {
    const int64_t h = g * 16;
    amx_collect(sums[g % 3], scale + h, offset ? offset + h : NULL, totals + h, acc);
  }
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n) _mm512_store_ps(out[n], acc[n]);
}

/* y of sixteen outputs of the rows of one tile. */
inline void amx_finish(const AmxJob& job, int64_t tile, int64_t n0, const float (*sums)[16]) {
  const Problem& p = *job.p;
  const int64_t columns = min64(16, p.n - n0);
  const __mmask16 have = (__mmask16)((1u << columns) - 1);
  __m512 bias = _mm512_setzero_ps();
  if (p.bias) bias = some_floats(p.bias->data, p.bias->dtype, n0 * p.bias->strides[0], p.bias->strides[0], columns);
  const uint8_t* rows[16];
  for (int n = 0; n < 16; ++n) rows[n] = (const uint8_t*)sums[n];
  __m512i out[16];
  transpose16(rows, out);
  for (int64_t m = 0; m < min64(16, job.rows - tile * 16); ++m) {
    const float unit = job.unit[job.m0 + tile * 16 + m];
    if (unit == 0) continue; /* left to the float32 kernel */
    __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(out[m]), _mm512_set1_ps(unit));
    if (p.bias) v = _mm512_add_ps(v, bias);
    const int64_t at = (job.m0 + tile * 16 + m) * p.n + n0;
    store16(p.y, p.y_dtype, at, have, v);
  }
}

/* Tiles of sixteen outputs, all rows at work. */
template <int BITS>
void amx_run(void* arg, int64_t begin, int64_t end) {
  const AmxJob& job = *(const AmxJob*)arg;
  const Problem& p = *job.p;
  const int32_t slot = job.slots.take();
  const int64_t count = end - begin, lanes = job.groups * 16, depth = kTileDepth / p.group;
  int8_t* codes = (int8_t*)job.slots.of(slot);
  float *scale = (float*)(codes + count * job.stretches * 1024), *offset = scale + count * lanes;
  float(*sums)[16] = (float(*)[16])(offset + count * lanes);
  bool has_offset = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n0 = (begin + i) * 16;
    amx_codes<BITS>(job, n0, codes + i * job.stretches * 1024);
    has_offset = amx_scales<BITS>(job, n0, scale + i * lanes, offset + i * lanes);
  }
  tile_configure(kTiles[p.group != 32]);
  for (int64_t tile = 0; tile < job.tiles; ++tile) {
    const int8_t* x = job.x + tile * job.stretches * 3072;
    const float* totals = job.totals + tile * lanes;
    for (int64_t g = 0; g < job.groups; g += depth) {
      const int64_t stop = min64(g + depth, job.groups);
      for (int64_t i = 0; i < count; ++i) {
        const int8_t* c = codes + i * job.stretches * 1024;
        const float *s = scale + i * lanes, *o = has_offset ? offset + i * lanes : NULL;
        switch (p.group) {
          case 32: amx_tile<32>(c, x, g, stop, s, o, totals, sums + i * 16); break;
          case 64: amx_tile<64>(c, x, g, stop, s, o, totals, sums + i * 16); break;
          default: amx_tile<128>(c, x, g, stop, s, o, totals, sums + i * 16);
        }
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
