/* y = x @ W.T (+ bias) for many rows of x: the blocked product. Included once per instruction set.
 *
 * Layout     as in qmv_body.h; weight = scale * code + bias, rounded once to float32.
 * Rows       Any; meant for more than 16. Not row-invariant: the bits of a row may depend on how many rows there
 *            are. They do not depend on the number of threads.
 * Exactness  rounding. Each sum runs over at most 256 terms before it is added to the output's partial sum.
 * Method     A block of kColumns outputs by kDepth weights is decoded once into a small matrix of floats and
 *            multiplied with a block of rows of x; the matrix W as a whole is never made. Decoding keeps output
 *            columns in the vector lanes: with the packed words of a lane-full of rows side by side, code j lies
 *            at the same bit of the same word in every lane, so that all shifts are constants, also for codes
 *            that straddle words, and what is decoded lies ready for the product. x is laid out in panels of
 *            up to 12 rows, interleaved, so that the inner loop reads both sides in sequence.
 * Source     Written for this library, after the textbook scheme of a blocked product over packed panels.
 */
#ifndef BONSAI_QMV_QMM_BODY_H
#define BONSAI_QMV_QMM_BODY_H

#include "problem.h"

namespace bonsai {
namespace {

constexpr int kDepth = 256;      /* weights along k per block: a multiple of every group size */
constexpr int kColumns = 64;     /* output columns per block */
constexpr int kBlockRows = 192;  /* rows of x per block, at most */
constexpr int kChunkRows = 1024; /* rows of x that are laid out at a time, at most */

/* Codes 0..31 of a chunk in every lane: words[d] holds word d of the chunk of each lane's row. */
template <class W, int BITS, int J>
inline void decode_from(const uint32_t* words, typename W::F scale, typename W::F bias, float* out, int64_t ld) {
  if constexpr (J < 32) {
    constexpr int bit = BITS * J, word = bit / 32, shift = bit % 32;
    typename W::I q = W::template right<shift>(W::load_words(words + word * W::kLanes));
    if constexpr (shift + BITS > 32) {
      q = W::either(q, W::template left<32 - shift>(W::load_words(words + (word + 1) * W::kLanes)));
    }
    if constexpr (shift + BITS != 32) q = W::mask(q, (1u << BITS) - 1);
    W::store(out + J * ld, W::decode(scale, q, bias));
    decode_from<W, BITS, J + 1>(words, scale, bias, out, ld);
  }
}

/* Rows n0 ... of W (`columns` of them exist, the rest of `wide` repeats the last), weights k0 ... k0 + depth, to
 * out[panel][k][kPanel], a panel being kVectors * kLanes columns. */
template <class I, int BITS>
void decode_block(const Problem& p, int64_t n0, int64_t columns, int64_t wide, int64_t k0, int64_t depth, float* out) {
  using W = typename I::Wide;
  constexpr int L = W::kLanes, panel = W::kVectors * L;
  alignas(64) uint32_t words[kDepth / 32 * BITS * L];
  alignas(64) float scale[kDepth / 32 * L], bias[kDepth / 32 * L];
  const int64_t n_words = depth / 32 * BITS, groups = depth / p.group, g0 = k0 / p.group;
  for (int64_t c = 0; c < wide; c += L) {
    for (int l = 0; l < L; ++l) {
      const int64_t row = n0 + min64(c + l, columns - 1);
      const uint8_t* from = p.w + row * p.w_stride + k0 / 32 * 4 * BITS;
      for (int64_t d = 0; d < n_words; ++d) memcpy(&words[d * L + l], from + 4 * d, 4);
      alignas(64) float s[16], b[16];
      load_floats<I>(p.scales, row * p.s_stride[0] + g0 * p.s_stride[1], p.s_stride[1], p.s_dtype, s, groups);
      load_floats<I>(p.biases, row * p.b_stride[0] + g0 * p.b_stride[1], p.b_stride[1], p.b_dtype, b, groups);
      for (int64_t g = 0; g < groups; ++g) {
        scale[g * L + l] = s[g];
        bias[g * L + l] = b[g];
      }
    }
    float* to = out + c / panel * panel * depth + c % panel;
    for (int64_t k = 0; k < depth; k += 32) {
      const int64_t g = k / p.group;
      decode_from<W, BITS, 0>(words + k / 32 * BITS * L, W::load(scale + g * L), W::load(bias + g * L),
                              to + k * panel, panel);
    }
  }
}

/* c[m][panel columns] = or += sum over k of x[k][m] * w[k][columns], MR rows; c has kColumns floats a row. */
template <class W, int MR>
void multiply(const float* x, const float* w, int64_t depth, float* c, bool first) {
  using F = typename W::F;
  constexpr int NV = W::kVectors, L = W::kLanes;
  F acc[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[m][v] = W::zero();
  }
  for (int64_t k = 0; k < depth; ++k, x += MR, w += NV * L) {
    F wv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) wv[v] = W::load(w + v * L);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const F xv = W::set1(x[m]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[m][v] = W::fma(wv[v], xv, acc[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* at = c + m * kColumns + v * L;
      W::store(at, first ? acc[m][v] : W::add(W::load(at), acc[m][v]));
    }
  }
}

template <class W>
using Multiply = void (*)(const float*, const float*, int64_t, float*, bool);

template <class W, int MR>
Multiply<W> choose_multiply(int64_t rows) {
  if constexpr (MR == 1) {
    return multiply<W, 1>;
  } else {
    return rows == MR ? multiply<W, MR> : choose_multiply<W, MR - 1>(rows);
  }
}

template <class I>
struct LargeJob {
  using W = typename I::Wide;
  const Problem* p;
  int64_t m0, rows;     /* the rows of x at work */
  int64_t mr, panels;   /* panels of mr rows; the last is filled up with zeros */
  int64_t block_panels; /* panels per block of rows */
  int64_t row_blocks;
  float* x;       /* [k / kDepth][panel][k][mr] */
  float* scratch; /* one slot per thread: decoded weights, then partial sums */
  unsigned char* slots;
  int32_t n_slots;
  void (*decode)(const Problem&, int64_t, int64_t, int64_t, int64_t, int64_t, float*);
  Multiply<W> multiply;

  static constexpr size_t kWeights = (size_t)kColumns * kDepth;
  static constexpr size_t kSlot = kWeights + (size_t)kColumns * (kBlockRows + W::kMaxPanel);

  static void lay_out(void* arg, int64_t begin, int64_t end) {
    const LargeJob& job = *(const LargeJob*)arg;
    const Problem& p = *job.p;
    const int64_t stride = p.x->strides[p.x->ndim - 1], mr = job.mr;
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
        const int64_t depth = min64(kDepth, p.k - k0);
        float* out = job.x + k0 * job.panels * mr + panel * mr * depth;
        for (int64_t m = 0; m < mr; ++m) {
          const int64_t row = panel * mr + m;
          if (row >= job.rows) {
            for (int64_t k = 0; k < depth; ++k) out[k * mr + m] = 0.0f;
            continue;
          }
          alignas(64) float line[kDepth];
          load_floats<I>(p.x->data, accel_row_offset(p.x, job.m0 + row) + k0 * stride, stride, p.x->dtype, line, depth);
          for (int64_t k = 0; k < depth; ++k) out[k * mr + m] = line[k];
        }
      }
    }
  }

