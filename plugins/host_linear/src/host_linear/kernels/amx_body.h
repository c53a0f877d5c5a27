/* y = x @ W.T (+ bias) with bfloat16 W by tile products, AMX-BF16.
 *
 * Layout     W as in formats.h; x as in amx_rows.h.
 * Rows       Any n, k and rows. Independent of each other: an output depends on its row of x, its row of W and k.
 * Exactness  rounding. x enters as one, two or three bfloat16 pieces, exactly, and every product is exact. A tile adds 32
 *            of them, two sums of 16 put together, to a sum in float32. After kChain chunks the sums of the pieces are
 *            added, the smallest first, and start anew: up to k = 1000000 that is within the bound even if every
 *            addition errs by the most it can. Tile products take what is below 2^-126 for zero, and know no
 *            infinity that meets a piece of zero. Both show in the sum: it is not finite, or smaller than 2^25
 *            times what can have been lost (amx_rows.h). Such an output is computed again without tiles, as
 *            is every output of a row that is not fit for them; which ones does not depend on other rows either.
 * Method     Sixteen rows of W, as they lie, are the left tile. A product takes a cycle for each of them however many
 *            columns the right tile has: 512 weights meet sixteen rows of x in less time than it takes to read them.
 *            While rows are few, all their pieces are columns of one tile. x passes in blocks; with more
 *            than sixteen rows some rows of W stay in the second-level cache until they have met all of x.
 * Source     Written for this library; splitting a float32 into bfloat16 numbers is common practice.
 */
#ifndef HOST_LINEAR_AMX_BODY_H
#define HOST_LINEAR_AMX_BODY_H

#include <accel/amx.h>

#include "amx_rows.h"

namespace linear {
namespace {

using accel_amx::TileConfig;
using accel_amx::tile_configure;
using accel_amx::tile_load;
using accel_amx::tile_multiply_bf16;
using accel_amx::tile_release;
using accel_amx::tile_store;
using accel_amx::tile_zero;

constexpr int kStrip = 16;         /* rows of W per tile */
constexpr int64_t kBytes = 64;     /* of a chunk of a row of W */
constexpr int64_t kChain = 16;     /* chunks whose products are added before the pieces are */
constexpr int64_t kXBytes = 24576; /* of x per block, but for many rows */
constexpr int kPassStrips = 8;     /* strips whose sums wait while the blocks of k pass, at most */
constexpr int kMostTiles = 8;      /* of rows of x that share one reading of W */
constexpr int64_t kPassBytes = 1 << 20; /* of weights that stay in the second-level cache for them */
constexpr int64_t kAhead = 8;      /* chunks from what is read to what is fetched */

/* y[m, n] without bias and tiles. */
inline float plain_output(const Problem& p, int64_t m, int64_t n) {
  constexpr int64_t kBlock = 2048;
  alignas(64) float x[kBlock];
  __m512 a = _mm512_setzero_ps(), b = a;
  for (int64_t k0 = 0; k0 < p.k; k0 += kBlock) {
    const int64_t depth = min64(kBlock, p.k - k0);
    load_x<Avx512, kBfloat16>(p, m, k0, depth, x);
    const uint8_t* w = p.w + n * p.w_stride + 2 * k0;
    for (int64_t k = 0; k < depth; k += kChunk, w += kBytes) {
      alignas(64) uint8_t end[kBytes] = {};
      const bool whole = depth - k >= kChunk;
      if (!whole) memcpy(end, w, (size_t)(2 * (depth - k)));
      const uint8_t* from = whole ? w : end;
      a = _mm512_fmadd_ps(Avx512::weights<kBfloat16, 0>(from, NULL), _mm512_load_ps(x + k), a);
      b = _mm512_fmadd_ps(Avx512::weights<kBfloat16, 1>(from, NULL), _mm512_load_ps(x + k + 16), b);
    }
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(a, b));
}

/* P pieces of x. PACKED: as columns of one tile, else in a tile each. Tiles 0 ... P - 1 are sums. */
template <int P, bool PACKED>
struct TileJob {
  static constexpr int X = PACKED ? 1 : P;
  static constexpr int kWeights = 6, kRight = 7;

  const Problem* p;
  TileRows x[kMostTiles];
  int count; /* of them, all equally high */
  int64_t chunks, strips;
  int64_t depth;       /* chunks per block of k, a multiple of kChain */
  int64_t pass_strips; /* at a time */

  static void split(void* arg, int64_t begin, int64_t end) {
    const TileJob& job = *(const TileJob*)arg;
    for (int t = 0; t < job.count; ++t) job.x[t].split(begin, end);
  }

  int columns() const { return x[0].rows * P / X; }

