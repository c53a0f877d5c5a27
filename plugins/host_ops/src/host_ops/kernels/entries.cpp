/* The entry points: checks of what is handed over, and choice of the instruction set.
 *
 * x and y are float32, float16 or bfloat16, inputs may have any strides, outputs are row-contiguous. Nothing outside
 * the elements of inputs is read. Any number of rows, 0 included.
 *
 * host_ops_rms_norm   inputs  x (..., n), weight (n,) optional
 *                     output  y like x
 *                     params  eps
 * host_ops_rope       inputs  x (..., L, D), offsets (1 or x.shape[0] of int32 or int64) optional, frequencies
 *                             (dims / 2) float64, contiguous
 *                     output  y like x, in the same dtype
 *                     params  offset, traditional (0 or 1)
 * What they compute stands in norms_body.h and rope_body.h.
 */
#include <stdio.h>

#include "common.h"

namespace host_ops {
namespace {

bool is_float(const accel_array* a) {
  return a->dtype == ACCEL_FLOAT32 || a->dtype == ACCEL_FLOAT16 || a->dtype == ACCEL_BFLOAT16;
}

const Bodies& bodies_for(const accel_call* call) {
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

bool same_shape(const accel_array* a, const accel_array* b) {
  if (a->ndim != b->ndim) return false;
  for (int32_t d = 0; d < a->ndim; ++d) {
    if (a->shape[d] != b->shape[d]) return false;
  }
  return true;
}

/* True if nothing is wrong; otherwise reports it under the kernel's name. */
bool sound(const accel_call* call, const char* kernel, const char* wrong) {
  if (!wrong) return true;
  char message[256];
  snprintf(message, sizeof message, "host_ops_%s: %s", kernel, wrong);
  accel_fail(call, message);
  return false;
}

const char* check_norm(const accel_call* call, int32_t parameters) {
  if (call->n_inputs < 1 || call->n_inputs > 1 + parameters || call->n_outputs != 1 || call->n_params < 1) {
    return "expects x, its parameters, one output and eps";
  }
  const accel_array *x = call->inputs[0], *y = call->outputs[0];
  if (!is_float(x) || !is_float(y)) return "x and y must be float32, float16 or bfloat16";
  if (x->ndim < 1 || !same_shape(x, y)) return "y must have the shape of x, of at least one dimension";
  for (int32_t i = 1; i < call->n_inputs; ++i) {
    const accel_array* w = call->inputs[i];
    if (!is_float(w)) return "weight and bias must be float32, float16 or bfloat16";
    if (w->ndim != 1 || w->shape[0] != x->shape[x->ndim - 1]) return "weight and bias must be as long as rows of x";
  }
  return NULL;
}

const char* check_rope(const accel_call* call) {
  if (call->n_inputs < 2 || call->n_inputs > 3 || call->n_outputs != 1 || call->n_params < 2) {
    return "expects x, offsets (optional), frequencies, one output and parameters offset, traditional";
  }
  const accel_array *x = call->inputs[0], *f = call->inputs[call->n_inputs - 1], *y = call->outputs[0];
  if (!is_float(x) || y->dtype != x->dtype) return "x and y must be both float32, float16 or bfloat16";
  if (x->ndim < 2 || !same_shape(x, y)) return "y must have the shape of x, of at least two dimensions";
  if (f->dtype != ACCEL_FLOAT64 || f->ndim != 1 || !accel_is_row_contiguous(f)) {
    return "frequencies must be a contiguous float64 vector";
  }
  if (2 * f->size > x->shape[x->ndim - 1]) return "there are more pairs to turn than a row of x has";
  if (call->n_inputs == 3) {
    const accel_array* o = call->inputs[1];
    if (o->dtype != ACCEL_INT32 && o->dtype != ACCEL_INT64) return "offsets must be int32 or int64";
    if (o->ndim > 1 || (o->size != 1 && o->size != x->shape[0])) return "offsets must be one or one per sequence";
    if (o->size > 1 && x->ndim < 3) return "several offsets need x of at least three dimensions";
  }
  return NULL;
}

}  // namespace
}  // namespace host_ops

ACCEL_KERNEL void host_ops_rms_norm(const accel_call* call) {
  if (!host_ops::sound(call, "rms_norm", host_ops::check_norm(call, 1))) return;
  if (call->inputs[0]->size) host_ops::bodies_for(call).rms_norm(call);
}

ACCEL_KERNEL void host_ops_rope(const accel_call* call) {
  if (!host_ops::sound(call, "rope", host_ops::check_rope(call))) return;
  if (call->inputs[0]->size) host_ops::bodies_for(call).rope(call);
}
