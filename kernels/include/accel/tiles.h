/* accel/tiles.h: y = x @ W.T (+ bias) for many rows of x by integer tile products. C++17, AVX-512 with VBMI, AMX-INT8.
 *
 *     accel_tiles::run<Isa, GROUP>(product, weights, spread, zeros, unit);
 *
 * For weights that are scale * code, one scale for GROUP codes along k, codes small signed integers that are cheap to
 * unpack.
 *
 * GROUP        64 or 128; k is a multiple of it
 * Isa          widen(const uint16_t*, dtype, float*, n): half-precision numbers to floats; may write up to the next
 *              multiple of 16
 * weights      order[GROUP]: which weight of a group stands at each place; 64 places are a stretch
 *              codes(n0, int8_t* out): codes of sixteen rows of W from n0 on, [stretch][16 rows][64], in that order.
 *              What lies behind the last row may be anything. Called from several threads, as scales is
 *              scales(n0, float* out): their scales, [group][16 rows]; see `lanes`
 * spread, zeros  of the weights, for accel_fixed::unit_of
 * unit         per row of x, written: 0 for rows that do not fit fixed point. They are not computed
 * Rows         any. Results depend on nothing but the row, the weights and the group.
 * Exactness    class `rounding`. x enters as fixed point of 24 bits per row, three planes of signed digits
 *              (accel/fixed_point.h). Sums of code * digit over a group are exact integers; the three of them become
 *              one float32 with one rounding each and are collected over the groups, times scales, in float32.
 * Method       Sixteen rows of W, unpacked once per block of rows of x, are the left tile; sixteen rows of x, as fours
 *              of digits, the right. The sums leave the tiles after each group and are scaled in vector registers,
 *              sixteen rows of x in the lanes, while the next groups are multiplied. Tiles are loaded faster than the
 *              second-level cache delivers them: kDepth numbers of sixteen rows of x stay in the first-level cache
 *              while one sixteen rows of W after the other pass by. The block of rows of x and that of rows of W are
 *              what the second-level cache holds.
 * Source       Written for this library; tile instructions as in Intel's architecture manuals.
 */
#ifndef ACCEL_TILES_H
#define ACCEL_TILES_H

#include <accel/fixed_point.h>
#include <accel/gemm.h>
#include <accel/lines.h>

namespace accel_tiles {
namespace {

using accel_gemm::ceil_div;
using accel_gemm::least;
using accel_gemm::load_floats;
using accel_gemm::Product;
using accel_lines::transpose16;

/* Digits of a block of rows of x and codes of a block of rows of W, both in the second-level cache. */
constexpr int64_t kBlockBytes = 1 << 20, kCodeBytes = 1 << 18;
/* Numbers along k in the first-level cache: 24 KB of digits. */
constexpr int64_t kDepth = 512;

/* What LDTILECFG reads: tiles 0..2 sums, 3 and 4 codes, 5..7 digits, all of sixteen rows of 64 bytes. In static memory,
 * since compilers take it for a read of eight bytes and would not store the rest. */
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
alignas(64) const Config kConfig = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* Scales (n, groups) of any float dtype and strides: those of rows n0 ... n0 + 15 as [group][16]. Rows beyond n repeat
 * the last. */
template <class Isa>
void lanes(const void* from, int32_t dtype, const int64_t* stride, int64_t n, int64_t groups, int64_t n0, float* out) {
  alignas(64) float block[16][16] = {};
  for (int64_t g = 0; g < groups; g += 16) {
    const int64_t some = least(16, groups - g);
    const void* rows[16];
    for (int r = 0; r < 16; ++r) {
      load_floats<Isa>(from, least(n0 + r, n - 1) * stride[0] + g * stride[1], stride[1], dtype, block[r], some);
      rows[r] = block[r];
    }
    __m512i columns[16];
    transpose16(rows, columns);
    for (int64_t i = 0; i < some; ++i) _mm512_store_si512(out + (g + i) * 16, columns[i]);
  }
}

template <class Isa, int GROUP, class Weights>
struct Job {
  static constexpr int kStretches = GROUP / 64; /* of a group */
  const Product* p;
  const Weights* weights;
  float* unit; /* per row of x; 0 where it does not fit */
  float spread, zeros;
  int64_t m0, rows, tiles; /* the rows at work, sixteen to a tile */
  int64_t stretches, groups;
  int8_t* x; /* [tile][stretch][plane][16 fours][16 rows][4] */
  accel_slots::Slots slots;

  static void units(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const Product& p = *job.p;
    const int64_t stride = p.x->strides[p.x->ndim - 1];
    const int32_t slot = job.slots.take();
    float* line = job.slots.of(slot);
    for (int64_t m = begin; m < end; ++m) {
      const int64_t at = accel_row_offset(p.x, m);
      const bool ready = p.x->dtype == ACCEL_FLOAT32 && stride == 1;
      if (!ready) load_floats<Isa>(p.x->data, at, stride, p.x->dtype, line, p.k);
      job.unit[m] = accel_fixed::unit_of(ready ? (const float*)p.x->data + at : line, p.k, job.spread, job.zeros);
    }
    job.slots.give(slot);
  }

