/* bonsai_affine_matmul: y = x @ W.T (+ bias) with affine quantized W. The entry point: checks and dispatch.
 *
 * Inputs     0  x       (..., k)  float32, float16 or bfloat16, any strides
 *            1  W       (n, k * bits / 32)  uint32, see qmv_body.h
 *            2  scales  (n, k / group)  float32, float16 or bfloat16, any strides
 *            3  biases  (n, k / group)  float32, float16 or bfloat16, any strides
 *            4  bias    (n,)  optional, float32, float16 or bfloat16
 * Output     0  y       (..., n)  float32, float16 or bfloat16
 * Parameters 0  bits (1, 2, 3, 4, 5, 6, 8), 1  group (32, 64, 128)
 *            optional, from bonsai_affine_facts over the whole layer: 2  spread (float), 3  1 if symmetric, 4  ratio, 5  zeros. Without them rows of x are never taken as fixed point.
 * Rows       any number, 0 included
 * Exactness  rounding; rows of calls with 1..16 rows are bit-equal to the row alone (qmv_body.h), more rows go to
 *            qmm_body.h
 *
 * bonsai_affine_facts: float32 (4,) from inputs x (of one row, whose numbers are not looked at), W, scales, biases and
 * parameters 0 and 1; see facts_body.h.
 *
 * Reads nothing outside the elements of its inputs, writes every element of y.
 */
#include <math.h>
#include <stdio.h>

#include "problem.h"

