/* cider_attention: softmax(scale * q @ k.T (+ mask), sinks) @ v
 *
 * input 0..2  q (B, Hq, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv): float32, float16 or bfloat16 each, any strides;
 *             Hq is a multiple of Hkv, query head h uses KV head h / (Hq / Hkv)
 * then        mask, bool (true: visible) or float (added), broadcast to (B, Hq, L, S); if params[1] is 2
 * then        sinks (Hq,), float: a further score per head whose value is 0; if params[2] is 1
 * output 0    (B, Hq, L, Dv), float32, float16 or bfloat16
 * params      scale; mask: 0 none, 1 causal (row i sees keys up to S - L + i), 2 array; 1 if there are sinks
 * contract    class `rounding`; for L up to 16 rows are independent bit for bit (small_body.h), more rows are
 *             blocked (large_body.h). Threads never change bits.
 * edge cases  As stock: without keys the result is 0; a row that sees no key under a bool or causal mask gets the mean
 *             of all values; a row whose additive mask is -inf throughout gets NaN; NaN and inf spread. Values of keys
 *             that are hidden may or may not be read, so that NaN there may or may not spread; causally hidden keys
 *             never matter for L up to 16.
 *
 * Here are the checks and the choice of the instruction set. */
#include <stdio.h>

#include "problem.h"

namespace cider {
namespace {

bool is_float(int32_t dtype) { return dtype == ACCEL_FLOAT32 || dtype == ACCEL_FLOAT16 || dtype == ACCEL_BFLOAT16; }

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

Tensor tensor_of(const accel_array* a) {
  return {a->data, {a->strides[0], a->strides[1], a->strides[2], a->strides[3]}, a->dtype};
}

/* The problem, or a message about what is wrong with it. */
const char* describe(const accel_call* call, Problem& p) {
  if (call->n_params < 3 || call->n_outputs != 1) return "expects parameters scale, mask, sinks, and one output";
  const int64_t kind = call->params[1].i, sinks = call->params[2].i;
  if (kind < kNoMask || kind > kArray || sinks < 0 || sinks > 1) return "mask must be 0, 1 or 2, and sinks 0 or 1";
  if (call->n_inputs != 3 + (kind == kArray) + sinks) return "expects inputs q, k, v[, mask][, sinks]";
  const accel_array *q = call->inputs[0], *k = call->inputs[1], *v = call->inputs[2], *y = call->outputs[0];
  if (q->ndim != 4 || k->ndim != 4 || v->ndim != 4 || y->ndim != 4) return "q, k, v and y must have four dimensions";
  if (!is_float(q->dtype) || !is_float(k->dtype) || !is_float(v->dtype) || !is_float(y->dtype)) {
    return "q, k, v and y must be float32, float16 or bfloat16";
  }
  p.call = call;
  p.batch = q->shape[0];
  p.heads = q->shape[1];
  p.rows = q->shape[2];
  p.depth = q->shape[3];
  p.kv_heads = k->shape[1];
  p.keys = k->shape[2];
  p.width = v->shape[3];
  p.scale = (float)call->params[0].f;
  p.kind = (MaskKind)kind;
  if (k->shape[0] != p.batch || k->shape[3] != p.depth) return "k must be (B, Hkv, S, D)";
  for (int i = 0; i < 3; ++i) {
    if (v->shape[i] != k->shape[i]) return "v must be (B, Hkv, S, Dv)";
    if (y->shape[i] != q->shape[i]) return "y must be (B, Hq, L, Dv)";
  }
  if (y->shape[3] != p.width) return "y must be (B, Hq, L, Dv)";
  if (p.kv_heads <= 0 || p.heads % p.kv_heads) return "Hq must be a multiple of Hkv";
  p.group = p.heads / p.kv_heads;
  p.q = tensor_of(q);
  p.k = tensor_of(k);
  p.v = tensor_of(v);
  p.y = y->data;
  p.y_dtype = y->dtype;
  p.mask = {};
  if (kind == kArray) {
    const accel_array* m = call->inputs[3];
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
  }
  p.sinks = sinks ? call->inputs[call->n_inputs - 1] : NULL;
  if (p.sinks && (!is_float(p.sinks->dtype) || p.sinks->ndim != 1 || p.sinks->shape[0] != p.heads)) {
    return "sinks must be (Hq,) float32, float16 or bfloat16";
  }
  return NULL;
}

/* Keys or values whose elements are not neighbours (transposed, broadcast) are brought together first. */
bool gather(const Problem& p, const accel_array* a, Tensor& t) {
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

}  // namespace
}  // namespace cider

ACCEL_KERNEL void cider_attention(const accel_call* call) {
  cider::Problem p;
  if (const char* wrong = cider::describe(call, p)) {
    char message[256];
    snprintf(message, sizeof message, "cider_attention: %s", wrong);
    accel_fail(call, message);
    return;
  }
  if (call->outputs[0]->size == 0) return;
  if (p.keys == 0) {
    memset(p.y, 0, (size_t)call->outputs[0]->size * accel_itemsize(p.y_dtype));
    return;
  }
  if (!cider::gather(p, call->inputs[1], p.k) || !cider::gather(p, call->inputs[2], p.v)) return;
  const cider::Bodies& bodies = cider::bodies_for(call);
  (p.rows <= cider::kSmallRows ? bodies.small : bodies.large)(p);
}
