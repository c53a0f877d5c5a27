/* y = x @ W.T (+ bias) for few rows of x. Included once per instruction set.
 *
 * Layout     W as in formats.h; x is brought into float32 and into the order in which weights are delivered.
 * Rows       Any; meant for 1 to about 30. Any n and k.
 * Exactness  rounding. A weight is exact in float32 (but for the ends of E8M0's range). Each sum runs in 16
 *            interleaved partial sums of k / 16 terms: for k up to some thousand that is within the bound even if
 *            every addition errs by the most it can, and for terms that are all equal up to k = 65536.
 * Rows       Independent of each other: output (m, r) has one accumulator of 16 lanes, fed with the weights in
 *            order and summed up in one fixed tree, whatever other rows, outputs or threads there are. Tile sizes
 *            only say how many such accumulators are in flight.
 * Method     Decode is bound by reading W, so that W is read once, front to back, and weights go from memory to
 *            products in registers. Several output rows share each load of x and hide the latency of their sums
 *            behind one another; with several rows of x each widened weight is used for all of them. Where k is
 *            long, x passes in blocks that stay in the first-level cache, and the accumulators wait in memory
 *            between blocks, unsummed, so that the order of additions is that of one long pass.
 * Source     Written for this library. Dot products with one accumulator per output, register tiling and
 *            looking codes up in a register are common knowledge; nothing was taken from another implementation.
 */
#ifndef HOST_LINEAR_SMALL_BODY_H
#define HOST_LINEAR_SMALL_BODY_H

#include "problem.h"

namespace linear {
namespace {

/* Output rows that pieces of a parallel loop are made of. */
constexpr int kUnit = 8;
/* Outputs whose accumulators are kept while the blocks of k pass. */
constexpr int kPassRows = 32;
/* Floats of a tile's block of x: half of a first-level cache, since weights and accumulators pass through too. */
constexpr int64_t kBlockFloats = 6144;
/* The most rows of x that share one reading of W; more are done in turns. */
constexpr int kMostRows = 32;
/* The most weights along k per block. */
constexpr int64_t kMostDepth = 4096;

/* Continues the sums of MT rows of x times R rows of W over weights k0 ... k0 + depth.
 *   x      [chunk][MT rows][32 weights]
 *   n0     first row of W; nr of the R exist
 *   lanes  R * MT accumulators, [r][m][16]; read unless k0 == 0, written */
template <class I, Format F, int MT, int R>
void tile(const Problem& p, const float* x, int64_t n0, int64_t nr, int64_t k0, int64_t depth, float (*lanes)[16]) {
  using V = typename I::V;
  constexpr int64_t kBytes = chunk_bytes(F), kScales = chunk_scales(F);
  /* The processor's own prefetcher loses its way at the ends of rows. It is asked for what follows in the row where
   * rows are long and read in one piece, else for the next tile's. */
  constexpr int64_t kLongRow = 3072, kStretch = 512;
  const int64_t chunks = depth / kChunk;
  const int64_t ahead = MT < 7 && p.k * kBytes / kChunk >= kLongRow ? kStretch : R * p.w_stride;
  const uint8_t *w[R], *s[R];
  V acc[R][MT];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int64_t row = n0 + (r < nr ? r : nr - 1); /* surplus rows repeat */
    w[r] = p.w + row * p.w_stride + k0 / kChunk * kBytes;
    s[r] = kScales ? p.scales + row * p.s_stride + k0 / kChunk * kScales : NULL;
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) acc[r][m] = k0 ? I::load(lanes[r * MT + m]) : I::zero();
  }
  const auto add_chunk = [&](const uint8_t* const* wc, int64_t at, const uint8_t* const* sc,
                             int64_t g) __attribute__((always_inline)) {
    V v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = I::template weights<F, 0>(wc[r] + at, sc[r] + g);
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const V xv = I::hold(I::load(x + m * kChunk));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = I::template weights<F, 1>(wc[r] + at, sc[r] + g);
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const V xv = I::hold(I::load(x + m * kChunk + 16));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
    }
    x += MT * kChunk;
  };
  int64_t at = 0, g = 0;
  for (; at < chunks * kBytes; at += kBytes, g += kScales) {
    if (kBytes >= 64 || at % 64 == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(w[r] + at + ahead);
        if constexpr (kBytes > 64) __builtin_prefetch(w[r] + at + ahead + 64);
      }
    }
    add_chunk(w, at, s, g);
  }
  if (chunks * kChunk < depth) { /* a dense row's, or nvfp4's, shorter end */
    alignas(64) uint8_t end[R][kBytes] = {};
    uint8_t scale[R][2] = {};
    const uint8_t *we[R], *se[R];
    for (int r = 0; r < R; ++r) {
      memcpy(end[r], w[r] + at, (size_t)((depth - chunks * kChunk) * kBytes / kChunk));
      if (kScales) scale[r][0] = s[r][g];
      we[r] = end[r];
      se[r] = scale[r];
    }
    add_chunk(we, 0, se, 0);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) I::store(lanes[r * MT + m], acc[r][m]);
  }
}

