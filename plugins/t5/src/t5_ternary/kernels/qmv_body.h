/* y = x @ W.T (+ bias) for 1..16 rows of x in float32. Included once per instruction set.
 *
 * Layout     as in product.cpp. A chunk of 13 bytes is five vectors of 13 digits: digit i of every byte. x is laid out
 *            in the same order once per call, [row][chunk][digit][16], with zeros where no weight is: in the lanes
 *            beyond the thirteenth and under the padding.
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. digit - 1 is -1, 0 or 1, so that products with it are exact; what a group adds up to, in 16
 *            interleaved sums of at most 10 terms, is multiplied by its scale and added to the sums of the output.
 * Rows       Independent of each other: output (m, r) has sums of its own, fed with the groups in order and summed up
 *            in one fixed tree, whatever other rows, outputs or threads there are.
 * Source     Written for this library. That floor(b / 3^i) is a multiplication and a shift is well known.
 */
#ifndef T5_QMV_BODY_H
#define T5_QMV_BODY_H

#include "problem.h"

namespace t5 {
namespace {

/* Outputs that pieces of a parallel loop are made of. */
constexpr int64_t kUnit = 8;
/* Floats of x for a chunk. */
constexpr int64_t kChunkFloats = 5 * 16;
/* Groups whose scales are converted at a time. */
constexpr int64_t kScaleBlock = 64;

/* One row of x in the order of the digits; `line` has room for k floats. */
template <class Isa>
void lay_out(const Problem& p, int64_t row, float* line, float* out) {
  const int64_t stride = p.x->strides[p.x->ndim - 1], chunks = p.k / 64;
  load_floats<Isa>(p.x->data, accel_row_offset(p.x, row), stride, p.x->dtype, line, p.k);
  const int64_t per_group = p.group / 64;
  for (int64_t c = 0; c < chunks; ++c, out += kChunkFloats) {
    const int64_t first = c % per_group * kChunkWeights; /* within the group */
    const float* from = line + c / per_group * p.group + first;
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t b = 0; b < 16; ++b) {
        const int64_t j = 5 * b + i;
        out[16 * i + b] = b < kChunkBytes && first + j < p.group ? from[j] : 0.0f;
      }
    }
  }
}

/* Sums of MT rows of x with row r of W: lanes[m][16]. */
template <class Isa, int CHUNKS, int MT>
void dot(const Problem& p, const float* x, int64_t x_stride, int64_t r, float (*lanes)[16]) {
  using V = typename Isa::V;
  V acc[MT];
#pragma GCC unroll 8
  for (int m = 0; m < MT; ++m) acc[m] = Isa::zero();
  const uint8_t* w = p.w + r * p.w_stride;
  const int64_t groups = p.k / p.group;
  alignas(64) float scale[kScaleBlock];
  for (int64_t g0 = 0; g0 < groups; g0 += kScaleBlock) {
    const int64_t count = least(kScaleBlock, groups - g0);
    load_floats<Isa>(p.scales, r * p.s_stride[0] + g0 * p.s_stride[1], p.s_stride[1], p.s_dtype, scale, count);
    for (int64_t g = 0; g < count; ++g) {
      V part[MT];
#pragma GCC unroll 8
      for (int m = 0; m < MT; ++m) part[m] = Isa::zero();
#pragma GCC unroll 2
      for (int c = 0; c < CHUNKS; ++c, w += kChunkBytes, x += kChunkFloats) {
        V digits[5];
        if (w + 16 <= p.w_end) {
          Isa::digits(w, digits);
        } else {
          uint8_t last[16] = {0};
          memcpy(last, w, (size_t)kChunkBytes);
          Isa::digits(last, digits);
        }
#pragma GCC unroll 5
        for (int i = 0; i < 5; ++i) {
#pragma GCC unroll 8
          for (int m = 0; m < MT; ++m) part[m] = Isa::fma(digits[i], Isa::load(x + m * x_stride + 16 * i), part[m]);
        }
      }
      const V s = Isa::set1(scale[g]);
#pragma GCC unroll 8
      for (int m = 0; m < MT; ++m) acc[m] = Isa::fma(s, part[m], acc[m]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MT; ++m) Isa::store(lanes[m], acc[m]);
}

template <class Isa>
struct SmallJob {
  const Problem* p;
  const float* x;
  int64_t x_stride; /* floats of a row of x */

  template <int CHUNKS, int MT>
  void tile(int64_t m0, int64_t r) const {
    alignas(64) float lanes[MT][16];
    dot<Isa, CHUNKS, MT>(*p, x + m0 * x_stride, x_stride, r, lanes);
    for (int m = 0; m < MT; ++m) {
      float y = Isa::sum(lanes[m]);
      if (p->bias) y += accel_load_float(p->bias->data, r * p->bias->strides[0], p->bias->dtype);
      accel_store_float(p->y, (p->row0 + m0 + m) * p->n + r, p->y_dtype, y);
    }
  }

  template <int CHUNKS>
  void output(int64_t r) const {
    int64_t m = 0;
    for (; m + 4 <= p->rows; m += 4) tile<CHUNKS, 4>(m, r);
    switch (p->rows - m) {
      case 3: tile<CHUNKS, 3>(m, r); break;
      case 2: tile<CHUNKS, 2>(m, r); break;
      case 1: tile<CHUNKS, 1>(m, r); break;
      default: break;
    }
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    for (int64_t r = begin * kUnit; r < least(end * kUnit, job.p->n); ++r) {
      if (job.p->group == 64) {
        job.template output<1>(r);
      } else {
        job.template output<2>(r);
      }
    }
  }
};

/* A piece of 48 k weights takes some microseconds, against the tenths of one that handing it out costs. Large matrices
 * are cut into larger pieces. A further row of x counts as half a reading of W. */
inline int64_t count_pieces(const Problem& p) {
  const int64_t work = p.n * p.k * (p.rows + 1) / 2, fine = work / 49152, coarse = work / 262144;
  return coarse > 16 ? coarse : least(fine, 16);
}

/* Bytes that small_rows asks for. */
inline size_t small_rows_bytes(int64_t rows, int64_t k) {
  return (size_t)(rows * (k / 64 * kChunkFloats) + k + 16) * sizeof(float);
}

/* The product, with that memory at `x`. */
template <class Isa>
void small_rows_in(const Problem& p, float* x) {
  const int64_t x_stride = p.k / 64 * kChunkFloats;
  for (int64_t m = 0; m < p.rows; ++m) lay_out<Isa>(p, p.row0 + m, x + p.rows * x_stride, x + m * x_stride);
  SmallJob<Isa> job = {&p, x, x_stride};
  const int64_t units = ceil_div(p.n, kUnit), pieces = count_pieces(p);
  if (pieces < 2 || p.call->threads < 2) {
    SmallJob<Isa>::run(&job, 0, units);
  } else {
    accel_parallel_for(p.call, units, ceil_div(units, pieces), SmallJob<Isa>::run, &job);
  }
}

template <class Isa>
void small_rows(const Problem& p) {
  float* x = (float*)accel_scratch(p.call, small_rows_bytes(p.rows, p.k));
  if (x) small_rows_in<Isa>(p, x);
}

}  // namespace
}  // namespace t5
#endif
