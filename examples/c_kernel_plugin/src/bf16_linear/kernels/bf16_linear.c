/* bf16_linear: y[m, n] = sum over k of x[m, k] * w[n, k].
 *
 * input 0   x, float32, (..., k), row-contiguous
 * input 1   w, bfloat16, (n, k), row-contiguous
 * output 0  y, float32, (..., n)
 * rows      any; one row of w is read once for all rows of x
 * bytes     2 per weight
 * contract  float32 products and sums, 16 partial sums per result in one fixed order. So a result depends on its
 *           own row of x alone, whatever the number of rows or threads. */
#include <accel/kernel.h>
#include <string.h>

enum { LANES = 16, GRAIN = 8 };

typedef struct {
  const float* x;
  const uint16_t* w;
  float* y;
  int64_t m, n, k;
} problem;

/* A bfloat16 is the upper half of a float32. */
static float widen(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float dot(const float* x, const uint16_t* w, int64_t k) {
  float part[LANES] = {0}, sum = 0;
  const int64_t whole = k - k % LANES;
  for (int64_t i = 0; i < whole; i += LANES)
    for (int j = 0; j < LANES; ++j) part[j] += x[i + j] * widen(w[i + j]);
  for (int64_t i = whole; i < k; ++i) part[i - whole] += x[i] * widen(w[i]);
  for (int j = 0; j < LANES; ++j) sum += part[j];
  return sum;
}

static void columns(void* arg, int64_t begin, int64_t end) {
  const problem* p = (const problem*)arg;
  for (int64_t n = begin; n < end; ++n)
    for (int64_t m = 0; m < p->m; ++m) p->y[m * p->n + n] = dot(p->x + m * p->k, p->w + n * p->k, p->k);
}

ACCEL_KERNEL void bf16_linear(const accel_call* call) {
  const accel_array *x = call->inputs[0], *w = call->inputs[1];
  if (x->dtype != ACCEL_FLOAT32 || w->dtype != ACCEL_BFLOAT16 || w->ndim != 2) {
    accel_fail(call, "needs x in float32 and a bfloat16 matrix");
    return;
  }
  const int64_t n = w->shape[0], k = w->shape[1];
  problem p = {(const float*)x->data, (const uint16_t*)w->data, (float*)call->outputs[0]->data, x->size / k, n, k};
  accel_parallel_for(call, n, GRAIN, columns, &p);
}