namespace bonsai {
namespace {

bool is_float(int32_t dtype) {
  return dtype == ACCEL_FLOAT32 || dtype == ACCEL_FLOAT16 || dtype == ACCEL_BFLOAT16;
}

const Bodies& bodies_for(const accel_call* call) {
#if defined(ACCEL_BUILD_AMX)
  /* Every processor with AMX has GFNI; what runs it may hide one of them. */
  static const bool has_gfni = __builtin_cpu_supports("gfni");
  if (has_gfni &&
      accel_has(call, ACCEL_ISA_AVX512 | ACCEL_ISA_AVX512_VNNI | ACCEL_ISA_AVX512_VBMI | ACCEL_ISA_AMX_INT8)) {
    return kAmxBodies;
  }
#endif
#if defined(ACCEL_BUILD_AVX512_VNNI)
  if (accel_has(call, ACCEL_ISA_AVX512 | ACCEL_ISA_AVX512_VNNI | ACCEL_ISA_AVX512_VBMI)) return kVnniBodies;
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
  return kPortableBodies;
}

/* The problem, or a message about what is wrong with it. */
const char* describe(const accel_call* call, Problem& p, bool facts = false) {
  if (call->n_inputs < 4 || call->n_inputs > 5 || call->n_outputs != 1 || call->n_params < 2) {
    return "expects inputs x, W, scales, biases[, bias], one output and parameters bits, group_size";
  }
  const accel_array *x = call->inputs[0], *w = call->inputs[1], *s = call->inputs[2], *b = call->inputs[3];
  const accel_array* y = call->outputs[0];
  p.call = call;
  p.bits = (int32_t)call->params[0].i;
  p.group = (int32_t)call->params[1].i;
  if (p.bits < 1 || p.bits > 8 || p.bits == 7) return "bits must be 1, 2, 3, 4, 5, 6 or 8";
  if (p.group != 32 && p.group != 64 && p.group != 128) return "group_size must be 32, 64 or 128";
  if (x->ndim < 1 || y->ndim < 1 || w->ndim != 2 || s->ndim != 2 || b->ndim != 2) {
    return "x must have at least one dimension, W, scales and biases two";
  }
  p.k = x->shape[x->ndim - 1];
  p.n = w->shape[0];
  if (p.k <= 0 || p.k % p.group) return "the last dimension of x must be a positive multiple of group_size";
  if (w->dtype != ACCEL_UINT32 || w->shape[1] * 32 != p.k * p.bits) return "W must be uint32 (n, k * bits / 32)";
  if (s->shape[0] != p.n || b->shape[0] != p.n || s->shape[1] != p.k / p.group || b->shape[1] != s->shape[1]) {
    return "scales and biases must be (n, k / group_size)";
  }
  if (!is_float(x->dtype) || !is_float(s->dtype) || !is_float(b->dtype) || !is_float(y->dtype)) {
    return "x, scales, biases and y must be float32, float16 or bfloat16";
  }
  p.rows = x->size / p.k;
  if (facts) {
    if (y->ndim != 1 || y->shape[0] != 4 || y->dtype != ACCEL_FLOAT32) {
      return "y must be float32 (4,)";
    }
  } else if (y->shape[y->ndim - 1] != p.n || y->size != p.rows * p.n) {
    return "y must have the shape of x, its last dimension replaced by n";
  }
  p.bias = call->n_inputs > 4 ? call->inputs[4] : NULL;
  if (p.bias && (!is_float(p.bias->dtype) || p.bias->ndim != 1 || p.bias->shape[0] != p.n)) {
    return "bias must be (n,) float32, float16 or bfloat16";
  }
  p.x = x;
  p.w = (const uint8_t*)w->data;
  p.w_stride = w->strides[0] * 4;
  p.scales = s->data;
  p.biases = b->data;
  for (int i = 0; i < 2; ++i) {
    p.s_stride[i] = s->strides[i];
    p.b_stride[i] = b->strides[i];
  }
  p.s_dtype = s->dtype;
  p.b_dtype = b->dtype;
  p.y = y->data;
  p.y_dtype = y->dtype;
  p.row0 = 0;
  const bool known = call->n_params >= 6;
  p.spread = known ? (float)call->params[2].f : INFINITY;
  p.zeros = known ? (float)call->params[5].f : 1;
  p.symmetric = known && call->params[3].i != 0;
  p.ratio = p.symmetric ? (float)call->params[4].f : 0;
  return NULL;
}

/* Words of a row that are not neighbours (a transposed or sliced W) are brought together first: rare, and not
 * worth a kernel of its own. */
bool gather_words(Problem& p, const accel_array* w) {
  const int64_t words = w->shape[1];
  if (w->strides[1] == 1 || words == 1) return true;
  uint32_t* copy = (uint32_t*)accel_scratch(p.call, (size_t)(p.n * words) * 4);
  if (!copy) return false;
  for (int64_t r = 0; r < p.n; ++r) {
    for (int64_t j = 0; j < words; ++j) {
      copy[r * words + j] = ((const uint32_t*)w->data)[r * w->strides[0] + j * w->strides[1]];
    }
  }
  p.w = (const uint8_t*)copy;
  p.w_stride = words * 4;
  return true;
}

}  // namespace
}  // namespace bonsai

ACCEL_KERNEL void bonsai_affine_matmul(const accel_call* call) {
  bonsai::Problem p;
  if (const char* wrong = bonsai::describe(call, p)) {
    char message[256];
    snprintf(message, sizeof message, "bonsai_affine_matmul: %s", wrong);
    accel_fail(call, message);
    return;
  }
  if (p.rows == 0 || p.n == 0) return;
  if (!bonsai::gather_words(p, call->inputs[1])) return;
  const bonsai::Bodies& bodies = bonsai::bodies_for(call);
  (p.rows <= bonsai::kSmallRows ? bodies.small : bodies.large)(p);
}

ACCEL_KERNEL void bonsai_affine_facts(const accel_call* call) {
  bonsai::Problem p;
  if (const char* wrong = bonsai::describe(call, p, true)) {
    char message[256];
    snprintf(message, sizeof message, "bonsai_affine_facts: %s", wrong);
    accel_fail(call, message);
    return;
  }
  if (!bonsai::gather_words(p, call->inputs[1])) return;
  const bonsai::Bodies& bodies = bonsai::bodies_for(call);
  if (bodies.facts) {
    bodies.facts(p);
  } else { /* no kernel asks */
    float* out = (float*)p.y;
    out[0] = INFINITY;
    out[1] = out[2] = 0;
    out[3] = 1;
  }
}
