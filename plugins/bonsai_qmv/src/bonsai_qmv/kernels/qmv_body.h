/* y = x @ W.T (+ bias) for 1..16 rows of x: the matrix-vector family. Included once per instruction set.
 *
 * Layout     W row r: k codes of `bits` bits as one little-endian bit stream (code j at bits [j * bits,
 *            (j + 1) * bits), LSB first); a chunk of 32 codes is 4 * bits whole bytes, a group of 32, 64 or 128
 *            codes is 4, 8 or 16 * bits bytes and has one scale and one bias (float32, float16 or bfloat16 each).
 *            weight = scale * code + bias, rounded once to float32.
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. The weight is made before it is multiplied: taking the bias out of the sum,
 *            sum(code * x) * scale + bias * sum(x), is one operation cheaper and cancels badly where weights are
 *            much smaller than biases. Each sum runs in 16 interleaved partial sums of k / 16 terms, which keeps
 *            the error under the bound 4 * sqrt(k) even if every term rounds the same way.
 * Rows are   independent: output (m, r) has one accumulator of 16 lanes, fed with the chunks in order and
 * independent  summed up in one fixed tree, whatever other rows, outputs or threads there are. Tile sizes only
 *            say how many such accumulators are in flight.
 * Method     Decode is bound by reading W, so that W is read once, front to back, and a chunk goes from packed
 *            bytes to products in registers. Several output rows share each load of x and hide the latency of
 *            their sums behind one another; with several rows of x each decoded chunk is used for all of them.
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

template <class I>
void load_floats(const void* p, int64_t at, int64_t stride, int32_t dtype, float* out, int64_t n) {
  if (stride == 1 && dtype != ACCEL_FLOAT32) {
    I::widen((const uint16_t*)p + at, dtype, out, n);
  } else if (stride == 1) {
    memcpy(out, (const float*)p + at, (size_t)n * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = load_as_float(p, at + i * stride, dtype);
  }
}

/* Rows of x as contiguous floats, rows * k, in the order in which I delivers weights. */
template <class I>
void prepare_x(const Problem& p, float* out) {
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  for (int64_t m = 0; m < p.rows; ++m) {
    float* row = out + m * p.k;
    load_floats<I>(p.x->data, x_row_offset(p.x, m), stride, p.x->dtype, row, p.k);
    if (I::permutes(p.bits)) {
      for (int64_t j = 0; j < p.k; j += 32) I::permute_chunk(row + j);
    }
  }
}

