/* y = x @ W.T (+ bias) for many rows of x: the blocked product. Included once per instruction set.
 *
 * Layout     W as in formats.h; a block of it is widened to float32, never the whole.
 * Rows       Any; meant for more than about 30. Any n and k. Not row-invariant with small_body.h; the bits of a
 *            row depend neither on the other rows nor on the number of threads.
 * Exactness  rounding. Each sum runs over at most 256 terms before it is added to the output's partial sum.
 * Method     x is transposed once, into panels that hold a few dozen rows side by side for each k, so that the
 *            lanes of the product are rows of x. W then needs no transposing: a block of kBlock of its rows by
 *            kDepth weights is widened as it lies, and the innermost loop multiplies a panel with kColumns of
 *            those rows, one weight each broadcast from memory. Results are transposed back when all of k is
 *            through.
 * Source     Written for this library, after the textbook scheme of a blocked product over packed panels.
 */
#ifndef HOST_LINEAR_LARGE_BODY_H
#define HOST_LINEAR_LARGE_BODY_H

#include <accel/slots.h>

#include "problem.h"

namespace linear {
namespace {

constexpr int kDepth = 256;     /* weights along k per block */
constexpr int kBlock = 192;     /* rows of W per block: a multiple of every kColumns and kLanes */
constexpr int kBlockRows = 128; /* rows of x per block: with kDepth, 128 KB beside 192 KB of weights, 96 KB of sums */
constexpr int kTurnRows = 512;  /* rows of x that are transposed at a time, at most */

/* kDepth floats of row `row` of W from k0 on, in I's order; zeros after the end. */
template <class I, Format F>
void widen_row(const Problem& p, int64_t row, int64_t k0, int64_t depth, float* out) {
  constexpr int64_t kBytes = chunk_bytes(F), kScales = chunk_scales(F);
  const uint8_t* w = p.w + row * p.w_stride + k0 / kChunk * kBytes;
  const uint8_t* s = kScales ? p.scales + row * p.s_stride + k0 / kChunk * kScales : NULL;
  int64_t k = 0;
  for (; k + kChunk <= depth; k += kChunk, w += kBytes, s += kScales) {
    I::store(out + k, I::template weights<F, 0>(w, s));
    I::store(out + k + 16, I::template weights<F, 1>(w, s));
  }
  if (k < depth) {
    alignas(64) uint8_t end[kBytes] = {};
    uint8_t scale[2] = {};
    memcpy(end, w, (size_t)((depth - k) * kBytes / kChunk));
    if (kScales) scale[0] = *s;
    I::store(out + k, I::template weights<F, 0>(end, scale));
    I::store(out + k + 16, I::template weights<F, 1>(end, scale));
  }
}

/* c[column][lanes] = or += sum over k of x[k][lanes] * w[column][k], for kColumns rows of W that lie kDepth apart and
 * NV vectors of rows of x. */
template <class W, int NV>
void multiply(const float* x, const float* w, int64_t depth, float* c, bool first) {
  using F = typename W::F;
  constexpr int L = W::kLanes, NC = W::kColumns;
  F acc[NC][NV];
#pragma GCC unroll 12
  for (int n = 0; n < NC; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[n][v] = W::zero();
  }
  for (int64_t k = 0; k < depth; ++k, x += NV * L, ++w) {
    F xv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) xv[v] = W::load(x + v * L);
#pragma GCC unroll 12
    for (int n = 0; n < NC; ++n) {
      const F wv = W::set1(w + n * kDepth);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[n][v] = W::fma(xv[v], wv, acc[n][v]);
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < NC; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* at = c + (n * NV + v) * L;
      W::store(at, first ? acc[n][v] : W::add(W::load(at), acc[n][v]));
    }
  }
}

template <class I, Format F>
struct LargeJob {
  using W = typename I::Wide;
  static constexpr int L = W::kLanes, kPanel = L * W::kVectors;
  const Problem* p;
  int64_t m0, rows;     /* the rows of x at work */
  int64_t panels;       /* of kPanel rows; the last may be narrower, then of L */
  int64_t narrow_from;  /* panels from here on are of L rows */
  int64_t block_panels; /* panels per block of rows */
  int64_t row_blocks;
  float* x;       /* [k / kDepth][panel][k][row]; */
  accel_slots::Slots slots; /* widened weights, then partial sums */

  static constexpr size_t kWeights = (size_t)kBlock * kDepth;
  static constexpr size_t kSums = (size_t)kBlock * kBlockRows;
  static constexpr size_t kSlot = kWeights + kSums;

  int64_t width(int64_t panel) const { return panel < narrow_from ? kPanel : L; }
  int64_t row_of(int64_t panel) const {
    return panel <= narrow_from ? panel * kPanel : narrow_from * kPanel + (panel - narrow_from) * L;
  }
  int64_t wide_rows() const { return row_of(panels); }

