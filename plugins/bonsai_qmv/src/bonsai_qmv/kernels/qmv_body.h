/* y = x @ W.T (+ bias) for 1..16 rows of x: the matrix-vector family. Included once per instruction set.
 *
 * Layout     W row r: k codes of `bits` bits as one little-endian bit stream (code j at bits [j * bits,
 *            (j + 1) * bits), LSB first); a chunk of 32 codes is 4 * bits whole bytes, a group of 32, 64 or 128
 *            codes is 4, 8 or 16 * bits bytes and has one scale and one bias (float32, float16 or bfloat16 each).
 *            weight = scale * code + bias, rounded once to float32.
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. The weight is made before it is multiplied: taking the bias out of the sum,
 *            sum(code * x) * scale + bias * sum(x), is one operation cheaper and cancels badly where weights are
 *            much smaller than biases. Each sum runs in 16 interleaved partial sums of k / 16 terms: for k up to
 *            some thousand that is within the bound even if every addition errs by the most it can, and for
 *            terms that are all equal up to k = 65536.
 * Rows       Independent of each other: output (m, r) has one accumulator of 16 lanes, fed with the chunks in
 *            order and summed up in one fixed tree, whatever other rows, outputs or threads there are. Tile sizes
 *            only say how many such accumulators are in flight.
 * Method     Decode is bound by reading W, so that W is read once, front to back, and a chunk goes from packed
 *            bytes to products in registers. Several output rows share each load of x and hide the latency of
 *            their sums behind one another; with several rows of x each decoded chunk is used for all of them.
 *            Where k is long, x passes in blocks that stay in the first-level cache, and the accumulators wait
 *            in memory between blocks, unsummed, so that the order of additions is that of one long pass.
 * Source     Written for this library. Dot products with one accumulator per output, register tiling and
 *            looking codes up in a register are common knowledge; nothing was taken from another implementation.
 */
#ifndef BONSAI_QMV_QMV_BODY_H
#define BONSAI_QMV_QMV_BODY_H

#include "problem.h"