template <class I, Format F>
struct SmallJob {
  using Tile = void (*)(const Problem&, const float*, int64_t, int64_t, int64_t, int64_t, float (*)[16]);
  const Problem* p;
  float* x;       /* [block of depth weights][tile][chunk][row of the tile][weight], as floats */
  int64_t first, rows; /* of the problem, at work */
  int64_t depth;  /* weights along k per block */
  int tiles;      /* over rows of x; the first `longer` take mt rows, the others one less */
  int mt, longer;
  Tile tile[2];   /* for mt and mt - 1 rows */
  int step;       /* output rows per tile */

  void prepare_x() {
    alignas(64) float line[kMostDepth];
    float* to = x;
    for (int64_t k0 = 0; k0 < p->k; k0 += depth) {
      const int64_t n = min64(depth, p->k - k0), padded = round_up(n, kChunk);
      int64_t row = first;
      for (int t = 0; t < tiles; ++t) {
        const int height = t < longer ? mt : mt - 1;
        for (int m = 0; m < height; ++m, ++row) {
          load_x<I, F>(*p, row, k0, n, height == 1 ? to : line);
          if (height == 1) continue;
          for (int64_t k = 0; k < padded; k += kChunk) memcpy(to + k * height + m * kChunk, line + k, 4 * kChunk);
        }
        to += height * padded;
      }
    }
  }

  template <int MT>
  void choose_tile() {
    constexpr int r = I::tile_rows(MT);
    if (mt == MT) {
      tile[0] = linear::tile<I, F, MT, r>;
      if constexpr (MT > 1) tile[1] = linear::tile<I, F, MT - 1, r>;
      step = r;
    } else if constexpr (MT > 1) {
      choose_tile<MT - 1>();
    }
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int64_t stop = min64(end * kUnit, job.p->n), pass = job.depth < job.p->k || job.tiles > 1 ? kPassRows : job.step;
    for (int64_t n0 = begin * kUnit; n0 < stop; n0 += pass) job.pass(n0, min64(n0 + pass, stop));
  }

  /* Outputs n0 ... n1, all rows of x. */
  void pass(int64_t n0, int64_t n1) const {
    alignas(64) float lanes[(kPassRows + kUnit) * kMostRows][16];
    for (int64_t k0 = 0; k0 < p->k; k0 += depth) {
      const int64_t d = min64(depth, p->k - k0), padded = round_up(d, kChunk);
      const float* from = x + k0 * rows;
      float(*to)[16] = lanes;
      for (int t = 0; t < tiles; ++t) {
        const int height = t < longer ? mt : mt - 1;
        for (int64_t n = n0; n < n1; n += step, to += height * step) {
          tile[t < longer ? 0 : 1](*p, from, n, min64(step, n1 - n), k0, d, to);
        }
        from += height * padded;
      }
    }
    float(*from)[16] = lanes;
    int64_t m0 = first;
    for (int t = 0; t < tiles; ++t) {
      const int height = t < longer ? mt : mt - 1;
      for (int64_t n = n0; n < n1; n += step, from += height * step) {
        finish(from, m0, height, n, min64(step, n1 - n));
      }
      m0 += height;
    }
  }

