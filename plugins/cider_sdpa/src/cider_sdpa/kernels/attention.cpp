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
#include "arguments.h"

namespace cider {
namespace {

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
    if (const char* wrong = describe_mask(call->inputs[3], p)) return wrong;
  }
  p.sinks = sinks ? call->inputs[call->n_inputs - 1] : NULL;
  if (p.sinks && (!is_float(p.sinks->dtype) || p.sinks->ndim != 1 || p.sinks->shape[0] != p.heads)) {
    return "sinks must be (Hq,) float32, float16 or bfloat16";
  }
  return NULL;
}

}  // namespace
}  // namespace cider

ACCEL_KERNEL void cider_attention(const accel_call* call) {
  cider::Problem p;
  if (const char* wrong = cider::describe(call, p)) return cider::refuse(call, "cider_attention", wrong);
  if (call->outputs[0]->size == 0) return;
  if (p.keys && (!cider::gather(p, call->inputs[1], p.k) || !cider::gather(p, call->inputs[2], p.v))) return;
  cider::attend(p);
}