  /* Digits of tiles of sixteen rows. */
  static void digits(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const Product& p = *job.p;
    const int64_t stride = p.x->strides[p.x->ndim - 1];
    __m512i order[kStretches];
    for (int s = 0; s < kStretches; ++s) order[s] = _mm512_loadu_si512(job.weights->order + 64 * s);
    for (int64_t tile = begin; tile < end; ++tile) {
      int8_t* out = job.x + tile * job.stretches * 3072;
      int64_t offset[16];
      float inverse[16]; /* 0: the row is taken as zeros */
      for (int i = 0; i < 16; ++i) {
        const int64_t m = tile * 16 + i;
        const bool used = m < job.rows && job.unit[job.m0 + m] != 0;
        offset[i] = used ? accel_row_offset(p.x, job.m0 + m) : 0;
        inverse[i] = used ? 1.0f / job.unit[job.m0 + m] : 0;
      }
      for (int64_t g = 0; g < job.groups; ++g, out += 3072 * kStretches) {
        alignas(64) int8_t row[kStretches][3][16][64];
        for (int i = 0; i < 16; ++i) {
          if (inverse[i] == 0) {
            for (int s = 0; s < kStretches; ++s) {
              for (int q = 0; q < 3; ++q) _mm512_store_si512(row[s][q][i], _mm512_setzero_si512());
            }
            continue;
          }
          alignas(64) float line[GROUP];
          const float* x = line;
          const int64_t at = offset[i] + g * GROUP * stride;
          if (p.x->dtype == ACCEL_FLOAT32 && stride == 1) {
            x = (const float*)p.x->data + at;
          } else {
            load_floats<Isa>(p.x->data, at, stride, p.x->dtype, line, GROUP);
          }
          alignas(64) int8_t digit[3][GROUP];
          const __m512 scale = _mm512_set1_ps(inverse[i]);
          for (int j = 0; j < GROUP; j += 16) {
            const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + j), scale));
            accel_fixed::split_digits(v, digit[0] + j, digit[1] + j, digit[2] + j);
          }
          for (int q = 0; q < 3; ++q) {
            const __m512i low = _mm512_load_si512(digit[q]), high = _mm512_load_si512(digit[q] + GROUP - 64);
            for (int s = 0; s < kStretches; ++s) {
              _mm512_store_si512(row[s][q][i], _mm512_permutex2var_epi8(low, order[s], high));
            }
          }
        }
        for (int s = 0; s < kStretches; ++s) {
          for (int q = 0; q < 3; ++q) {
            const void* rows[16];
            for (int i = 0; i < 16; ++i) rows[i] = row[s][q][i];
            transpose16(rows, (__m512i*)(out + (3 * s + q) * 1024));
          }
        }
      }
    }
  }

  /* acc[n] += scale of (n, group) * sums, sixteen rows of x in the lanes. */
  static inline __attribute__((always_inline)) void collect(const int32_t (*sums)[16][16], const float* scale,
                                                            __m512 (&acc)[16]) {
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) {
      const __m512i hi = _mm512_load_si512(sums[0][n]), mid = _mm512_load_si512(sums[1][n]);
      const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), mid));
      const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2][n]));
      const __m512 all = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
      acc[n] = _mm512_fmadd_ps(all, _mm512_set1_ps(scale[n]), acc[n]);
    }
  }

  /* Continues the sums of sixteen outputs of sixteen rows over groups g0 ... g1. */
  static void tile(const int8_t* codes, const int8_t* x, int64_t g0, int64_t g1, const float* scale,
                   float (*out)[16]) {
    /* Sums are collected two groups later: stores of tiles take long to be seen by loads. */
    alignas(64) int32_t sums[3][3][16][16];
    __m512 acc[16];
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) acc[n] = g0 ? _mm512_load_ps(out[n]) : _mm512_setzero_ps();
    for (int64_t g = g0; g < g1; ++g) {
      const int8_t *a = codes + g * kStretches * 1024, *b = x + g * kStretches * 3072;
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
      if constexpr (kStretches == 2) {
        _tile_loadd(4, a + 1024, 64);
        _tile_loadd(5, b + 3072, 64);
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(6, b + 4096, 64);
        _tile_dpbssd(1, 4, 6);
        _tile_loadd(7, b + 5120, 64);
        _tile_dpbssd(2, 4, 7);
      }
      if (g - g0 >= 2) collect(sums[(g - 2) % 3], scale + (g - 2) * 16, acc);
      _tile_stored(0, to[0], 64);
      _tile_stored(1, to[1], 64);
      _tile_stored(2, to[2], 64);
    }
    for (int64_t g = g1 - g0 >= 2 ? g1 - 2 : g0; g < g1; ++g) collect(sums[g % 3], scale + g * 16, acc);
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) _mm512_store_ps(out[n], acc[n]);
  }

  /* y of sixteen outputs of the rows of one tile. */
  static void finish(const Job& job, int64_t tile, int64_t n0, const float (*sums)[16]) {
    const Product& p = *job.p;
    const int64_t columns = least(16, p.n - n0);
    const __mmask16 have = (__mmask16)((1u << columns) - 1);
    alignas(64) float bias[16] = {};
    if (p.bias) {
      const int64_t stride = p.bias->strides[0];
      load_floats<Isa>(p.bias->data, n0 * stride, stride, p.bias->dtype, bias, columns);
    }
    const void* rows[16];
    for (int n = 0; n < 16; ++n) rows[n] = sums[n];
    __m512i out[16];
    transpose16(rows, out);
    for (int64_t m = 0; m < least(16, job.rows - tile * 16); ++m) {
      const float unit = job.unit[job.m0 + tile * 16 + m];
      if (unit == 0) continue;
      __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(out[m]), _mm512_set1_ps(unit));
      if (p.bias) v = _mm512_add_ps(v, _mm512_load_ps(bias));
      const int64_t at = (job.m0 + tile * 16 + m) * p.n + n0;
      accel_lines::store16(p.y, p.y_dtype, at, have, v);
    }
  }

  /* Sixteens of outputs, all rows at work. */
  static void run(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const int32_t slot = job.slots.take();
    const int64_t count = end - begin, width = job.groups * 16, depth = kDepth / GROUP, size = job.stretches * 1024;
    int8_t* codes = (int8_t*)job.slots.of(slot);
    float* scale = (float*)(codes + count * size);
    float(*sums)[16] = (float(*)[16])(scale + count * width);
    for (int64_t i = 0; i < count; ++i) {
      job.weights->codes((begin + i) * 16, codes + i * size);
      job.weights->scales((begin + i) * 16, scale + i * width);
    }
    _tile_loadconfig(&kConfig);
    for (int64_t t = 0; t < job.tiles; ++t) {
      const int8_t* x = job.x + t * job.stretches * 3072;
      for (int64_t g = 0; g < job.groups; g += depth) {
        for (int64_t i = 0; i < count; ++i) {
          tile(codes + i * size, x, g, least(g + depth, job.groups), scale + i * width, sums + i * 16);
        }
      }
      for (int64_t i = 0; i < count; ++i) finish(job, t, (begin + i) * 16, sums + i * 16);
    }
    _tile_release();
    job.slots.give(slot);
  }
};