  void configure(int high) const {
    TileConfig config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.bytes[t] = (uint16_t)(4 * columns());
      config.rows[t] = (uint8_t)high;
    }
    config.bytes[kWeights] = kBytes;
    config.rows[kRight] = 16;
    tile_configure(config);
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const TileJob& job = *(const TileJob*)arg;
    const int64_t whole = job.p->n / kStrip, full = min64(end, whole);
    alignas(64) float sums[kPassStrips][kStrip][16];
    job.configure(kStrip);
    for (int64_t s = begin; s < full; s += job.pass_strips) job.pass(s, min64(s + job.pass_strips, full), kStrip, sums);
    if (end > whole) {
      const int rest = (int)(job.p->n - whole * kStrip);
      job.configure(rest);
      job.pass(whole, whole + 1, rest, sums);
    }
    tile_release();
  }

  /* Strips s0 ... s1 of `high` rows of W each. */
  void pass(int64_t s0, int64_t s1, int high, float (*sums)[kStrip][16]) const {
    for (int t = 0; t < count; ++t) {
      for (int64_t c0 = 0; c0 < chunks; c0 += depth) {
        const int64_t c1 = min64(c0 + depth, chunks);
        for (int64_t s = s0; s < s1; ++s) {
          const uint8_t* w = p->w + s * kStrip * p->w_stride;
          multiply(x[t], w, c0, c1, high, next(s0, s1, s, c0), sums[s - s0]);
        }
      }
      for (int64_t s = s0; s < s1; ++s) finish(x[t], s * kStrip, high, sums[s - s0]);
    }
  }

  /* What is read after the block of strip s that begins with chunk c0. */
  const uint8_t* next(int64_t s0, int64_t s1, int64_t s, int64_t c0) const {
    const bool more = c0 + depth < chunks;
    const int64_t c = s + 1 < s1 ? c0 : more ? c0 + depth : 0, to = s + 1 < s1 || !more ? s + 1 : s0;
    return p->w + to * kStrip * p->w_stride + c * kBytes;
  }

  template <int J>
  static inline __attribute__((always_inline)) void product(const uint32_t* from, int columns) {
    if constexpr (J < X) {
      tile_load<kRight>(from + J * 16 * columns, 4 * columns);
      tile_multiply_bf16<J, kWeights, kRight>();
    }
  }

  /* The sums of the strip at w go on with chunks c0 ... c1; `after` follows. */
  void multiply(const TileRows& rows, const uint8_t* w, int64_t c0, int64_t c1, int high, const uint8_t* after,
                float (*sums)[16]) const {
    alignas(64) uint8_t end[kStrip][kBytes];
    const int64_t stride = p->w_stride;
    const int wide = columns();
    clear();
    for (int64_t c = c0; c < c1; ++c) {
      const uint8_t* at = w + c * kBytes;
      const uint8_t* later = c + kAhead < c1 ? at + kAhead * kBytes : after + (c + kAhead - c1) * kBytes;
#pragma GCC unroll 16
      for (int r = 0; r < kStrip; ++r) __builtin_prefetch(later + r * stride, 0, 3);
      if (__builtin_expect(p->k - c * kChunk >= kChunk, 1)) {
        tile_load<kWeights>(at, stride);
      } else {
        memset(end, 0, sizeof end);
        for (int r = 0; r < high; ++r) memcpy(end[r], at + r * stride, (size_t)(2 * (p->k - c * kChunk)));
        tile_load<kWeights>(end, kBytes);
      }
      const uint32_t* from = rows.pairs + c * (P * 16) * rows.rows;
      product<2>(from, wide);
      product<1>(from, wide);
      product<0>(from, wide);
      if ((c + 1) % kChain == 0 || c + 1 == c1) {
        collect(rows.rows, sums, c < kChain);
        clear();
      }
    }
  }

  static inline __attribute__((always_inline)) void clear() {
    tile_zero<0>();
    if constexpr (X > 1) tile_zero<1>();
    if constexpr (X > 2) tile_zero<2>();
  }

  /* sums[output][row] = or += what the tiles hold. */
  static void collect(int rows, float (*sums)[16], bool first) {
    /* Packed columns are read beyond their row of the tile; what lies there is not used. */
    alignas(64) float tiles[X + PACKED][kStrip][16];
    if constexpr (X > 2) tile_store<2>(tiles[2]);
    if constexpr (X > 1) tile_store<1>(tiles[1]);
    tile_store<0>(tiles[0]);
#pragma GCC unroll 16
    for (int r = 0; r < kStrip; ++r) {
      __m512 sum = first ? _mm512_setzero_ps() : _mm512_load_ps(sums[r]), part = _mm512_setzero_ps();
#pragma GCC unroll 3
      for (int j = P - 1; j >= 0; --j) {
        part = _mm512_add_ps(part, _mm512_loadu_ps(PACKED ? tiles[0][r] + j * rows : tiles[j][r]));
      }
      _mm512_store_ps(sums[r], _mm512_add_ps(sum, part));
    }
  }

