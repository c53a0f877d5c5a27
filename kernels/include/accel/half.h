/* accel/half.h: float16 and bfloat16 as bits, and elements of any float dtype as floats. C11 and C++.
 *
 * Conversions to float are exact; conversions from float round to nearest, ties to even, and keep NaN and infinity.
 *
 * Every function has internal linkage. Kernel sources are compiled once per instruction set; an inline function with
 * external linkage would be merged by the linker, and the one copy that is kept could be the one made of instructions
 * that this processor lacks.
 */
#ifndef ACCEL_HALF_H
#define ACCEL_HALF_H

#include <accel/kernel.h>
#include <string.h>

static inline uint32_t accel_bits_of_float(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
static inline float accel_float_of_bits(uint32_t u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}

/* Subnormals and normals alike are made by the multiplication: the 15 value bits, read as a float, are the number times
 * 2^-112. */
static inline float accel_float_from_half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = (uint32_t)(h & 0x7fffu) << 13;
  if (body >= 0x0f800000u) return accel_float_of_bits(sign | 0x70000000u | body); /* inf, NaN */
  const float value = accel_float_of_bits(body) * 5192296858534827628530496329220096.0f; /* 2^112 */
  return accel_float_of_bits(sign | accel_bits_of_float(value));
}

static inline uint16_t accel_half_from_float(float v) {
  const uint32_t u = accel_bits_of_float(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above */
  if (a < 0x38800000u) { /* below 2^-14: adding 0.5 makes the unit of the sum 2^-24, and rounds */
    return (uint16_t)(sign | (accel_bits_of_float(accel_float_of_bits(a) + 0.5f) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

static inline float accel_float_from_bfloat(uint16_t h) { return accel_float_of_bits((uint32_t)h << 16); }

static inline uint16_t accel_bfloat_from_float(float v) {
  const uint32_t u = accel_bits_of_float(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u); /* NaN stays NaN */
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline int accel_is_float(int32_t dtype) {
  return dtype == ACCEL_FLOAT32 || dtype == ACCEL_FLOAT16 || dtype == ACCEL_BFLOAT16;
}

/* Element `index` of a float32, float16 or bfloat16 array. */
static inline float accel_load_float(const void* p, int64_t index, int32_t dtype) {
  if (dtype == ACCEL_FLOAT32) return ((const float*)p)[index];
  const uint16_t h = ((const uint16_t*)p)[index];
  return dtype == ACCEL_FLOAT16 ? accel_float_from_half(h) : accel_float_from_bfloat(h);
}
static inline void accel_store_float(void* p, int64_t index, int32_t dtype, float v) {
  if (dtype == ACCEL_FLOAT32) {
    ((float*)p)[index] = v;
  } else {
    ((uint16_t*)p)[index] = dtype == ACCEL_FLOAT16 ? accel_half_from_float(v) : accel_bfloat_from_float(v);
  }
}

/* Element offset of row `row` of an array whose rows are the row-major enumeration of its leading dimensions. */
static inline int64_t accel_row_offset(const accel_array* a, int64_t row) {
  int64_t offset = 0;
  for (int32_t d = a->ndim - 2; d >= 0; --d) {
    offset += (row % a->shape[d]) * a->strides[d];
    row /= a->shape[d];
  }
  return offset;
}

#endif /* ACCEL_HALF_H */