  static void lay_out(void* arg, int64_t begin, int64_t end) {
    const LargeJob& job = *(const LargeJob*)arg;
    const Problem& p = *job.p;
    alignas(64) float lines[L][kDepth];
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
        const int64_t depth = min64(kDepth, p.k - k0), padded = round_up(depth, kChunk);
        const int64_t wide = job.width(panel);
        float* out = job.x + k0 * job.wide_rows() + job.row_of(panel) * padded;
        for (int64_t part = 0; part < wide; part += L) {
          for (int l = 0; l < L; ++l) {
            const int64_t row = job.row_of(panel) + part + l;
            if (row < job.rows) {
              load_x<I, F>(p, job.m0 + row, k0, depth, lines[l]);
            } else {
              memset(lines[l], 0, sizeof lines[l]);
            }
          }
          for (int64_t k = 0; k < padded; k += L) I::transpose(lines[0] + k, kDepth, out + k * wide + part, wide);
        }
      }
    }
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const LargeJob& job = *(const LargeJob*)arg;
    const int32_t slot = job.slots.take();
    float* weights = job.slots.of(slot);
    for (int64_t i = begin; i < end; ++i) {
      job.block(i / job.row_blocks, i % job.row_blocks, weights, weights + kWeights);
    }
    job.slots.give(slot);
  }

  void block(int64_t column_block, int64_t row_block, float* weights, float* sums) const {
    const int64_t n0 = column_block * kBlock, columns = min64(kBlock, p->n - n0);
    const int64_t wide = round_up(columns, W::kColumns);
    const int64_t first = row_block * block_panels, last = min64(first + block_panels, panels), row0 = row_of(first);
    for (int64_t k0 = 0; k0 < p->k; k0 += kDepth) {
      const int64_t depth = min64(kDepth, p->k - k0), padded = round_up(depth, kChunk);
      for (int64_t c = 0; c < wide; ++c) {
        widen_row<I, F>(*p, n0 + min64(c, columns - 1), k0, depth, weights + c * kDepth);
      }
      for (int64_t panel = first; panel < last; ++panel) {
        const float* from = x + k0 * wide_rows() + row_of(panel) * padded;
        float* to = sums + (row_of(panel) - row0) * kBlock;
        const int64_t lanes = width(panel);
        for (int64_t c = 0; c < wide; c += W::kColumns) {
          (lanes == kPanel ? multiply<W, W::kVectors> : multiply<W, 1>)(from, weights + c * kDepth, padded,
                                                                         to + c * lanes, k0 == 0);
        }
      }
    }
    finish(n0, columns, first, last, sums);
  }

  /* Transposes back, adds the bias and writes outputs n0 ... n0 + columns of some panels. */
  void finish(int64_t n0, int64_t columns, int64_t first, int64_t last, const float* sums) const {
    alignas(64) float bias[kBlock], lines[L][kBlock];
    const accel_array* b = p->bias;
    for (int64_t c = 0; c < kBlock; ++c) {
      bias[c] = b && c < columns ? accel_load_float(b->data, (n0 + c) * b->strides[0], b->dtype) : 0.0f;
    }
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t lanes = width(panel);
      const float* from = sums + (row_of(panel) - row_of(first)) * kBlock;
      for (int64_t part = 0; part < lanes; part += L) {
        const int64_t row = row_of(panel) + part, count = min64(L, rows - row);
        for (int64_t c = 0; c < columns; c += L) I::transpose(from + c * lanes + part, lanes, lines[0] + c, kBlock);
        for (int64_t l = 0; l < count; ++l) {
          if (b) {
            for (int64_t c = 0; c < columns; ++c) lines[l][c] += bias[c];
          }
          store_floats<I>(*p, (m0 + row + l) * p->n + n0, lines[l], columns);
        }
      }
    }
  }
};

template <class I, Format F>
void large_rows_of(const Problem& p) {
  using Job = LargeJob<I, F>;
  Job job;
  job.p = &p;
  const int64_t turn = min64(p.rows, kTurnRows), column_blocks = ceil_div(p.n, kBlock);
  job.x = (float*)accel_scratch(p.call, (size_t)(round_up(turn, Job::kPanel) * round_up(p.k, kChunk)) * sizeof(float));
  if (!job.x || !job.slots.make(p.call, (int64_t)Job::kSlot)) return;

  for (job.m0 = 0; job.m0 < p.rows; job.m0 += turn) {
    job.rows = min64(turn, p.rows - job.m0);
    job.narrow_from = job.rows / Job::kPanel;
    const int64_t rest = ceil_div(job.rows - job.narrow_from * Job::kPanel, Job::L);
    job.panels = job.narrow_from + rest;
    if (rest == Job::W::kVectors) {
      job.narrow_from += 1;
      job.panels = job.narrow_from;
    }
    /* Few columns: rows are split further, so that there is work for several threads. */
    const int64_t least = ceil_div(job.panels * Job::kPanel, kBlockRows);
    const int64_t wanted = min64(ceil_div(8, column_blocks), ceil_div(job.panels, 2));
    job.block_panels = ceil_div(job.panels, wanted > least ? wanted : least);
    job.row_blocks = ceil_div(job.panels, job.block_panels);
    accel_parallel_for(p.call, job.panels, 1, Job::lay_out, &job);
    accel_parallel_for(p.call, column_blocks * job.row_blocks, 1, Job::run, &job);
  }
}

template <class I>
void large_rows(const Problem& p) {
  switch (p.format) {
    case kFloat32: return large_rows_of<I, kFloat32>(p);
    case kFloat16: return large_rows_of<I, kFloat16>(p);
    case kBfloat16: return large_rows_of<I, kBfloat16>(p);
    case kMxfp4: return large_rows_of<I, kMxfp4>(p);
    case kNvfp4: return large_rows_of<I, kNvfp4>(p);
    default: return large_rows_of<I, kMxfp8>(p);
  }
}

}  // namespace
}  // namespace linear
#endif
