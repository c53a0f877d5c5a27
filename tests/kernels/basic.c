/* Small kernels for tests: what they do is visible at a glance, and each exercises one part of the ABI. */
#include <accel/kernel.h>
#include <stdlib.h>
#include <string.h>

/* Sum of products with any strides: out[..., n] = a * x[..., k] . w[n, k] + b, with params a (int), b (float).
 * Rows are split over the pool. */
typedef struct {
  const accel_call* call;
  int64_t n, k;
} matmul_job;

static void matmul_rows(void* arg, int64_t begin, int64_t end) {
  const matmul_job* job = (const matmul_job*)arg;
  const accel_call* call = job->call;
  const float* x = (const float*)call->inputs[0]->data;
  const float* w = (const float*)call->inputs[1]->data;
  float* y = (float*)call->outputs[0]->data;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / job->n, col = i % job->n;
    float sum = 0;
    for (int64_t k = 0; k < job->k; ++k) sum += x[row * job->k + k] * w[col * job->k + k];
    y[i] = (float)call->params[0].i * sum + (float)call->params[1].f;
  }
}

ACCEL_KERNEL void matmul(const accel_call* call) {
  const accel_array* w = call->inputs[1];
  if (call->n_params != 2) {
    accel_fail(call, "matmul takes two parameters");
    return;
  }
  matmul_job job = {call, w->shape[0], w->shape[1]};
  accel_parallel_for(call, call->outputs[0]->size, 5, matmul_rows, &job);
}

/* Copies input 0 to the output through its strides, for any item size. */
ACCEL_KERNEL void gather(const accel_call* call) {
  const accel_array* in = call->inputs[0];
  const size_t item = accel_itemsize(in->dtype);
  char* out = (char*)call->outputs[0]->data;
  for (int64_t i = 0; i < in->size; ++i) {
    int64_t rest = i, offset = 0;
    for (int32_t d = in->ndim - 1; d >= 0; --d) {
      offset += rest % in->shape[d] * in->strides[d];
      rest /= in->shape[d];
    }
    memcpy(out + (size_t)i * item, (const char*)in->data + offset * (int64_t)item, item);
  }
}

/* What the kernel was told about input 0: ndim, dtype, size, then shape, then strides (int64). */
ACCEL_KERNEL void describe(const accel_call* call) {
  const accel_array* in = call->inputs[0];
  int64_t* out = (int64_t*)call->outputs[0]->data;
  int64_t at = 0;
  out[at++] = in->ndim;
  out[at++] = in->dtype;
  out[at++] = in->size;
  for (int32_t d = 0; d < in->ndim; ++d) out[at++] = in->shape[d];
  for (int32_t d = 0; d < in->ndim; ++d) out[at++] = in->strides[d];
  for (; at < call->outputs[0]->size; ++at) out[at] = -1;
}

/* Two outputs: sum and difference of two float32 arrays. */
ACCEL_KERNEL void sum_difference(const accel_call* call) {
  const float* a = (const float*)call->inputs[0]->data;
  const float* b = (const float*)call->inputs[1]->data;
  for (int64_t i = 0; i < call->outputs[0]->size; ++i) {
    ((float*)call->outputs[0]->data)[i] = a[i] + b[i];
    ((float*)call->outputs[1]->data)[i] = a[i] - b[i];
  }
}

/* Partial sums in scratch, one per piece, added in order: the same bits for any number of threads. */
typedef struct {
  const float* x;
  float* parts;
} sum_job;

static void sum_piece(void* arg, int64_t begin, int64_t end) {
  const sum_job* job = (const sum_job*)arg;
  float sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += job->x[i];
  job->parts[begin / 7] = sum;
}

ACCEL_KERNEL void total(const accel_call* call) {
  const int64_t n = call->inputs[0]->size;
  float* first = (float*)accel_scratch(call, sizeof(float) * (size_t)(n / 7 + 1));
  float* second = (float*)accel_scratch(call, 1);
  if (!first || !second || first == second || (uintptr_t)first % 64 || (uintptr_t)second % 64) {
    accel_fail(call, "scratch is not as promised");
    return;
  }
  sum_job job = {(const float*)call->inputs[0]->data, first};
  accel_parallel_for(call, n, 7, sum_piece, &job);
  float sum = 0;
  for (int64_t i = 0; i < (n + 6) / 7; ++i) sum += first[i];
  *(float*)call->outputs[0]->data = sum;
}

ACCEL_KERNEL void fails(const accel_call* call) {
  accel_fail(call, "the first reason");
  accel_fail(call, "the second reason");
}

ACCEL_KERNEL void wants_memory(const accel_call* call) { accel_scratch(call, (size_t)-1); }

/* isa, threads, abi_version, struct sizes. */
ACCEL_KERNEL void environment(const accel_call* call) {
  int64_t* out = (int64_t*)call->outputs[0]->data;
  out[0] = (int64_t)call->isa;
  out[1] = call->threads;
  out[2] = call->abi_version;
  out[3] = call->struct_size >= sizeof(accel_call) && call->host->struct_size >= sizeof(accel_host);
}

/* Writes row input 1 over row `params[0]` of output 0, which input 0 is donated to; output 1, if there is one, gets
 * input 0's and output 0's addresses as seen (int64). */
ACCEL_KERNEL void put_row(const accel_call* call) {
  const accel_array *row = call->inputs[1], *out = call->outputs[0];
  float* to = (float*)out->data + call->params[0].i * row->size;
  memcpy(to, row->data, (size_t)row->size * 4);
  if (call->n_outputs > 1) {
    int64_t* seen = (int64_t*)call->outputs[1]->data;
    seen[0] = (int64_t)(intptr_t)call->inputs[0]->data;
    seen[1] = (int64_t)(intptr_t)out->data;
  }
}

/* Two buffers at once: rows inputs 2 and 3 into outputs 0 and 1, to which inputs 0 and 1 are donated. */
ACCEL_KERNEL void put_rows(const accel_call* call) {
  for (int i = 0; i < 2; ++i) {
    const accel_array* row = call->inputs[2 + i];
    memcpy((float*)call->outputs[i]->data + call->params[0].i * row->size, row->data, (size_t)row->size * 4);
  }
}
