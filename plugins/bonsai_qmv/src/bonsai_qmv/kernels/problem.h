/* What one call is about, in the form the kernels want it, and the scalar conversions of the half types.
 *
 * Everything here has internal linkage. The kernel bodies are compiled once per instruction set; an inline
 * function with external linkage would be merged by the linker, and the one copy that is kept could be the one
 * made of instructions this processor lacks.
 */
#ifndef BONSAI_QMV_PROBLEM_H
#define BONSAI_QMV_PROBLEM_H

#include <accel/gemm.h>
#include <stdint.h>
#include <string.h>

namespace bonsai {

/* y = x @ W.T (+ bias), validated. Words of W are contiguous along k, everything else has strides. */
struct Problem {
  const accel_call* call;
  int64_t rows, n, k;
  int64_t row0; /* the first of `rows` rows of x and y */
  int32_t bits, group; /* group: weights per scale; k % group == 0 */
  const accel_array* x;
  const uint8_t* w; /* row r starts at w + r * w_stride bytes and has k * bits / 8 bytes */
  int64_t w_stride;
  const void* scales; /* element (r, g) at r * s_stride[0] + g * s_stride[1], in elements */
  const void* biases;
  int64_t s_stride[2], b_stride[2];
  int32_t s_dtype, b_dtype;
  const accel_array* bias; /* (n,) or NULL */
  void* y;                 /* (rows, n) row-contiguous */
  int32_t y_dtype;
  /* What bonsai_affine_facts said of the weights; without it spread is infinite and symmetric false. */
  float spread, zeros;
  bool symmetric; /* bias = -ratio * scale holds everywhere, exactly */
  float ratio;
};

/* The most rows of the family whose rows do not depend on each other; more rows go to the blocked product. */
constexpr int64_t kSmallRows = 16;

/* Bodies for one instruction set. */
struct Bodies {
  void (*small)(const Problem&); /* 1..kSmallRows rows */
  void (*large)(const Problem&); /* any number of rows */
  void (*facts)(const Problem&); /* y is (4,), see facts_body.h; NULL: nothing is made of them */
};

/* ACCEL_BUILD_* say which files the build could compile (mlx_accel_add_kernels). */
extern const Bodies kPortableBodies;
#if defined(ACCEL_BUILD_AVX2)
extern const Bodies kAvx2Bodies;
#endif
#if defined(ACCEL_BUILD_AVX512)
extern const Bodies kAvx512Bodies;
#endif
#if defined(ACCEL_BUILD_AVX512_VNNI)
extern const Bodies kVnniBodies;
#endif
#if defined(ACCEL_BUILD_AMX)
extern const Bodies kAmxBodies;
#endif
#if defined(__aarch64__)
extern const Bodies kNeonBodies;
#endif

namespace {

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

using accel_gemm::load_floats;

}  // namespace
}  // namespace bonsai
#endif
