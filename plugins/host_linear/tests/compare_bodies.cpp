/* Runs the NEON bodies and the portable ones on the same random problems and compares: every format, small and large,
 * shapes that are no multiple of anything. Prints how many results differ by more than both may err.
 *
 * Build with a compiler for 64-bit ARM, run there or under emulation; see test_neon.py.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "problem.h"

namespace {

uint32_t state = 1;
uint32_t draw() { return (state = state * 1664525u + 1013904223u) >> 8; }

std::vector<void*> blocks;
void* scratch(const accel_call*, size_t bytes) {
  blocks.push_back(aligned_alloc(64, (bytes + 127) / 64 * 64));
  return blocks.back();
}
void parallel_for(const accel_call*, int64_t n, int64_t grain, accel_task task, void* arg) {
  for (int64_t i = 0; i < n; i += grain) task(arg, i, i + grain < n ? i + grain : n);
}
void fail(const accel_call*, const char* message) { printf("failed: %s\n", message); }

long compared = 0, wrong = 0;

void check(linear::Format format, int64_t rows, int64_t n, int64_t k) {
  using namespace linear;
  if (chunk_scales(format)) k = round_up(k, kChunk / chunk_scales(format));
  const int64_t w_stride = k * chunk_bytes(format) / kChunk, s_stride = k * chunk_scales(format) / kChunk;
  std::vector<float> x(rows * k), y[2];
  for (float& v : x) v = (float)(draw() % 2001) / 1000.0f - 1.0f;
  std::vector<uint8_t> w(n * w_stride), s(n * s_stride + 1);
  for (uint8_t& b : w) b = (uint8_t)(draw() % 127); /* no NaN among E4M3 */
  for (uint8_t& b : s) b = (uint8_t)(format == kNvfp4 ? 40 + draw() % 30 : 120 + draw() % 9);
  if (!chunk_scales(format)) {
    const int32_t dtype = format == kFloat32 ? ACCEL_FLOAT32 : format == kFloat16 ? ACCEL_FLOAT16 : ACCEL_BFLOAT16;
    for (int64_t i = 0; i < n * k; ++i) accel_store_float(w.data(), i, dtype, (float)(draw() % 2001) / 5000.0f - 0.2f);
  }
  const accel_host host = {sizeof(accel_host), ACCEL_ABI_VERSION, parallel_for, scratch, fail};
  accel_call call = {};
  call.host = &host;
  call.threads = 1;
  const int64_t shape[2] = {rows, k}, strides[2] = {k, 1}, bias_stride = 1;
  const accel_array ax = {x.data(), shape, strides, rows * k, 2, ACCEL_FLOAT32};
  std::vector<float> bias(n, 0.25f);
  const accel_array ab = {bias.data(), &n, &bias_stride, n, 1, ACCEL_FLOAT32};
  Problem p = {&call, rows, n, k, format, &ax, w.data(), w_stride, s.data(), s_stride, &ab, NULL, ACCEL_FLOAT32};
  for (int large = 0; large < 2; ++large) {
    for (int i = 0; i < 2; ++i) {
      const Bodies& bodies = i ? kNeonBodies : kPortableBodies;
      y[i].assign(rows * n, NAN);
      p.y = y[i].data();
      (large ? bodies.large : bodies.small)(p);
    }
    for (int64_t i = 0; i < rows * n; ++i, ++compared) {
      /* Terms are at most 448 * 4 for E4M3 with these scales. */
      const float allowed = (format == kMxfp8 ? 1792.0f : 16.0f) * (float)k * 8.0f * 5.96e-8f;
      if (!(fabsf(y[0][i] - y[1][i]) <= allowed)) ++wrong;
    }
  }
  for (void* b : blocks) free(b);
  blocks.clear();
}

}  // namespace

int main() {
  for (int format = 0; format < 6; ++format) {
    for (int64_t rows : {1, 2, 3, 5, 16, 17, 33}) {
      for (int64_t k : {1, 31, 64, 300}) check((linear::Format)format, rows, 1 + (rows * k) % 53, k);
    }
  }
  printf("%ld results compared, %ld wrong\n", compared, wrong);
  return wrong != 0;
}
