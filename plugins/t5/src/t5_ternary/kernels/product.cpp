/* t5_matmul: y = x @ W.T (+ bias) with t5 weights. The entry point: checks and dispatch.
 *
 * Inputs     0  x       (..., k)  float32, float16 or bfloat16, any strides
 *            1  W       (n, k / 64 * 13)  uint8: groups of 64 or 128 weights in 13 or 26 bytes, byte b of a group
 *                       holding digits 5b ... 5b + 4 to base 3, the first the lowest; what lies beyond the group is not
 *                       looked at. Bytes above 242 give any finite result
 *            2  scales  (n, k / group)  float32, float16 or bfloat16, any strides; weight = scale * (digit - 1)
 *            3  bias    (n,)  optional, float32, float16 or bfloat16
 * Output     0  y       (..., n)  float32, float16 or bfloat16
 * Parameters 0  group (64, 128)
 *            optional, from t5_facts over the whole layer: 1  spread (float), 2  zeros (float). Without them rows of x
 *            are never taken as fixed point.
 * Bytes      0.203 a weight, and the scales: 0.21875 with groups of 128 and half-precision scales
 * Rows       any number, 0 included
 * Exactness  rounding; rows of calls with 1..16 rows are bit-equal to the row alone (qmv_body.h), more rows go to the
 *            blocked product (accel/gemm.h)
 *
 * t5_facts: float32 (2,), spread and zeros, from inputs x (of one row, whose numbers are not looked at), W, scales and
 * parameter 0; see facts.h.
 *
 * t5_experts: y (..., m, n) = x (..., m, k) @ W[e].T (+ bias[e]) with the expert e that indices (...) name; see
 * experts.h.
 *
 * Inputs     0  x       as above; a leading dimension is that of the indices, or 1
 *            1  indices uint32, below the number of experts, any strides
 *            2  W       (experts, n, k / 64 * 13), rows without gaps
 *            3  scales  (experts, n, k / group)
 *            4  bias    (experts, n)  optional
 * Parameters as above
 *
 * t5_words: see words.h.
 *
 * Reads nothing outside W's first and last byte and the elements of its other inputs, writes every element of y.
 */
#include <math.h>
#include <stdio.h>

#include "experts.h"
#include "facts.h"
#include "problem.h"
#include "words.h"

