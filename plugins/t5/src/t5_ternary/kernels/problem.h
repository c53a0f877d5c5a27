/* What one call is about, in the form the kernels want it. */
#ifndef T5_PROBLEM_H
#define T5_PROBLEM_H

#include <accel/gemm.h>
#include <accel/half.h>
#include <accel/kernel.h>

namespace t5 {

/* y = x @ W.T (+ bias), validated. Bytes of a row of W are contiguous, everything else has strides. */
struct Problem {
  const accel_call* call;
  int64_t rows, n, k;
  int64_t row0;  /* the first of `rows` rows of x and y */
  int32_t group; /* weights per scale, 64 or 128; k % group == 0 */
  const accel_array* x;
  const uint8_t* w; /* row r starts at w + r * w_stride and has k / 64 * 13 bytes */
  int64_t w_stride;
  const uint8_t* w_end; /* behind the last byte of W in memory */
  const void* scales;   /* element (r, g) at r * s_stride[0] + g * s_stride[1], in elements */
  int64_t s_stride[2];
  int32_t s_dtype;
  const accel_array* bias; /* (n,) or NULL */
  void* y;                 /* (rows, n) row-contiguous */
  int32_t y_dtype;
  /* What t5_facts said of the weights; without it spread is infinite. */
  float spread, zeros;
};

/* The most rows of the family whose rows do not depend on each other; more rows go to the blocked product. */
constexpr int64_t kSmallRows = 16;
/* 13 bytes are 64 weights and a digit of padding, or half a group of 128: a chunk, of 65 digits, in both group sizes.
 */
constexpr int64_t kChunkBytes = 13, kChunkWeights = 65;

/* Bodies for one instruction set. */
struct Bodies {
  void (*small)(const Problem&); /* 1..kSmallRows rows */
  void (*large)(const Problem&); /* any number of rows */
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

using accel_gemm::ceil_div;
using accel_gemm::least;
using accel_gemm::load_floats;

}  // namespace
}  // namespace t5
#endif