namespace bonsai {
namespace {

/* Groups whose scales and biases are converted at a time. */
constexpr int kScaleBlock = 64;
/* Output rows that pieces of a parallel loop are made of. */
constexpr int kUnit = 8;

/* Rows of x as floats, in the order in which I delivers weights: [block of depth weights][row][weight]. A block of
 * all rows stays in the first-level cache while several outputs pass by. */
template <class I>
void prepare_x(const Problem& p, int64_t depth, float* out) {
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  for (int64_t k0 = 0; k0 < p.k; k0 += depth) {
    const int64_t n = min64(depth, p.k - k0);
    for (int64_t m = 0; m < p.rows; ++m, out += n) {
      load_floats<I>(p.x->data, accel_row_offset(p.x, p.row0 + m) + k0 * stride, stride, p.x->dtype, out, n);
      if (I::permutes(p.bits)) {
        for (int64_t j = 0; j < n; j += 32) I::permute_chunk(out + j);
      }
    }
  }
}

/* Continues the sums of MT rows of x times R rows of W over weights k0 ... k0 + depth.
 *   x      first of the MT rows, `depth` floats each, one after the other
 *   n0     first row of W; nr of the R exist
 *   lanes  R * MT accumulators, [r][m][16]; read unless k0 == 0, written
 *   CHUNKS chunks per group */
template <class I, int BITS, int CHUNKS, int MT, int R>
void tile(const Problem& p, const float* x, int64_t n0, int64_t nr, int64_t k0, int64_t depth, float (*lanes)[16]) {
  using V = typename I::V;
  using G = typename I::template Group<BITS>;
  constexpr int kBytes = 4 * BITS; /* per chunk */
  alignas(64) float scale[R][kScaleBlock], bias[R][kScaleBlock];
  const uint8_t* w[R];
  V acc[R][MT];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    w[r] = p.w + (n0 + (r < nr ? r : nr - 1)) * p.w_stride + k0 / 32 * kBytes; /* surplus rows repeat */
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) acc[r][m] = k0 ? I::load(lanes[r * MT + m]) : I::zero();
  }
  const int64_t first = k0 / (32 * CHUNKS), groups = depth / (32 * CHUNKS), ahead = R * p.w_stride;
  int64_t at = 0; /* byte of the chunk in its row */
  for (int64_t block = 0; block < groups; block += kScaleBlock) {
    const int64_t count = min64(kScaleBlock, groups - block);
    for (int r = 0; r < R; ++r) {
      const int64_t row = n0 + (r < nr ? r : nr - 1), g0 = first + block;
      load_floats<I>(p.scales, row * p.s_stride[0] + g0 * p.s_stride[1], p.s_stride[1], p.s_dtype, scale[r], count);
      load_floats<I>(p.biases, row * p.b_stride[0] + g0 * p.b_stride[1], p.b_stride[1], p.b_dtype, bias[r], count);
    }
    for (int64_t g = 0; g < count; ++g) {
      if constexpr (MT == 1) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const G group(scale[r][g], bias[r][g]);
          /* The processor's own prefetcher stops at the end of each short row: ask for the next tile's. */
          __builtin_prefetch(w[r] + at + ahead);
          if constexpr (CHUNKS * kBytes > 64) __builtin_prefetch(w[r] + at + ahead + 64);
#pragma GCC unroll 4
          for (int c = 0; c < CHUNKS; ++c) {
            acc[r][0] = I::fma(group.template weights<0>(w[r] + at + c * kBytes), I::load(x + 32 * c), acc[r][0]);
            acc[r][0] = I::fma(group.template weights<1>(w[r] + at + c * kBytes), I::load(x + 32 * c + 16), acc[r][0]);
          }
        }
        x += 32 * CHUNKS;
        at += CHUNKS * kBytes;
      } else {
        G group[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          group[r] = G(scale[r][g], bias[r][g]);
          __builtin_prefetch(w[r] + at + ahead);
        }
        for (int c = 0; c < CHUNKS; ++c, x += 32, at += kBytes) {
          V v[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) v[r] = group[r].template weights<0>(w[r] + at);
#pragma GCC unroll 8
          for (int m = 0; m < MT; ++m) {
            const V xv = I::load(x + m * depth);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) v[r] = group[r].template weights<1>(w[r] + at);
#pragma GCC unroll 8
          for (int m = 0; m < MT; ++m) {
            const V xv = I::load(x + m * depth + 16);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) I::store(lanes[r * MT + m], acc[r][m]);
  }
}

/* Output rows per tile: as many as the registers hold. */
template <class I>
constexpr int tile_rows(int mt) {
  if (mt == 1) return I::kNarrowRows;
  const int r = I::kAccumulators / mt;
  return r > 4 ? 4 : r < 1 ? 1 : r;
}

/* Outputs whose accumulators are kept while the blocks of k pass, and the accumulators of one tile, which is
 * read in eights. */
constexpr int kPassRows = 32;
constexpr int kPassAccumulators = (kPassRows + kUnit) * (int)kSmallRows;

template <class I>
struct SmallJob {
  using Tile = void (*)(const Problem&, const float*, int64_t, int64_t, int64_t, int64_t, float (*)[16]);
  const Problem* p;
  const float* x;
  int64_t depth; /* weights along k per block */
  int tiles;     /* over rows of x; the first `longer` take mt rows, the others one less */
  int mt, longer;
  Tile tile[2]; /* for mt and mt - 1 rows */
  int step;     /* output rows per tile */

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int64_t stop = min64(end * kUnit, job.p->n), pass = job.depth < job.p->k ? kPassRows : job.step;
    for (int64_t n0 = begin * kUnit; n0 < stop; n0 += pass) job.pass(n0, min64(n0 + pass, stop));
  }