  /* Sums up, adds the bias and writes `height` rows of outputs n ... n + nr. */
  void finish(float (*lanes)[16], int64_t m0, int height, int64_t n, int64_t nr) const {
    float sums[64];
    for (int i = 0; i < height * step; i += 8) I::sum8(lanes + i, sums + i);
    if (p->bias) {
      for (int64_t r = 0; r < nr; ++r) {
        const float b = accel_load_float(p->bias->data, (n + r) * p->bias->strides[0], p->bias->dtype);
        for (int m = 0; m < height; ++m) sums[r * height + m] += b;
      }
    }
    for (int m = 0; m < height; ++m) {
      const int64_t at = (m0 + m) * p->n + n;
      if (p->y_dtype == ACCEL_FLOAT32) {
        for (int64_t r = 0; r < nr; ++r) ((float*)p->y)[at + r] = sums[r * height + m];
      } else {
        for (int64_t r = 0; r < nr; ++r) accel_store_float(p->y, at + r, p->y_dtype, sums[r * height + m]);
      }
    }
  }
};

/* A piece of 64 k weights takes some microseconds, against the tenths of one that handing it out costs; fewer
 * are not worth waking a thread for. Large matrices are cut into larger pieces, since what is fetched ahead at
 * the end of a piece helps another thread or none. A further row of x counts as half a reading of W. */
inline int64_t count_pieces(const Problem& p, int64_t rows) {
  const int64_t work = p.n * p.k * (rows + 1) / 2, fine = work / 65536, coarse = work / 262144;
  return coarse > 16 ? coarse : min64(fine, 16);
}

template <class I, Format F>
void small_rows_of(const Problem& p) {
  /* A little x needs no allocation. */
  alignas(64) float local[4096];
  const int64_t most = min64(p.rows, kMostRows), size = most * round_up(p.k, kChunk);
  SmallJob<I, F> job;
  job.p = &p;
  job.x = local;
  if (size > 4096) {
    job.x = (float*)accel_scratch(p.call, (size_t)size * sizeof(float));
    if (!job.x) return;
  }
  for (job.first = 0; job.first < p.rows; job.first += job.rows) {
    job.rows = min64(p.rows - job.first, kMostRows);
    job.tiles = (int)ceil_div(job.rows, I::kMaxTile);
    job.mt = (int)ceil_div(job.rows, job.tiles);
    job.longer = (int)(job.rows - (int64_t)job.tiles * (job.mt - 1));
    job.depth = job.rows == 1 ? kMostDepth : kBlockFloats / job.mt / kChunk * kChunk;
    job.template choose_tile<I::kMaxTile>();
    job.prepare_x();
    const int64_t units = ceil_div(p.n, kUnit), pieces = count_pieces(p, job.rows);
    if (pieces < 2 || p.call->threads < 2) {
      SmallJob<I, F>::run(&job, 0, units);
    } else {
      accel_parallel_for(p.call, units, ceil_div(units, pieces), SmallJob<I, F>::run, &job);
    }
  }
}

template <class I>
void small_rows(const Problem& p) {
  switch (p.format) {
    case kFloat32: return small_rows_of<I, kFloat32>(p);
    case kFloat16: return small_rows_of<I, kFloat16>(p);
    case kBfloat16: return small_rows_of<I, kBfloat16>(p);
    case kMxfp4: return small_rows_of<I, kMxfp4>(p);
    case kNvfp4: return small_rows_of<I, kNvfp4>(p);
    default: return small_rows_of<I, kMxfp8>(p);
  }
}

}  // namespace
}  // namespace linear
#endif