/* MT rows of x (first one m0) times R rows of W (n0 ..., of which nr exist). */
template <class I, int BITS, int MT, int R>
void tile(const Problem& p, const float* x, int64_t m0, int64_t n0, int64_t nr) {
  using V = typename I::V;
  using G = typename I::template Group<BITS>;
  alignas(64) float scale[R][kScaleBlock], bias[R][kScaleBlock];
  const int64_t groups = p.k / p.group, chunks = p.group / 32, ldx = p.k;
  const uint8_t* w[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) w[r] = p.w + (n0 + (r < nr ? r : nr - 1)) * p.w_stride; /* surplus rows repeat */
  const float* xs = x + m0 * ldx;

  V acc[R][MT];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) acc[r][m] = I::zero();
  }
  int64_t at = 0; /* byte of the chunk in its row */
  for (int64_t g0 = 0; g0 < groups; g0 += kScaleBlock) {
    const int64_t count = min64(kScaleBlock, groups - g0);
    for (int r = 0; r < R; ++r) {
      const int64_t row = n0 + (r < nr ? r : nr - 1);
      load_floats<I>(p.scales, row * p.s_stride[0] + g0 * p.s_stride[1], p.s_stride[1], p.s_dtype, scale[r], count);
      load_floats<I>(p.biases, row * p.b_stride[0] + g0 * p.b_stride[1], p.b_stride[1], p.b_dtype, bias[r], count);
    }
    for (int64_t g = 0; g < count; ++g) {
      if constexpr (MT == 1) {
        const float* xg = xs;
        const int64_t start = at;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const G group(scale[r][g], bias[r][g]);
          xg = xs;
          at = start;
          for (int64_t c = 0; c < chunks; ++c, xg += 32, at += 4 * BITS) {
            acc[r][0] = I::fma(group.template weights<0>(w[r] + at), I::load(xg), acc[r][0]);
            acc[r][0] = I::fma(group.template weights<1>(w[r] + at), I::load(xg + 16), acc[r][0]);
          }
        }
        xs = xg;
      } else {
        for (int64_t c = 0; c < chunks; ++c, xs += 32, at += 4 * BITS) {
          V v[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) v[r] = G(scale[r][g], bias[r][g]).template weights<0>(w[r] + at);
#pragma GCC unroll 8
          for (int m = 0; m < MT; ++m) {
            const V xv = I::load(xs + m * ldx);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) v[r] = G(scale[r][g], bias[r][g]).template weights<1>(w[r] + at);
#pragma GCC unroll 8
          for (int m = 0; m < MT; ++m) {
            const V xv = I::load(xs + m * ldx + 16);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (r >= nr) continue;
    const int64_t column = n0 + r;
    const float b = p.bias ? load_as_float(p.bias->data, column * p.bias->strides[0], p.bias->dtype) : 0.0f;
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) {
      const float sum = I::sum(acc[r][m]);
      store_from_float(p.y, (m0 + m) * p.n + column, p.y_dtype, p.bias ? sum + b : sum);
    }
  }
}

/* Output rows per tile: as many as the registers hold. */
template <class I>
constexpr int tile_rows(int mt) {
  if (mt == 1) return I::kNarrowRows;
  const int r = I::kAccumulators / mt;
  return r > 4 ? 4 : r < 1 ? 1 : r;
}

template <class I>
struct SmallJob {
  const Problem* p;
  const float* x;
  int tiles; /* over rows of x */
  /* The kernels of the tiles: the first `longer` take mt rows, the others one less. */
  void (*kernel[2])(const Problem&, const float*, int64_t, int64_t, int64_t);
  int mt, longer;
  int step; /* output rows per tile */

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int64_t stop = min64(end * kUnit, job.p->n);
    for (int64_t n0 = begin * kUnit; n0 < stop; n0 += job.step) {
      const int64_t nr = min64(job.step, stop - n0);
      for (int t = 0, m0 = 0; t < job.tiles; ++t) {
        const bool full = t < job.longer;
        job.kernel[full ? 0 : 1](*job.p, job.x, m0, n0, nr);
        m0 += full ? job.mt : job.mt - 1;
      }
    }
  }
};

template <class I, int BITS, int MT>
void choose_tile(SmallJob<I>& job) {
  constexpr int r = tile_rows<I>(MT);
  if (job.mt == MT) {
    job.kernel[0] = tile<I, BITS, MT, r>;
    /* Only where rows are split over tiles do two heights occur. */
    if constexpr (2 * MT > I::kMaxTile) job.kernel[1] = tile<I, BITS, MT - 1, r>;
    job.step = r;
  } else if constexpr (MT > 1) {
    choose_tile<I, BITS, MT - 1>(job);
  }
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
  prepare_x<I>(p, x);

  SmallJob<I> job;
  job.p = &p;
  job.x = x;
  job.tiles = (int)ceil_div(p.rows, I::kMaxTile);
  job.mt = (int)ceil_div(p.rows, job.tiles);
  job.longer = (int)(p.rows - (int64_t)job.tiles * (job.mt - 1));
  switch (p.bits) {
    case 1: choose_tile<I, 1, I::kMaxTile>(job); break;
    case 2: choose_tile<I, 2, I::kMaxTile>(job); break;
    case 3: choose_tile<I, 3, I::kMaxTile>(job); break;
    case 4: choose_tile<I, 4, I::kMaxTile>(job); break;
    case 5: choose_tile<I, 5, I::kMaxTile>(job); break;
    case 6: choose_tile<I, 6, I::kMaxTile>(job); break;
    default: choose_tile<I, 8, I::kMaxTile>(job); break;
  }
  /* Pieces of about 128 k weights: some microseconds, against the tenths of one that handing out a piece
   * costs. What is smaller than two pieces is not worth waking a thread for. */
  const int64_t units = ceil_div(p.n, kUnit);
  const int64_t grain = ceil_div(131072, kUnit * p.k);
  if (units < 2 * grain || p.call->threads < 2) {
    SmallJob<I>::run(&job, 0, units);
  } else {
    accel_parallel_for(p.call, units, grain, SmallJob<I>::run, &job);
  }
}

}  // namespace
}  // namespace bonsai
#endif
