/* The entry points: checks of what is handed over, and choice of the instruction set.
 *
 * x and y are float32, float16 or bfloat16, inputs may have any strides, outputs are row-contiguous. Nothing outside
 * the elements of inputs is read. Any number of rows, 0 included.
 *
 * host_ops_rms_norm           inputs  x (..., n), weight (n,) optional
 *                             output  y like x
 *                             params  eps
 * host_ops_residual_rms_norm  inputs  x (..., n), residual like x, weight (n,) optional
 *                             outputs x + residual and its norm, both like x
 *                             params  eps
 * host_ops_layer_norm         inputs  x (..., n), weight (n,) optional, bias (n,) optional
 *                             output  y like x
 *                             params  eps, has weight, has bias (0 or 1)
 * host_ops_rope               inputs  x (..., L, D), offsets (1 or x.shape[0] of int32 or int64) optional, frequencies
 *                                     (dims / 2), or frequencies and factors (2, dims / 2), float64, contiguous
 *                             output  y like x, in the same dtype
 *                             params  offset, traditional (0 or 1)
 * host_ops_silu, _gelu, _gelu_approx, _gelu_fast_approx
 *                             input   x; output like x
 * host_ops_relu2              input   x; output like x
 * host_ops_softcap            input   x; output like x; params cap
 * host_ops_swiglu_oai         inputs  gate, x of one shape; output like them; params alpha, limit
 * host_ops_swiglu, _geglu, _geglu_approx
 *                             inputs  gate, x of one shape; output like them
 * host_ops_residual           inputs  x, y of one shape; output like them
 * host_ops_logsumexp          input   x (..., n), n > 0; output (..., 1)
 * host_ops_softmax            input   x (..., n); output like x
 * host_ops_argmax             input   x (..., n), n > 0; output (...) uint32
 * host_ops_lookup             in lookup.cpp
 * What they compute, and how exactly, stands in norms_body.h, rope_body.h, elementwise_body.h and reduce_body.h.
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

/* x, `others` more inputs like it, then up to `parameters` vectors; `outputs` outputs like x. */
const char* check_norm(const accel_call* call, int32_t others, int32_t parameters, int32_t outputs, int32_t params) {
  const int32_t first = 1 + others;
  if (call->n_inputs < first || call->n_inputs > first + parameters || call->n_outputs != outputs ||
      call->n_params < params) {
    return "wrong number of inputs, outputs or parameters";
  }
  const accel_array* x = call->inputs[0];
  if (x->ndim < 1) return "x must have at least one dimension";
  for (int32_t i = 0; i < first; ++i) {
    if (!is_float(call->inputs[i])) return "x must be float32, float16 or bfloat16";
    if (!same_shape(x, call->inputs[i])) return "x and residual must have one shape";
  }
  for (int32_t i = 0; i < outputs; ++i) {
    if (!is_float(call->outputs[i])) return "y must be float32, float16 or bfloat16";
    if (!same_shape(x, call->outputs[i])) return "y must have the shape of x";
  }
  for (int32_t i = first; i < call->n_inputs; ++i) {
    const accel_array* w = call->inputs[i];
    if (!is_float(w)) return "weight and bias must be float32, float16 or bfloat16";
    if (w->ndim != 1 || w->shape[0] != x->shape[x->ndim - 1]) return "weight and bias must be as long as rows of x";
  }
  return NULL;
}

const char* check_layer_norm(const accel_call* call) {
  const char* wrong = check_norm(call, 0, 2, 1, 3);
  if (wrong) return wrong;
  const int32_t parameters = (call->params[1].i != 0) + (call->params[2].i != 0);
  return call->n_inputs == 1 + parameters ? NULL : "weight and bias must be there as the parameters say";
}

const char* check_elementwise(const accel_call* call, int32_t inputs, int32_t params) {
  if (call->n_inputs != inputs || call->n_outputs != 1 || call->n_params < params) {
    return "wrong number of inputs, outputs or parameters";
  }
  const accel_array* y = call->outputs[0];
  if (!is_float(y)) return "y must be float32, float16 or bfloat16";
  for (int32_t i = 0; i < inputs; ++i) {
    if (!is_float(call->inputs[i])) return "x must be float32, float16 or bfloat16";
    if (!same_shape(call->inputs[i], y)) return "inputs and output must have one shape";
  }
  return NULL;
}

/* One value, or index, for each row. */
const char* check_reduction(const accel_call* call, bool index) {
  if (call->n_inputs != 1 || call->n_outputs != 1) return "expects one input and one output";
  const accel_array *x = call->inputs[0], *y = call->outputs[0];
  if (!is_float(x)) return "x must be float32, float16 or bfloat16";
  if (index ? y->dtype != ACCEL_UINT32 : !is_float(y)) return "y has the wrong dtype";
  if (x->ndim < 1 || x->shape[x->ndim - 1] < 1) return "x must have elements along its last dimension";
  if (x->shape[x->ndim - 1] > (int64_t)UINT32_MAX) return "rows of x are too long";
  if (y->size != x->size / x->shape[x->ndim - 1]) return "y must have one element for each row of x";
  return NULL;
}

