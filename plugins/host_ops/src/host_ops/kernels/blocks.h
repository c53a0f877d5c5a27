/* Rows of any float dtype and stride as blocks of floats, and loops over blocks. Included once per instruction set.
 *
 * A body works on blocks of at most kBlock floats. float32 with unit stride is used where it lies; anything else is
 * converted into a buffer on the stack and back. Conversions to float32 are exact, those from float32 round to
 * nearest even.
 */
#ifndef HOST_OPS_BLOCKS_H
#define HOST_OPS_BLOCKS_H

#include "common.h"

namespace host_ops {
namespace {

/* n elements from element `at` of p on, `stride` apart, as floats: where they lie or in `buffer`. */
template <class I>
const float* fetch(const void* p, int64_t at, int64_t stride, int32_t dtype, float* buffer, int64_t n) {
  if (stride == 1 && dtype == ACCEL_FLOAT32) return (const float*)p + at;
  if (stride == 1) {
    I::widen((const uint16_t*)p + at, dtype, buffer, n);
  } else {
    for (int64_t i = 0; i < n; ++i) buffer[i] = accel_load_float(p, at + i * stride, dtype);
  }
  return buffer;
}

/* Where to write n floats that are to become elements at ... at + n - 1 of an output; deliver() makes them so. */
inline float* target(void* p, int64_t at, int32_t dtype, float* buffer) {
  return dtype == ACCEL_FLOAT32 ? (float*)p + at : buffer;
}
template <class I>
void deliver(const float* values, void* p, int64_t at, int32_t dtype, int64_t n) {
  if (dtype != ACCEL_FLOAT32) I::narrow(values, dtype, (uint16_t*)p + at, n);
}

/* y[i] = f(x0[i], x1[i], ...) for n elements; what lies beyond n in the last vector is 0. */
template <class I, class Function, class... Pointer>
void map(int64_t n, float* y, const Function& f, const Pointer*... x) {
  int64_t i = 0;
  for (; i + I::kLanes <= n; i += I::kLanes) I::store(y + i, f(I::load(x + i)...));
  if (i < n) I::store_part(y + i, f(I::load_part(x + i, n - i)...), n - i);
}

/* Sum of the lanes, from the outside in. */
template <class I>
double total(typename I::D v) {
  constexpr int lanes = I::kLanes / 2;
  double part[lanes];
  memcpy(part, &v, sizeof part);
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

}  // namespace
}  // namespace host_ops
#endif
