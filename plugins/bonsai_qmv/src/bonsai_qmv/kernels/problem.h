/* What one call is about, in the form the kernels want it, and the scalar conversions of the half types.
 *
 * Everything here has internal linkage. The kernel bodies are compiled once per instruction set; an inline
 * function with external linkage would be merged by the linker, and the one copy that is kept could be the one
 * made of instructions this processor lacks.
 */
#ifndef BONSAI_QMV_PROBLEM_H
#define BONSAI_QMV_PROBLEM_H

#include <accel/kernel.h>
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

inline uint32_t bits_of(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}

/* Exact. Subnormals and normals alike are made by the multiplication: the 15 value bits, read as a float, are
 * the number times 2^-112. */
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = (uint32_t)(h & 0x7fffu) << 13;
  if (body >= 0x0f800000u) return float_of(sign | 0x70000000u | body); /* exponent all ones: inf, NaN */
  return float_of(sign | bits_of(float_of(body) * 5192296858534827628530496329220096.0f /* 2^112 */));
}

/* Round to nearest, ties to even; too large becomes inf. */
inline uint16_t float_to_half(float v) {
  const uint32_t u = bits_of(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above */
  if (a < 0x38800000u) { /* below 2^-14: adding 0.5 makes the unit of the sum 2^-24, and rounds */
    return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

inline float bfloat_to_float(uint16_t h) { return float_of((uint32_t)h << 16); }

inline uint16_t float_to_bfloat(float v) {
  const uint32_t u = bits_of(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u); /* NaN stays NaN */
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float load_as_float(const void* p, int64_t index, int32_t dtype) {
  if (dtype == ACCEL_FLOAT32) return ((const float*)p)[index];
  const uint16_t h = ((const uint16_t*)p)[index];
  return dtype == ACCEL_FLOAT16 ? half_to_float(h) : bfloat_to_float(h);
}

inline void store_from_float(void* p, int64_t index, int32_t dtype, float v) {
  if (dtype == ACCEL_FLOAT32) {
    ((float*)p)[index] = v;
  } else {
    ((uint16_t*)p)[index] = dtype == ACCEL_FLOAT16 ? float_to_half(v) : float_to_bfloat(v);
  }
}

/* Element offset of row `row` of x, whose rows are the row-major enumeration of its leading dimensions. */
inline int64_t x_row_offset(const accel_array* x, int64_t row) {
  int64_t offset = 0;
  for (int32_t d = x->ndim - 2; d >= 0; --d) {
    offset += (row % x->shape[d]) * x->strides[d];
    row /= x->shape[d];
  }
  return offset;
}

/* n elements `stride` apart as floats; I is an instruction set. May write up to the next multiple of 16. */
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

}  // namespace
}  // namespace bonsai
#endif