const char* check_rope(const accel_call* call) {
  if (call->n_inputs < 2 || call->n_inputs > 3 || call->n_outputs != 1 || call->n_params < 2) {
    return "expects x, offsets (optional), frequencies, one output and parameters offset, traditional";
  }
  const accel_array *x = call->inputs[0], *f = call->inputs[call->n_inputs - 1], *y = call->outputs[0];
  if (!is_float(x) || y->dtype != x->dtype) return "x and y must be both float32, float16 or bfloat16";
  if (x->ndim < 2 || !same_shape(x, y)) return "y must have the shape of x, of at least two dimensions";
  if (f->dtype != ACCEL_FLOAT64 || !accel_is_row_contiguous(f) || (f->ndim != 1 && (f->ndim != 2 || f->shape[0] != 2))) {
    return "frequencies must be a contiguous float64 vector, or two rows with factors";
  }
  if (2 * f->shape[f->ndim - 1] > x->shape[x->ndim - 1]) return "there are more pairs to turn than a row of x has";
  if (call->n_inputs == 3) {
    const accel_array* o = call->inputs[1];
    if (o->dtype != ACCEL_INT32 && o->dtype != ACCEL_INT64) return "offsets must be int32 or int64";
    if (o->ndim > 1 || (o->size != 1 && o->size != x->shape[0])) return "offsets must be one or one per sequence";
    if (o->size > 1 && x->ndim < 3) return "several offsets need x of at least three dimensions";
  }
  return NULL;
}

void activate(const accel_call* call, const char* name, Activation which, int32_t inputs, int32_t params = 0) {
  if (!sound(call, name, check_elementwise(call, inputs, params))) return;
  if (call->outputs[0]->size) bodies_for(call).activate(call, which);
}

}  // namespace
}  // namespace host_ops

using namespace host_ops;

ACCEL_KERNEL void host_ops_rms_norm(const accel_call* call) {
  if (!sound(call, "rms_norm", check_norm(call, 0, 1, 1, 1))) return;
  if (call->inputs[0]->size) bodies_for(call).rms_norm(call);
}

ACCEL_KERNEL void host_ops_residual_rms_norm(const accel_call* call) {
  if (!sound(call, "residual_rms_norm", check_norm(call, 1, 1, 2, 1))) return;
  if (call->inputs[0]->size) bodies_for(call).residual_rms_norm(call);
}

ACCEL_KERNEL void host_ops_layer_norm(const accel_call* call) {
  if (!sound(call, "layer_norm", check_layer_norm(call))) return;
  if (call->inputs[0]->size) bodies_for(call).layer_norm(call);
}

ACCEL_KERNEL void host_ops_rope(const accel_call* call) {
  if (!sound(call, "rope", check_rope(call))) return;
  if (call->inputs[0]->size) bodies_for(call).rope(call);
}

ACCEL_KERNEL void host_ops_silu(const accel_call* call) { activate(call, "silu", Activation::silu, 1); }
ACCEL_KERNEL void host_ops_gelu(const accel_call* call) { activate(call, "gelu", Activation::gelu, 1); }
ACCEL_KERNEL void host_ops_gelu_approx(const accel_call* call) {
  activate(call, "gelu_approx", Activation::gelu_approx, 1);
}
ACCEL_KERNEL void host_ops_gelu_fast_approx(const accel_call* call) {
  activate(call, "gelu_fast_approx", Activation::gelu_fast_approx, 1);
}
ACCEL_KERNEL void host_ops_relu2(const accel_call* call) { activate(call, "relu2", Activation::relu2, 1); }
ACCEL_KERNEL void host_ops_swiglu_oai(const accel_call* call) {
  activate(call, "swiglu_oai", Activation::swiglu_oai, 2, 2);
}
ACCEL_KERNEL void host_ops_swiglu(const accel_call* call) { activate(call, "swiglu", Activation::swiglu, 2); }
ACCEL_KERNEL void host_ops_geglu(const accel_call* call) { activate(call, "geglu", Activation::geglu, 2); }
ACCEL_KERNEL void host_ops_geglu_approx(const accel_call* call) {
  activate(call, "geglu_approx", Activation::geglu_approx, 2);
}
ACCEL_KERNEL void host_ops_softcap(const accel_call* call) { activate(call, "softcap", Activation::softcap, 1, 1); }
ACCEL_KERNEL void host_ops_residual(const accel_call* call) { activate(call, "residual", Activation::residual, 2); }

ACCEL_KERNEL void host_ops_logsumexp(const accel_call* call) {
  if (!sound(call, "logsumexp", check_reduction(call, false))) return;
  if (call->inputs[0]->size) bodies_for(call).logsumexp(call);
}

ACCEL_KERNEL void host_ops_softmax(const accel_call* call) {
  if (!sound(call, "softmax", check_elementwise(call, 1, 0))) return;
  if (call->inputs[0]->size) bodies_for(call).softmax(call);
}

ACCEL_KERNEL void host_ops_argmax(const accel_call* call) {
  if (!sound(call, "argmax", check_reduction(call, true))) return;
  if (call->inputs[0]->size) bodies_for(call).argmax(call);
}