  /* Outputs n0 ... n1, all rows of x. */
  void pass(int64_t n0, int64_t n1) const {
    alignas(64) float lanes[kPassAccumulators][16];
    const int64_t rows = p->rows;
    for (int64_t k0 = 0; k0 < p->k; k0 += depth) {
      const int64_t d = min64(depth, p->k - k0);
      float(*to)[16] = lanes;
      for (int64_t n = n0; n < n1; n += step) {
        const float* from = x + k0 * rows;
        for (int t = 0; t < tiles; ++t) {
          const int height = t < longer ? mt : mt - 1;
          tile[t < longer ? 0 : 1](*p, from, n, min64(step, n1 - n), k0, d, to);
          from += height * d;
          to += height * step;
        }
      }
    }
    float(*from)[16] = lanes;
    for (int64_t n = n0; n < n1; n += step) {
      for (int t = 0, m0 = 0; t < tiles; ++t) {
        const int height = t < longer ? mt : mt - 1;
        finish(from, m0, height, n, min64(step, n1 - n));
        from += height * step;
        m0 += height;
      }
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
      const int64_t at = (p->row0 + m0 + m) * p->n + n;
      if (p->y_dtype == ACCEL_FLOAT32) {
        for (int64_t r = 0; r < nr; ++r) ((float*)p->y)[at + r] = sums[r * height + m];
      } else {
        for (int64_t r = 0; r < nr; ++r) accel_store_float(p->y, at + r, p->y_dtype, sums[r * height + m]);
      }
    }
  }
};

template <class I, int BITS, int CHUNKS, int MT>
void choose_tile(SmallJob<I>& job) {
  constexpr int r = tile_rows<I>(MT);
  if (job.mt == MT) {
    job.tile[0] = tile<I, BITS, CHUNKS, MT, r>;
    /* Only where rows are split over tiles do two heights occur. */
    if constexpr (2 * MT > I::kMaxTile) job.tile[1] = tile<I, BITS, CHUNKS, MT - 1, r>;
    job.step = r;
  } else if constexpr (MT > 1) {
    choose_tile<I, BITS, CHUNKS, MT - 1>(job);
  }
}

template <class I, int BITS>
void choose_group(SmallJob<I>& job) {
  switch (job.p->group) {
    case 32: choose_tile<I, BITS, 1, I::kMaxTile>(job); break;
    case 64: choose_tile<I, BITS, 2, I::kMaxTile>(job); break;
    default: choose_tile<I, BITS, 4, I::kMaxTile>(job); break;
  }
}

/* A piece of 72 k weights takes some microseconds, against the tenths of one that handing it out costs; fewer than two
 * of 48 k are not worth waking a thread for. Eight are enough for two threads to end together, or nearly. Large
 * matrices are cut into larger pieces, no more than eight for a thread if there is one row, since what is fetched ahead
 * at the end of a piece helps another thread or none. A further row of x counts as half a reading of W. */
inline int64_t count_pieces(const Problem& p) {
  const int64_t work = p.n * p.k * (p.rows + 1) / 2, fine = work / 73728, coarse = work / 262144;
  const int64_t most = 4 * (p.call->threads < 2 ? 2 : p.call->threads);
  if (p.rows == 1 && coarse > 2 * most) return 2 * most;
  return coarse > most ? coarse : fine > 1 ? min64(fine, most) : min64(work / 49152, 2);
}

template <class I>
void small_rows(const Problem& p) {
  /* A little x needs no allocation. */
  alignas(64) float local[4096];
  float* x = local;
  if (p.rows * p.k > 4096) {
    x = (float*)accel_scratch(p.call, (size_t)(p.rows * p.k) * sizeof(float));
    if (!x) return;
  }
  SmallJob<I> job;
  job.p = &p;
  job.x = x;
  /* All rows of a block in 16 or 32 KB, in multiples of every group size. */
  job.depth = p.rows == 1 ? 4096 : 8192 / p.rows / 128 * 128;
  job.tiles = (int)ceil_div(p.rows, I::kMaxTile);
  job.mt = (int)ceil_div(p.rows, job.tiles);
  job.longer = (int)(p.rows - (int64_t)job.tiles * (job.mt - 1));
  switch (p.bits) {
    case 1: choose_group<I, 1>(job); break;
    case 2: choose_group<I, 2>(job); break;
    case 3: choose_group<I, 3>(job); break;
    case 4: choose_group<I, 4>(job); break;
    case 5: choose_group<I, 5>(job); break;
    case 6: choose_group<I, 6>(job); break;
    default: choose_group<I, 8>(job); break;
  }
  prepare_x<I>(p, job.depth, x);
  const int64_t units = ceil_div(p.n, kUnit), pieces = count_pieces(p);
  if (pieces < 2 || p.call->threads < 2) {
    SmallJob<I>::run(&job, 0, units);
  } else {
    accel_parallel_for(p.call, units, ceil_div(units, pieces), SmallJob<I>::run, &job);
  }
}

}  // namespace
}  // namespace bonsai
#endif