  /* Scales back, adds the bias and writes outputs n0 ... n0 + high. */
  void finish(const TileRows& rows, int64_t n0, int high, const float (*sums)[16]) const {
    alignas(64) float bias[16] = {}, line[16];
    if (const accel_array* b = p->bias) {
      load_floats<Avx512>(b->data, n0 * b->strides[0], b->strides[0], b->dtype, bias, high);
    }
    const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    const uint32_t all = (1u << high) - 1;
    for (int m = 0; m < rows.rows; ++m) {
      const __m512 v = _mm512_i32gather_ps(lanes, sums[0] + m, 4), size = _mm512_abs_ps(v);
      const uint32_t sound = _mm512_cmp_ps_mask(size, _mm512_set1_ps(rows.least[m]), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(size, _mm512_set1_ps(kInfinity), _CMP_LT_OQ);
      _mm512_store_ps(line, times_power(v, -rows.scale[m]));
      for (uint32_t lost = all & ~sound; lost; lost &= lost - 1) {
        const int r = __builtin_ctz(lost);
        line[r] = plain_output(*p, rows.first + m, n0 + r);
      }
      if (p->bias) _mm512_store_ps(line, _mm512_add_ps(_mm512_load_ps(line), _mm512_load_ps(bias)));
      store_floats<Avx512>(*p, (rows.first + m) * p->n + n0, line, high);
    }
  }
};

/* Rows first ... first + rows: up to 16, or in tiles of 16, of which the last two may overlap. */
template <int P, bool PACKED>
void tile_turn(const Problem& p, int64_t first, int64_t rows, uint32_t* pairs) {
  using Job = TileJob<P, PACKED>;
  Job job;
  job.p = &p;
  job.chunks = ceil_div(p.k, kChunk);
  job.strips = ceil_div(p.n, kStrip);
  job.count = (int)ceil_div(rows, kRows);
  const int high = (int)min64(rows, kRows);
  for (int t = 0; t < job.count; ++t) {
    job.x[t] = {&p, first + min64(t * kRows, rows - high), high, P, PACKED, pairs + t * job.chunks * P * 16 * high};
    job.x[t].measure();
  }
  const int64_t block = kXBytes / (64 * P * high) / kChain * kChain;
  job.depth = block < kChain ? kChain : block;
  const int64_t fit = kPassBytes / (2 * p.k * kStrip);
  job.pass_strips = job.count > 1 ? (fit < 1 ? 1 : min64(fit, kPassStrips)) : job.depth < job.chunks ? kPassStrips : 1;
  /* As in small_body.h: neither pieces that are not worth waking a thread for nor too few of them. */
  const int64_t fine = p.n * p.k * job.count / 65536, coarse = p.n * p.k / 262144;
  const int64_t pieces = coarse > 16 ? coarse : min64(fine, 16);
  if (pieces < 2 || p.call->threads < 2) {
    Job::split(&job, 0, job.chunks);
    Job::run(&job, 0, job.strips);
    return;
  }
  if (p.k * rows >= 4096) {
    accel_parallel_for(p.call, job.chunks, 32, Job::split, &job);
  } else {
    Job::split(&job, 0, job.chunks);
  }
  accel_parallel_for(p.call, job.strips, round_up(ceil_div(job.strips, pieces), job.pass_strips), Job::run, &job);
}

template <int P>
void tile_rows_of(const Problem& p) {
  constexpr int64_t kTurn = kMostTiles * kRows;
  const int64_t most = min64(p.rows, kTurn), high = most < kRows ? most : round_up(most, kRows);
  uint32_t* pairs = (uint32_t*)accel_scratch(p.call, (size_t)(ceil_div(p.k, kChunk) * P * 64 * high));
  if (!pairs) return;
  for (int64_t first = 0; first < p.rows; first += kTurn) {
    const int64_t rows = min64(kTurn, p.rows - first);
    (P > 1 && P * rows <= 16 ? tile_turn<P, (P > 1)> : tile_turn<P, false>)(p, first, rows, pairs);
  }
}

inline void tile_rows(const Problem& p) {
  const int32_t dtype = p.x->dtype;
  (dtype == ACCEL_BFLOAT16 ? tile_rows_of<1> : dtype == ACCEL_FLOAT16 ? tile_rows_of<2> : tile_rows_of<3>)(p);
}

}  // namespace
}  // namespace linear
#endif
