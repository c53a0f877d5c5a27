/* cider_quantized_attention: softmax(scale * q @ k.T (+ mask)) @ v over a quantized cache
 *
 * input 0     q (B, Hq, L, D): float32, float16 or bfloat16, any strides
 * input 1..3  keys: codes (B, Hkv, S, D * bits / 32) uint32, scales and biases (B, Hkv, S, D / group_size), float
 * input 4..6  values: the same
 * then        mask, bool (true: visible) or float (added), broadcast to (B, Hq, L, S); if params[1] is 2
 * output 0    (B, Hq, L, D), float32, float16 or bfloat16
 * params      scale; mask: 0 none, 1 causal, 2 array; bits 1..8; group_size, a multiple of 16
 * layout      code i of a row is at bits [bits * i, bits * (i + 1)) of the row's little-endian bit stream;
 *             element = scale * code + bias, rounded to float32 once
 * bytes       codes, scales and biases once for up to 16 rows and all query heads of their KV head
 * contract    as cider_attention (attention.cpp), over these elements: class `rounding`, rows independent for L up to
 *             16, the same edge cases. 128 keys (64 for more rows) are unpacked to floats at a time, in the cache. */
#include "arguments.h"

namespace cider {
namespace {

/* Codes with their scales and biases, or what is wrong with them. */
const char* describe_codes(const accel_call* call, int first, const Problem& p, Codes& c) {
  const accel_array *words = call->inputs[first], *scales = call->inputs[first + 1], *biases = call->inputs[first + 2];
  if (words->ndim != 4 || scales->ndim != 4 || biases->ndim != 4) return "codes, scales, biases need four dimensions";
  if (words->dtype != ACCEL_UINT32) return "codes must be uint32";
  if (!is_float(scales->dtype) || !is_float(biases->dtype)) return "scales and biases must be float";
  const int64_t rows[3] = {p.batch, p.kv_heads, p.keys};
  for (int i = 0; i < 3; ++i) {
    if (words->shape[i] != rows[i] || scales->shape[i] != rows[i] || biases->shape[i] != rows[i]) {
      return "keys and values must be (B, Hkv, S, ...)";
    }
  }
  if (words->shape[3] * 32 != p.depth * c.bits || scales->shape[3] * c.group != p.depth ||
      biases->shape[3] * c.group != p.depth) {
    return "codes, scales and biases must fit bits, group_size and q";
  }
  c.words = tensor_of(words);
  c.scales = tensor_of(scales);
  c.biases = tensor_of(biases);
  return NULL;
}

const char* describe(const accel_call* call, Problem& p) {
  if (call->n_params < 4 || call->n_outputs != 1) return "expects parameters scale, mask, bits, group_size, one output";
  const int64_t kind = call->params[1].i, bits = call->params[2].i, group = call->params[3].i;
  if (kind < kNoMask || kind > kArray) return "mask must be 0, 1 or 2";
  if (bits < 1 || bits > 8 || group < 16 || group % 16) return "bits must be 1..8, group_size a multiple of 16";
  if (call->n_inputs != 7 + (kind == kArray)) return "expects q, codes, scales, biases of keys and of values[, mask]";
  const accel_array *q = call->inputs[0], *k = call->inputs[1], *y = call->outputs[0];
  if (q->ndim != 4 || k->ndim != 4 || y->ndim != 4) return "q, codes and y must have four dimensions";
  if (!is_float(q->dtype) || !is_float(y->dtype)) return "q and y must be float32, float16 or bfloat16";
  p.call = call;
  p.batch = q->shape[0];
  p.heads = q->shape[1];
  p.rows = q->shape[2];
  p.depth = p.width = q->shape[3];
  p.kv_heads = k->shape[1];
  p.keys = k->shape[2];
  if (p.kv_heads <= 0 || p.heads % p.kv_heads) return "Hq must be a multiple of Hkv";
  for (int i = 0; i < 4; ++i) {
    if (y->shape[i] != q->shape[i]) return "y must be (B, Hq, L, D)";
  }
  p.group = p.heads / p.kv_heads;
  p.scale = (float)call->params[0].f;
  p.kind = (MaskKind)kind;
  p.quantized = true;
  p.kq.bits = p.vq.bits = (int32_t)bits;
  p.kq.group = p.vq.group = group;
  if (const char* wrong = describe_codes(call, 1, p, p.kq)) return wrong;
  if (const char* wrong = describe_codes(call, 4, p, p.vq)) return wrong;
  p.q = tensor_of(q);
  p.k = p.v = {NULL, {0, 0, 0, 1}, ACCEL_FLOAT32};
  p.y = y->data;
  p.y_dtype = y->dtype;
  p.mask = {};
  p.sinks = NULL;
  return kind == kArray ? describe_mask(call->inputs[7], p) : NULL;
}

}  // namespace
}  // namespace cider

ACCEL_KERNEL void cider_quantized_attention(const accel_call* call) {
  cider::Problem p;
  if (const char* wrong = cider::describe(call, p)) return cider::refuse(call, "cider_quantized_attention", wrong);
  if (call->outputs[0]->size == 0) return;
  if (p.keys && (!cider::gather(p, call->inputs[1], p.kq.words) || !cider::gather(p, call->inputs[4], p.vq.words))) {
    return;
  }
  cider::attend(p);
}
