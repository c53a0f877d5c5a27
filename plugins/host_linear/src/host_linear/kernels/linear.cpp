/* host_linear_matmul: y = x @ W.T (+ bias) with dense or microscaling W. The entry point: checks and dispatch.
 *
 * Inputs     0  x       (..., k)  float32, float16 or bfloat16, any strides
 *            1  W       dense: (n, k) float32, float16 or bfloat16, any strides;
 *                       microscaling: (n, k * bits / 32) uint32, layout in formats.h
 *            2  scales  microscaling only: (n, k / group) uint8
 *            then bias  (n,)  optional, float32, float16 or bfloat16
 * Output     0  y       (..., n)  float32, float16 or bfloat16
 * Parameters 0  format: 0 dense (as W's dtype says), 3 mxfp4 (group 32), 4 nvfp4 (group 16), 5 mxfp8 (group 32)
 * Rows       any number, 0 included
 * Exactness  rounding; rows of calls with 1..16 rows are bit-equal to the row alone (small_body.h)
 * Reads nothing outside the elements of its inputs, writes every element of y.
 */
#include <stdio.h>

#include "problem.h"

namespace linear {
namespace {

bool is_float(int32_t dtype) {
  return dtype == ACCEL_FLOAT32 || dtype == ACCEL_FLOAT16 || dtype == ACCEL_BFLOAT16;
}

const Bodies& bodies_for(const accel_call* call, Format format) {
#if defined(ACCEL_BUILD_AMX)
  if (accel_has(call, ACCEL_ISA_AVX512 | ACCEL_ISA_AMX_BF16) && format == kBfloat16) return kAmxBodies;
#endif
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
  (void)format;
  return kPortableBodies;
}

/* Number of inputs before the bias. */
int weight_inputs(Format f) { return chunk_scales(f) ? 3 : 2; }

const char* describe_weights(const accel_call* call, Problem& p) {
  const accel_array* w = call->inputs[1];
  if (w->ndim != 2) return "W must have two dimensions";
  p.n = w->shape[0];
  p.w = (const uint8_t*)w->data;
  p.w_stride = w->strides[0] * (int64_t)accel_itemsize(w->dtype);
  p.scales = NULL;
  p.s_stride = 0;
  if (!chunk_scales(p.format)) {
    if (!is_float(w->dtype)) return "dense W must be float32, float16 or bfloat16";
    p.format = w->dtype == ACCEL_FLOAT32 ? kFloat32 : w->dtype == ACCEL_FLOAT16 ? kFloat16 : kBfloat16;
    return w->shape[1] == p.k ? NULL : "the last dimensions of x and W differ";
  }
  const accel_array* s = call->inputs[2];
  const int64_t bits = p.format == kMxfp8 ? 8 : 4, group = kChunk / chunk_scales(p.format);
  if (p.k % group) return "the last dimension of x must be a multiple of the group size";
  if (w->dtype != ACCEL_UINT32 || w->shape[1] * 32 != p.k * bits) return "W must be uint32 (n, k * bits / 32)";
  if (s->dtype != ACCEL_UINT8 || s->ndim != 2 || s->shape[0] != p.n || s->shape[1] != p.k / group) {
    return "scales must be uint8 (n, k / group_size)";
  }
  p.scales = (const uint8_t*)s->data;
  p.s_stride = s->strides[0];
  return NULL;
}

/* The problem, or a message about what is wrong with it. */
const char* describe(const accel_call* call, Problem& p) {
  if (call->n_params < 1 || call->n_outputs != 1) return "expects one output and the parameter format";
  const int64_t format = call->params[0].i;
  if (format != 0 && (format < kMxfp4 || format > kMxfp8)) return "format must be 0, 3, 4 or 5";
  p.format = (Format)format;
  const int n_weights = weight_inputs(p.format);
  if (call->n_inputs < n_weights || call->n_inputs > n_weights + 1) return "expects inputs x, W[, scales][, bias]";
  const accel_array *x = call->inputs[0], *y = call->outputs[0];
  if (x->ndim < 1 || y->ndim < 1) return "x and y must have at least one dimension";
  p.call = call;
  p.k = x->shape[x->ndim - 1];
  if (p.k < 1) return "the last dimension of x must not be empty";
  if (const char* wrong = describe_weights(call, p)) return wrong;
  if (!is_float(x->dtype) || !is_float(y->dtype)) return "x and y must be float32, float16 or bfloat16";
  p.rows = x->size / p.k;
  if (y->shape[y->ndim - 1] != p.n || y->size != p.rows * p.n) {
    return "y must have the shape of x, its last dimension replaced by n";
  }
  p.bias = call->n_inputs > n_weights ? call->inputs[n_weights] : NULL;
  if (p.bias && (!is_float(p.bias->dtype) || p.bias->ndim != 1 || p.bias->shape[0] != p.n)) {
    return "bias must be (n,) float32, float16 or bfloat16";
  }
  p.x = x;
  p.y = y->data;
  p.y_dtype = y->dtype;
  return NULL;
}

/* A matrix whose rows are not contiguous (transposed, or with gaps between columns) is brought together first:
 * rare, and not worth a kernel of its own. NULL if there is no memory. */
const uint8_t* gather_rows(const accel_call* call, const accel_array* a, int64_t* stride) {
  const int64_t size = (int64_t)accel_itemsize(a->dtype), columns = a->shape[1];
  if (a->strides[1] == 1 || columns == 1) return (const uint8_t*)a->data;
  uint8_t* copy = (uint8_t*)accel_scratch(call, (size_t)(a->size * size));
  if (!copy) return NULL;
  for (int64_t r = 0; r < a->shape[0]; ++r) {
    const uint8_t* from = (const uint8_t*)a->data + r * a->strides[0] * size;
    for (int64_t j = 0; j < columns; ++j) {
      memcpy(copy + (r * columns + j) * size, from + j * a->strides[1] * size, (size_t)size);
    }
  }
  *stride = columns * size;
  return copy;
}

}  // namespace
}  // namespace linear

ACCEL_KERNEL void host_linear_matmul(const accel_call* call) {
  linear::Problem p;
  if (const char* wrong = linear::describe(call, p)) {
    char message[256];
    snprintf(message, sizeof message, "host_linear_matmul: %s", wrong);
    accel_fail(call, message);
    return;
  }
  if (p.rows == 0 || p.n == 0) return;
  p.w = linear::gather_rows(call, call->inputs[1], &p.w_stride);
  if (!p.w) return;
  if (p.scales) {
    p.scales = linear::gather_rows(call, call->inputs[2], &p.s_stride);
    if (!p.scales) return;
  }
  const linear::Bodies& bodies = linear::bodies_for(call, p.format);
  (p.rows <= bodies.small_rows ? bodies.small : bodies.large)(p);
}
