/* What one call is about, in the form the kernels want it, and the scalar conversions of the half types.
 *
 * Everything here has internal linkage. The kernel bodies are compiled once per instruction set; an inline
 * function with external linkage would be merged by the linker, and the one copy that is kept could be the one
 * made of instructions this processor lacks.
 */
#ifndef HOST_LINEAR_PROBLEM_H
#define HOST_LINEAR_PROBLEM_H

#include <accel/half.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"

namespace linear {

/* y = x @ W.T (+ bias), validated. Rows of W are contiguous along k, everything else has strides. */
struct Problem {
  const accel_call* call;
  int64_t rows, n, k; /* k >= 1; a multiple of 32 (nvfp4: 16) for the microscaling formats */
  Format format;
  const accel_array* x;
  const uint8_t* w;      /* row r starts at w + r * w_stride bytes, layout in formats.h */
  int64_t w_stride;
  const uint8_t* scales; /* row r starts at scales + r * s_stride; NULL for dense formats */
  int64_t s_stride;
  const accel_array* bias; /* (n,) or NULL */
  void* y;                 /* (rows, n) row-contiguous */
  int32_t y_dtype;
};

/* Rows of the family whose rows do not depend on each other; up to kSmallRows rows always go there. */
constexpr int64_t kSmallRows = 16;

/* Bodies for one instruction set. */
struct Bodies {
  void (*small)(const Problem&); /* any number of rows, meant for few */
  void (*large)(const Problem&); /* any number of rows, meant for many */
  int64_t small_rows;            /* up to how many rows `small` is the faster */
};

/* ACCEL_BUILD_* say which files the build could compile (mlx_accel_add_kernels). */
extern const Bodies kPortableBodies;
#if defined(ACCEL_BUILD_AVX2)
extern const Bodies kAvx2Bodies;
#endif
#if defined(ACCEL_BUILD_AVX512)
extern const Bodies kAvx512Bodies;
#endif
#if defined(ACCEL_BUILD_AMX)
extern const Bodies kAmxBodies; /* bfloat16 weights only */
#endif
#if defined(__aarch64__)
extern const Bodies kNeonBodies;
#endif

namespace {

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/* n elements `stride` apart as floats; I is an instruction set. May write up to the next multiple of 16. */
template <class I>
void load_floats(const void* p, int64_t at, int64_t stride, int32_t dtype, float* out, int64_t n) {
  if (stride == 1 && dtype != ACCEL_FLOAT32) {
    I::widen((const uint16_t*)p + at, dtype, out, n);
  } else if (stride == 1) {
    memcpy(out, (const float*)p + at, (size_t)n * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = accel_load_float(p, at + i * stride, dtype);
  }
}

/* Elements k0 ... k0 + n of row `row` of x as floats, in the order in which I delivers weights of format F, filled
 * up with zeros to whole chunks. `out` has room for them. */
template <class I, Format F>
void load_x(const Problem& p, int64_t row, int64_t k0, int64_t n, float* out) {
  const int64_t stride = p.x->strides[p.x->ndim - 1];
  load_floats<I>(p.x->data, accel_row_offset(p.x, row) + k0 * stride, stride, p.x->dtype, out, n);
  for (int64_t j = n; j < round_up(n, kChunk); ++j) out[j] = 0.0f;
  if constexpr (I::template permutes<F>()) {
    for (int64_t j = 0; j < n; j += kChunk) I::template permute_chunk<F>(out + j);
  }
}

/* n floats to elements at ... of y. */
template <class I>
void store_floats(const Problem& p, int64_t at, const float* from, int64_t n) {
  if (p.y_dtype == ACCEL_FLOAT32) {
    memcpy((float*)p.y + at, from, (size_t)n * sizeof(float));
  } else {
    I::narrow(from, p.y_dtype, (uint16_t*)p.y + at, n);
  }
}

}  // namespace
}  // namespace linear
#endif
