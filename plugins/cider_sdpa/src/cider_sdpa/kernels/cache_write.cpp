/* cider_cache_write: keys and values enter a cache, rounded to its dtype
 *
 * input 0, 1  the cache's keys (B, H, C, D) and values (B, H, C, Dv), donated to the outputs: not read
 * input 2, 3  k (B, H, N, D), v (B, H, N, Dv), any strides
 *             float32, float16 or bfloat16 each
 * output 0, 1 the cache with rows offset .. offset + N - 1 of every head replaced; row-contiguous
 * params      offset, 0 <= offset <= C - N
 * bytes       N rows are read and written, nothing else is touched
 * contract    class `bitwise`: the bits of stock's conversion (round to nearest, ties to even; too large becomes inf)
 *             and assignment. Threads never change bits.
 *
 * Here are the checks and the choice of the instruction set. */
#include "arguments.h"

namespace cider {
namespace {

/* The rows of one array, or what is wrong with it. */
const char* describe(const accel_call* call, int which, CacheRows& rows) {
  const accel_array *from = call->inputs[2 + which], *to = call->outputs[which];
  if (from->ndim != 4 || to->ndim != 4) return "arrays must have four dimensions";
  if (!is_float(from->dtype) || !is_float(to->dtype)) return "arrays must be float32, float16 or bfloat16";
  for (int i = 0; i < 4; ++i) {
    if (i != 2 && from->shape[i] != to->shape[i]) return "keys and values must fit their caches but for the number of rows";
  }
  rows.call = call;
  rows.from = tensor_of(from);
  rows.to = to->data;
  rows.dtype = to->dtype;
  rows.batch = to->shape[0];
  rows.heads = to->shape[1];
  rows.capacity = to->shape[2];
  rows.width = to->shape[3];
  rows.count = from->shape[2];
  rows.offset = call->params[0].i;
  if (rows.offset < 0 || rows.offset > rows.capacity - rows.count) return "rows must lie within the cache";
  return NULL;
}

}  // namespace
}  // namespace cider

ACCEL_KERNEL void cider_cache_write(const accel_call* call) {
  const char* wrong = NULL;
  cider::CacheRows rows[2];
  if (call->n_params < 1 || call->n_inputs != 4 || call->n_outputs != 2) {
    wrong = "expects parameter offset, inputs keys, values, k, v, and two outputs";
  }
  for (int i = 0; i < 2 && !wrong; ++i) wrong = cider::describe(call, i, rows[i]);
  if (wrong) return cider::refuse(call, "cider_cache_write", wrong);
  for (const cider::CacheRows& r : rows) {
    if (r.batch * r.heads * r.count * r.width) cider::bodies_for(call).write(r);
  }
}
