/* What the entry points have in common: checks of their arrays, and the choice of the instruction set. */
#ifndef CIDER_SDPA_ARGUMENTS_H
#define CIDER_SDPA_ARGUMENTS_H

#include <stdio.h>

#include "problem.h"

namespace cider {
namespace {

inline bool is_float(int32_t dtype) { return dtype == ACCEL_FLOAT32 || dtype == ACCEL_FLOAT16 || dtype == ACCEL_BFLOAT16; }

inline const Bodies& bodies_for(const accel_call* call) {
#if defined(ACCEL_BUILD_AVX512)
  if (accel_has(call, ACCEL_ISA_AVX512)) return kAvx512Bodies;
#endif
#if defined(ACCEL_BUILD_AVX2)
  if (accel_has(call, ACCEL_ISA_AVX2)) return kAvx2Bodies;
#endif
#if defined(__aarch64__)
  if (accel_has(call, ACCEL_ISA_NEON)) return kNeonBodies;
#endif
  (void)call;
  return kPortableBodies;
}

inline Tensor tensor_of(const accel_array* a) {
  return {a->data, {a->strides[0], a->strides[1], a->strides[2], a->strides[3]}, a->dtype};
}

/* The mask of a problem whose other dimensions are known, or what is wrong with it. */
inline const char* describe_mask(const accel_array* m, Problem& p) {
  const int64_t scores[4] = {p.batch, p.heads, p.rows, p.keys};
  if (m->dtype != ACCEL_BOOL && !is_float(m->dtype)) return "mask must be bool or float";
  if (m->ndim > 4) return "mask must have at most four dimensions";
  p.mask.data = m->data;
  p.mask.dtype = m->dtype;
  for (int i = 0; i < m->ndim; ++i) {
    const int to = 4 - m->ndim + i;
    if (m->shape[i] != 1 && m->shape[i] != scores[to]) return "mask must broadcast to (B, Hq, L, S)";
    p.mask.stride[to] = m->shape[i] == 1 ? 0 : m->strides[i];
  }
  return NULL;
}

/* Keys or values whose elements are not neighbours (transposed, broadcast) are brought together first. */
inline bool gather(const Problem& p, const accel_array* a, Tensor& t) {
  const int64_t n = a->shape[3];
  if (n == 1 || t.stride[3] == 1) return true;
  const size_t item = accel_itemsize(a->dtype);
  char* copy = (char*)accel_scratch(p.call, (size_t)a->size * item);
  if (!copy) return false;
  char* to = copy;
  for (int64_t b = 0; b < a->shape[0]; ++b) {
    for (int64_t h = 0; h < a->shape[1]; ++h) {
      for (int64_t s = 0; s < a->shape[2]; ++s) {
        const int64_t at = b * t.stride[0] + h * t.stride[1] + s * t.stride[2];
        for (int64_t d = 0; d < n; ++d, to += item) {
          memcpy(to, (const char*)t.data + (at + d * t.stride[3]) * (int64_t)item, item);
        }
      }
    }
  }
  t = {copy, {a->shape[1] * a->shape[2] * n, a->shape[2] * n, n, 1}, a->dtype};
  return true;
}

inline void refuse(const accel_call* call, const char* kernel, const char* wrong) {
  char message[256];
  snprintf(message, sizeof message, "%s: %s", kernel, wrong);
  accel_fail(call, message);
}

/* The result of a problem that was checked. */
inline void attend(const Problem& p) {
  if (p.keys == 0) {
    memset(p.y, 0, (size_t)(p.batch * p.heads * p.rows * p.width) * accel_itemsize(p.y_dtype));
    return;
  }
  const Bodies& bodies = bodies_for(p.call);
  (p.rows <= kSmallRows ? bodies.small : bodies.large)(p);
}

}  // namespace
}  // namespace cider
#endif
