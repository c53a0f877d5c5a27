/* accel/gemm.h: y = x @ W.T (+ bias) for many rows of x, over weights that are decoded block by block. C++17.
 *
 *     accel_gemm::Product p = {call, rows, n, k, x, bias, y, y_dtype};
 *     accel_gemm::run<Isa>(p, decode);
 *
 * Isa          widen(const uint16_t*, dtype, float*, n): half-precision numbers to floats; may write up to the next
 *              multiple of 16
 *              Wide: F, kLanes floats; kVectors, F's a panel of columns has; kMaxPanel, rows of x at a time; zero(),
 *              load(p), store(p, F), add(F, F), fma(F a, F b, F c) = a * b + c, set1(float)
 * decode       (n0, columns, wide, k0, depth, float* out) writes weights k0 ... k0 + depth of rows n0 ... of W as
 *              floats to out[panel][k][columns of the panel], a panel being kVectors * kLanes columns; `columns` rows
 *              exist, the columns up to `wide` may be anything finite. Called from several threads. Blocks begin at
 *              multiples of kDepth and end there or at k
 * Rows         Any. The bits of a row may depend on how many rows there are, not on the number of threads.
 * Exactness    Each sum runs over at most kDepth terms before it is added to the output's partial sum, all in float32:
 *              class `rounding` if the weights are exact.
 * Method       The textbook scheme of a blocked product over packed panels: a block of kColumns columns by kDepth
 *              weights is decoded once into a small matrix and multiplied with a block of rows of x, which lies in
 *              panels of interleaved rows, so that the inner loop reads both sides in sequence.
 */
#ifndef ACCEL_GEMM_H
#define ACCEL_GEMM_H

#include <accel/half.h>
#include <accel/slots.h>

namespace accel_gemm {
namespace {

constexpr int kDepth = 256;      /* weights along k per block */
constexpr int kColumns = 64;     /* output columns per block */
constexpr int kBlockRows = 192;  /* rows of x per block, at most */
constexpr int kChunkRows = 1024; /* rows of x that are laid out at a time, at most */

struct Product {
  const accel_call* call;
  int64_t rows, n, k;
  const accel_array* x;    /* (..., k) float32, float16 or bfloat16, any strides */
  const accel_array* bias; /* (n,) or NULL */
  void* y;                 /* (rows, n) row-contiguous */
  int32_t y_dtype;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* n elements `stride` apart as floats. May write up to the next multiple of 16. */
template <class Isa>
void load_floats(const void* p, int64_t at, int64_t stride, int32_t dtype, float* out, int64_t n) {
  if (stride == 1 && dtype != ACCEL_FLOAT32) {
    Isa::widen((const uint16_t*)p + at, dtype, out, n);
  } else if (stride == 1) {
    memcpy(out, (const float*)p + at, (size_t)n * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = accel_load_float(p, at + i * stride, dtype);
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

template <class Isa, class Decode>
struct Job {
  using W = typename Isa::Wide;
  const Product* p;
  const Decode* decode;
  int64_t m0, rows;     /* the rows of x at work */
  int64_t mr, panels;   /* panels of mr rows; the last is filled up with zeros */
  int64_t block_panels; /* panels per block of rows */
  int64_t row_blocks;
  float* x;       /* [k / kDepth][panel][k][mr] */
  accel_slots::Slots slots; /* decoded weights, then partial sums */
  Multiply<W> multiply;

  static constexpr size_t kWeights = (size_t)kColumns * kDepth;
  static constexpr size_t kSlot = kWeights + (size_t)kColumns * (kBlockRows + W::kMaxPanel);

  static void lay_out(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const Product& p = *job.p;
    const int64_t stride = p.x->strides[p.x->ndim - 1], mr = job.mr;
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
        const int64_t depth = least(kDepth, p.k - k0);
        float* out = job.x + k0 * job.panels * mr + panel * mr * depth;
        for (int64_t m = 0; m < mr; ++m) {
          const int64_t row = panel * mr + m;
          if (row >= job.rows) {
            for (int64_t k = 0; k < depth; ++k) out[k * mr + m] = 0.0f;
            continue;
          }
          alignas(64) float line[kDepth];
          load_floats<Isa>(p.x->data, accel_row_offset(p.x, job.m0 + row) + k0 * stride, stride, p.x->dtype, line,
                           depth);
          for (int64_t k = 0; k < depth; ++k) out[k * mr + m] = line[k];
        }
      }
    }
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const int32_t slot = job.slots.take();
    float* weights = job.slots.of(slot);
    for (int64_t i = begin; i < end; ++i) {
      job.block(i / job.row_blocks, i % job.row_blocks, weights, weights + kWeights);
    }
    job.slots.give(slot);
  }

  void block(int64_t column_block, int64_t row_block, float* weights, float* sums) const {
    constexpr int width = W::kVectors * W::kLanes;
    const int64_t n0 = column_block * kColumns, columns = least(kColumns, p->n - n0);
    const int64_t wide = ceil_div(columns, width) * width;
    const int64_t first = row_block * block_panels, last = least(first + block_panels, panels);
    for (int64_t k0 = 0; k0 < p->k; k0 += kDepth) {
      const int64_t depth = least(kDepth, p->k - k0);
      (*decode)(n0, columns, wide, k0, depth, weights);
      for (int64_t c = 0; c < wide; c += width) {
        for (int64_t panel = first; panel < last; ++panel) {
          multiply(x + k0 * panels * mr + panel * mr * depth, weights + c * depth, depth,
                   sums + (panel - first) * mr * kColumns + c, k0 == 0);
        }
      }
    }
    const accel_array* bias = p->bias;
    for (int64_t m = first * mr; m < least(last * mr, rows); ++m) {
      const float* from = sums + (m - first * mr) * kColumns;
      for (int64_t c = 0; c < columns; ++c) {
        float v = from[c];
        if (bias) v += accel_load_float(bias->data, (n0 + c) * bias->strides[0], bias->dtype);
        accel_store_float(p->y, (m0 + m) * p->n + n0 + c, p->y_dtype, v);
      }
    }
  }
};

template <class Isa, class Decode>
void run(const Product& p, const Decode& decode) {
  using J = Job<Isa, Decode>;
  using W = typename Isa::Wide;
  J job;
  job.p = &p;
  job.decode = &decode;
  const int64_t chunk = least(p.rows, kChunkRows);
  job.x = (float*)accel_scratch(p.call, (size_t)((chunk + W::kMaxPanel) * p.k) * sizeof(float));
  if (!job.x || !job.slots.make(p.call, (int64_t)J::kSlot)) return;

  for (job.m0 = 0; job.m0 < p.rows; job.m0 += chunk) {
    job.rows = least(chunk, p.rows - job.m0);
    job.panels = ceil_div(job.rows, W::kMaxPanel);
    job.mr = ceil_div(job.rows, job.panels);
    job.panels = ceil_div(job.rows, job.mr);
    job.multiply = choose_multiply<W, W::kMaxPanel>(job.mr);
    job.row_blocks = ceil_div(job.panels * job.mr, kBlockRows);
    job.block_panels = ceil_div(job.panels, job.row_blocks);
    job.row_blocks = ceil_div(job.panels, job.block_panels);
    accel_parallel_for(p.call, job.panels, 1, J::lay_out, &job);
    accel_parallel_for(p.call, ceil_div(p.n, kColumns) * job.row_blocks, 1, J::run, &job);
  }
}

}  // namespace
}  // namespace accel_gemm
#endif /* ACCEL_GEMM_H */