/* Returns how many rows do not fit; -1 if they are so many that another kernel should take all, or if there is no
 * memory (the call has failed then). Nothing is written to y then. */
template <class Isa, int GROUP, class Weights>
int64_t run(const Product& p, const Weights& weights, float spread, float zeros, float* unit) {
  using J = Job<Isa, GROUP, Weights>;
  J job;
  job.p = &p;
  job.weights = &weights;
  job.unit = unit;
  job.spread = spread;
  job.zeros = zeros;
  job.groups = p.k / GROUP;
  job.stretches = p.k / 64;
  if (!job.slots.make(p.call, p.k)) return -1;
  accel_parallel_for(p.call, p.rows, 16, J::units, &job);
  int64_t unfit = 0;
  for (int64_t m = 0; m < p.rows; ++m) unfit += unit[m] == 0;
  if (unfit > p.rows / 8 + 1) return -1;
  const int64_t row_bytes = job.stretches * 192, most = kBlockBytes / (16 * row_bytes);
  const int64_t block = least(ceil_div(p.rows, 16), most < 2 ? 2 : most) * 16;
  /* Sixteens of outputs at a time: what fits, and enough pieces that threads end together. */
  const int64_t columns = ceil_div(p.n, 16), fair = columns / (4 * job.slots.count), code_bytes = job.stretches * 1024;
  int64_t grain = least(fair, least(kCodeBytes / code_bytes, 16));
  if (grain < 1) grain = 1;
  job.x = (int8_t*)accel_scratch(p.call, (size_t)(block * row_bytes));
  if (!job.x || !job.slots.make(p.call, grain * (job.groups * 16 + code_bytes / 4 + 256))) return -1;
  for (job.m0 = 0; job.m0 < p.rows; job.m0 += block) {
    job.rows = least(block, p.rows - job.m0);
    job.tiles = ceil_div(job.rows, 16);
    accel_parallel_for(p.call, job.tiles, 1, J::digits, &job);
    accel_parallel_for(p.call, columns, grain, J::run, &job);
  }
  return unfit;
}

}  // namespace
}  // namespace accel_tiles
#endif /* ACCEL_TILES_H */
