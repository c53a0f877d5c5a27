/* What one call is about, in the form the kernels want it, and the scalar conversions of the half types.
 *
 * Everything here has internal linkage. The kernel bodies are compiled once per instruction set; an inline
 * function with external linkage would be merged by the linker, and the one copy that is kept could be the one
 * made of instructions this processor lacks.
 */
#ifndef CIDER_SDPA_PROBLEM_H
#define CIDER_SDPA_PROBLEM_H

#include <accel/half.h>
#include <stdint.h>
#include <string.h>

namespace cider {

enum MaskKind { kNoMask = 0, kCausal = 1, kArray = 2 };

/* A tensor (batch, head, position, element) with strides in elements. */
struct Tensor {
  const void* data;
  int64_t stride[4];
  int32_t dtype;
};

/* Rows of codes of `bits` bits, a little-endian bit stream along the row; element = scale * code + bias, with one scale
 * and bias for `group` neighbours (a multiple of 16). Words are uint32, neighbours in memory. */
struct Codes {
  Tensor words, scales, biases;
  int32_t bits;
  int64_t group;
};

/* y = softmax(scale * q @ k.T (+ mask), sinks) @ v, validated. No dimension is 0 but possibly `keys`; the stride of
 * the last dimension of k and v is 1. */
struct Problem {
  const accel_call* call;
  int64_t batch, heads, kv_heads, group; /* group: query heads per KV head */
  int64_t rows, keys, depth, width;      /* L, S, D, Dv */
  float scale;
  Tensor q, k, v, mask; /* k, v: unless quantized; mask: bool or float, strides 0 where it is broadcast; only for kArray */
  MaskKind kind;
  bool quantized = false;
  Codes kq, vq;             /* keys and values if quantized */
  const accel_array* sinks; /* (heads,) or NULL */
  void* y;                  /* (batch, heads, rows, width) row-contiguous */
  int32_t y_dtype;
};

/* The most rows of the family whose rows do not depend on each other; more rows go to the blocked kernel. */
constexpr int64_t kSmallRows = 16;

/* Rows that replace rows of a cache (cache_write.cpp), validated. */
struct CacheRows {
  const accel_call* call;
  Tensor from; /* (batch, heads, count, width) */
  void* to;    /* (batch, heads, capacity, width) row-contiguous */
  int32_t dtype;
  int64_t batch, heads, capacity, width, count, offset;
};

/* Bodies for one instruction set. */
struct Bodies {
  void (*small)(const Problem&); /* 1..kSmallRows rows */
  void (*large)(const Problem&); /* any number of rows */
  void (*write)(const CacheRows&);
};

/* ACCEL_BUILD_* say which files the build could compile (mlx_accel_add_kernels). */
extern const Bodies kPortableBodies;
#if defined(ACCEL_BUILD_AVX2)
extern const Bodies kAvx2Bodies;
#endif
#if defined(ACCEL_BUILD_AVX512)
extern const Bodies kAvx512Bodies;
#endif
#if defined(__aarch64__)
extern const Bodies kNeonBodies;
#endif

namespace {

constexpr float kInf = __builtin_inff();

/* How keys and values are stored. */
struct F32 {
  using Element = float;
};
struct F16 {
  using Element = uint16_t;
};
struct BF16 {
  using Element = uint16_t;
};

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline float to_float(F32, float v) { return v; }
inline float to_float(F16, uint16_t v) { return accel_float_from_half(v); }
inline float to_float(BF16, uint16_t v) { return accel_float_from_bfloat(v); }

/* Element d of row (b, h, s), rounded once. */
inline float code_value(const Codes& c, int64_t b, int64_t h, int64_t s, int64_t d) {
  const int64_t bit = d * c.bits, *w = c.words.stride, *e = c.scales.stride, *z = c.biases.stride, g = d / c.group;
  const uint8_t* p = (const uint8_t*)c.words.data + 4 * (b * w[0] + h * w[1] + s * w[2]) + (bit >> 3);
  const uint32_t word = p[0] | (uint32_t)((bit & 7) + c.bits > 8 ? p[1] : 0) << 8;
  const float scale = accel_load_float(c.scales.data, b * e[0] + h * e[1] + s * e[2] + g * e[3], c.scales.dtype);
  const float bias = accel_load_float(c.biases.data, b * z[0] + h * z[1] + s * z[2] + g * z[3], c.biases.dtype);
  return (float)((double)scale * ((word >> (bit & 7)) & ((1u << c.bits) - 1)) + (double)bias);
}

/* Key or value (b, h, s), whose elements have `item` bytes. */
inline const char* row_of(const Tensor& t, int64_t b, int64_t h, int64_t s, int64_t item) {
  return (const char*)t.data + (b * t.stride[0] + h * t.stride[1] + s * t.stride[2]) * item;
}

/* What will be needed next: rows of `bytes` bytes, `stride` bytes apart, fetched in lines that are `step` apart. */
struct Ahead {
  const char* at = NULL;
  int64_t stride = 0, bytes = 0, step = 64;
  void fetch(int64_t row) const {
    for (int64_t x = 0; x < bytes; x += step) __builtin_prefetch(at + row * stride + x, 0, 2);
  }
  /* The part of the work that falls to one of `count`. More requests at a time than the processor can keep open would
   * stop it. */
  Ahead share(int64_t index, int64_t count) const {
    return {at + 64 * index, stride, bytes - 64 * index, 64 * count};
  }
};

}  // namespace
}  // namespace cider
#endif