  /* There are as many slots as threads, so that one is free, or about to be. */
  int32_t take_slot() const {
    for (int32_t i = 0;; i = i + 1 < n_slots ? i + 1 : 0) {
      if (!__atomic_exchange_n(&slots[i], 1, __ATOMIC_ACQUIRE)) return i;
    }
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const LargeJob& job = *(const LargeJob*)arg;
    const int32_t slot = job.take_slot();
    float* weights = job.scratch + (size_t)slot * kSlot;
    for (int64_t i = begin; i < end; ++i) {
      job.block(i / job.row_blocks, i % job.row_blocks, weights, weights + kWeights);
    }
    __atomic_store_n(&job.slots[slot], 0, __ATOMIC_RELEASE);
  }

  void block(int64_t column_block, int64_t row_block, float* weights, float* sums) const {
    constexpr int width = W::kVectors * W::kLanes;
    const int64_t n0 = column_block * kColumns, columns = min64(kColumns, p->n - n0);
    const int64_t wide = ceil_div(columns, width) * width;
    const int64_t first = row_block * block_panels, last = min64(first + block_panels, panels);
    for (int64_t k0 = 0; k0 < p->k; k0 += kDepth) {
      const int64_t depth = min64(kDepth, p->k - k0);
      decode(*p, n0, columns, wide, k0, depth, weights);
      for (int64_t c = 0; c < wide; c += width) {
        for (int64_t panel = first; panel < last; ++panel) {
          multiply(x + k0 * panels * mr + panel * mr * depth, weights + c * depth, depth,
                   sums + (panel - first) * mr * kColumns + c, k0 == 0);
        }
      }
    }
    const accel_array* bias = p->bias;
    for (int64_t m = first * mr; m < min64(last * mr, rows); ++m) {
      const float* from = sums + (m - first * mr) * kColumns;
      for (int64_t c = 0; c < columns; ++c) {
        const float b = bias ? accel_load_float(bias->data, (n0 + c) * bias->strides[0], bias->dtype) : 0.0f;
        accel_store_float(p->y, (m0 + m) * p->n + n0 + c, p->y_dtype, bias ? from[c] + b : from[c]);
      }
    }
  }
};

template <class I>
void large_rows(const Problem& p) {
  using W = typename I::Wide;
  LargeJob<I> job;
  job.p = &p;
  switch (p.bits) {
    case 1: job.decode = decode_block<I, 1>; break;
    case 2: job.decode = decode_block<I, 2>; break;
    case 3: job.decode = decode_block<I, 3>; break;
    case 4: job.decode = decode_block<I, 4>; break;
    case 5: job.decode = decode_block<I, 5>; break;
    case 6: job.decode = decode_block<I, 6>; break;
    default: job.decode = decode_block<I, 8>; break;
  }
  const int64_t chunk = min64(p.rows, kChunkRows);
  job.n_slots = p.call->threads < 1 ? 1 : p.call->threads;
  job.x = (float*)accel_scratch(p.call, (size_t)((chunk + W::kMaxPanel) * p.k) * sizeof(float));
  job.scratch = (float*)accel_scratch(p.call, (size_t)job.n_slots * LargeJob<I>::kSlot * sizeof(float));
  job.slots = (unsigned char*)accel_scratch(p.call, (size_t)job.n_slots);
  if (!job.x || !job.scratch || !job.slots) return;
  for (int32_t i = 0; i < job.n_slots; ++i) job.slots[i] = 0;

  for (job.m0 = 0; job.m0 < p.rows; job.m0 += chunk) {
    job.rows = min64(chunk, p.rows - job.m0);
    job.panels = ceil_div(job.rows, W::kMaxPanel);
    job.mr = ceil_div(job.rows, job.panels);
    job.panels = ceil_div(job.rows, job.mr);
    job.multiply = choose_multiply<W, W::kMaxPanel>(job.mr);
    job.row_blocks = ceil_div(job.panels * job.mr, kBlockRows);
    job.block_panels = ceil_div(job.panels, job.row_blocks);
    job.row_blocks = ceil_div(job.panels, job.block_panels);
    accel_parallel_for(p.call, job.panels, 1, LargeJob<I>::lay_out, &job);
    accel_parallel_for(p.call, ceil_div(p.n, kColumns) * job.row_blocks, 1, LargeJob<I>::run, &job);
  }
}

}  // namespace
}  // namespace bonsai
#endif