namespace t5 {
namespace {

const Bodies& bodies_for(const accel_call* call) {
  const uint64_t vnni = ACCEL_ISA_AVX512 | ACCEL_ISA_AVX512_VNNI | ACCEL_ISA_AVX512_VBMI;
  (void)vnni;
#if defined(ACCEL_BUILD_AMX)
  if (accel_has(call, vnni | ACCEL_ISA_AMX_INT8)) return kAmxBodies;
#endif
#if defined(ACCEL_BUILD_AVX512_VNNI)
  if (accel_has(call, vnni)) return kVnniBodies;
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
const char* describe(const accel_call* call, Problem& p, bool facts) {
  if (call->n_inputs < 3 || call->n_inputs > 4 || call->n_outputs != 1 || call->n_params < 1) {
    return "expects inputs x, W, scales[, bias], one output and parameter group_size";
  }
  const accel_array *x = call->inputs[0], *w = call->inputs[1], *s = call->inputs[2], *y = call->outputs[0];
  p.call = call;
  p.group = (int32_t)call->params[0].i;
  if (p.group != 64 && p.group != 128) return "group_size must be 64 or 128";
  if (x->ndim < 1 || y->ndim < 1 || w->ndim != 2 || s->ndim != 2) {
    return "x must have at least one dimension, W and scales two";
  }
  p.k = x->shape[x->ndim - 1];
  p.n = w->shape[0];
  if (p.k <= 0 || p.k % p.group) return "the last dimension of x must be a positive multiple of group_size";
  const int64_t bytes = p.k / 64 * kChunkBytes;
  if (w->dtype != ACCEL_UINT8 || w->shape[1] != bytes) return "W must be uint8 (n, k / 64 * 13)";
  if (s->shape[0] != p.n || s->shape[1] != p.k / p.group) return "scales must be (n, k / group_size)";
  if (!accel_is_float(x->dtype) || !accel_is_float(s->dtype) || !accel_is_float(y->dtype)) {
    return "x, scales and y must be float32, float16 or bfloat16";
  }
  p.rows = x->size / p.k;
  if (facts) {
    if (y->ndim != 1 || y->shape[0] != 2 || y->dtype != ACCEL_FLOAT32) return "y must be float32 (2,)";
  } else if (y->shape[y->ndim - 1] != p.n || y->size != p.rows * p.n) {
    return "y must have the shape of x, its last dimension replaced by n";
  }
  p.bias = call->n_inputs > 3 ? call->inputs[3] : NULL;
  if (p.bias && (!accel_is_float(p.bias->dtype) || p.bias->ndim != 1 || p.bias->shape[0] != p.n)) {
    return "bias must be (n,) float32, float16 or bfloat16";
  }
  p.x = x;
  p.w = (const uint8_t*)w->data;
  p.w_stride = w->strides[0];
  p.w_end = p.w + (p.n > 0 && p.w_stride > 0 ? (p.n - 1) * p.w_stride : 0) + bytes;
  p.scales = s->data;
  p.s_stride[0] = s->strides[0];
  p.s_stride[1] = s->strides[1];
  p.s_dtype = s->dtype;
  p.y = y->data;
  p.y_dtype = y->dtype;
  p.row0 = 0;
  const bool known = call->n_params >= 3;
  p.spread = known ? (float)call->params[1].f : INFINITY;
  p.zeros = known ? (float)call->params[2].f : 1;
  return NULL;
}

/* The same for experts: what is wrong, or NULL and p as that of the first expert, without rows. */
const char* describe_experts(const accel_call* call, Experts& job) {
  if (call->n_inputs < 4 || call->n_inputs > 5 || call->n_outputs != 1 || call->n_params < 1) {
    return "expects inputs x, indices, W, scales[, bias], one output and parameter group_size";
  }
  const accel_array *x = call->inputs[0], *indices = call->inputs[1], *w = call->inputs[2], *s = call->inputs[3];
  const accel_array *bias = call->n_inputs > 4 ? call->inputs[4] : NULL, *y = call->outputs[0];
  Problem& p = job.p;
  p.group = (int32_t)call->params[0].i;
  if (p.group != 64 && p.group != 128) return "group_size must be 64 or 128";
  if (indices->dtype != ACCEL_UINT32) return "indices must be uint32";
  if (x->ndim != indices->ndim + 2 || w->ndim != 3 || s->ndim != 3) {
    return "x must have two dimensions more than indices, W and scales three";
  }
  for (int32_t d = 0; d < indices->ndim; ++d) {
    if (x->shape[d] != 1 && x->shape[d] != indices->shape[d]) {
      return "leading dimensions of x must be those of indices or 1";
    }
  }
  p.k = x->shape[x->ndim - 1];
  p.n = w->shape[1];
  if (p.k <= 0 || p.k % p.group) return "the last dimension of x must be a positive multiple of group_size";
  if (w->dtype != ACCEL_UINT8 || w->shape[2] != p.k / 64 * kChunkBytes) {
    return "W must be uint8 (experts, n, k / 64 * 13)";
  }
  if (w->strides[2] != 1) return "rows of W must have no gaps";
  if (s->shape[0] != w->shape[0] || s->shape[1] != p.n || s->shape[2] != p.k / p.group) {
    return "scales must be (experts, n, k / group_size)";
  }
  if (!accel_is_float(x->dtype) || !accel_is_float(s->dtype) || !accel_is_float(y->dtype)) {
    return "x, scales and y must be float32, float16 or bfloat16";
  }
  const bool fits = !bias || (bias->ndim == 2 && bias->shape[0] == w->shape[0] && bias->shape[1] == p.n);
  if (!fits || (bias && !accel_is_float(bias->dtype))) {
    return "bias must be (experts, n) float32, float16 or bfloat16";
  }
  job.m = x->shape[x->ndim - 2];
  job.pairs = indices->size;
  if (y->shape[y->ndim - 1] != p.n || y->size != job.pairs * job.m * p.n) return "y must be (..., m, n)";
  p.w_stride = w->strides[1];
  int64_t last = 0; /* where the last row begins */
  for (int32_t d = 0; d < 2; ++d) {
    if (w->shape[d] > 0 && w->strides[d] > 0) last += (w->shape[d] - 1) * w->strides[d];
  }
  p.w_end = (const uint8_t*)w->data + last + w->shape[2];
  p.s_stride[0] = s->strides[1];
  p.s_stride[1] = s->strides[2];
  p.s_dtype = s->dtype;
  p.bias = NULL;
  p.y_dtype = y->dtype;
  p.row0 = 0;
  const bool known = call->n_params >= 3;
  p.spread = known ? (float)call->params[1].f : INFINITY;
  p.zeros = known ? (float)call->params[2].f : 1;
  job.call = call;
  job.x = x;
  job.w = w;
  job.scales = s;
  job.bias = bias;
  job.y = y;
  return NULL;
}

/* Bytes of a row that are not neighbours (a transposed or sliced W) are brought together first: rare, and not worth a
 * kernel of its own. */
bool gather_bytes(Problem& p, const accel_array* w) {
  const int64_t bytes = w->shape[1];
  if (w->strides[1] == 1 || bytes == 1) return true;
  uint8_t* copy = (uint8_t*)accel_scratch(p.call, (size_t)(p.n * bytes));
  if (!copy) return false;
  for (int64_t r = 0; r < p.n; ++r) {
    for (int64_t j = 0; j < bytes; ++j) {
      copy[r * bytes + j] = ((const uint8_t*)w->data)[r * w->strides[0] + j * w->strides[1]];
    }
  }
  p.w = copy;
  p.w_stride = bytes;
  p.w_end = copy + p.n * bytes;
  return true;
}

void refuse(const accel_call* call, const char* name, const char* wrong) {
  char message[256];
  snprintf(message, sizeof message, "%s: %s", name, wrong);
  accel_fail(call, message);
}

}  // namespace
}  // namespace t5

ACCEL_KERNEL void t5_matmul(const accel_call* call) {
  t5::Problem p;
  if (const char* wrong = t5::describe(call, p, false)) return t5::refuse(call, "t5_matmul", wrong);
  if (p.rows == 0 || p.n == 0 || !t5::gather_bytes(p, call->inputs[1])) return;
  const t5::Bodies& bodies = t5::bodies_for(call);
  (p.rows <= t5::kSmallRows ? bodies.small : bodies.large)(p);
}

ACCEL_KERNEL void t5_experts(const accel_call* call) {
  t5::Experts job;
  if (const char* wrong = t5::describe_experts(call, job)) return t5::refuse(call, "t5_experts", wrong);
  if (job.pairs == 0 || job.m == 0 || job.p.n == 0) return;
  job.bodies = &t5::bodies_for(call);
  t5::run_experts(job, call->inputs[1]);
}

ACCEL_KERNEL void t5_facts(const accel_call* call) {
  t5::Problem p;
  if (const char* wrong = t5::describe(call, p, true)) return t5::refuse(call, "t5_facts", wrong);
  if (t5::gather_bytes(p, call->inputs[1])) t5::facts(p);
}

ACCEL_KERNEL void t5_words(const accel_call* call) {
  const char* wrong = NULL;
  if (call->n_inputs != 1 || call->n_outputs != 1 || call->n_params != 1) {
    return t5::refuse(call, "t5_words", "expects input W, one output and parameter group_size");
  }
  const accel_array *w = call->inputs[0], *y = call->outputs[0];
  const int64_t group = call->params[0].i, size = group / 64 * t5::kChunkBytes;
  if (group != 64 && group != 128) {
    wrong = "group_size must be 64 or 128";
  } else if (w->dtype != ACCEL_UINT8 || w->ndim < 1 || w->shape[w->ndim - 1] % size) {
    wrong = "W must be uint8 (..., k / 64 * 13)";
  } else if (w->shape[w->ndim - 1] > 1 && w->strides[w->ndim - 1] != 1) {
    wrong = "rows of W must have no gaps";
  } else if (y->dtype != ACCEL_UINT32 || y->ndim < 1 || y->size * size != w->size * (group / 16)) {
    wrong = "y must be uint32 (..., k / 16)";
  }
  if (wrong) return t5::refuse(call, "t5_words", wrong);
  if (y->size == 0) return;
  const int64_t groups = w->shape[w->ndim - 1] / size;
  t5::make_words(call, w, (uint32_t*)y->data, w->size / (groups * size), groups, group);
}
