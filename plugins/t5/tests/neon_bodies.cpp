/* Runs the NEON bodies on random problems and compares with double: both groups, few rows and many, shapes that are no
 * multiple of anything. Prints how many results are outside the bound of class `rounding`.
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

void check(int group, int64_t rows, int64_t n, int64_t groups, bool half) {
  const int64_t k = group * groups, bytes = k / 64 * 13;
  std::vector<float> x(rows * k), y(rows * n), bias(n, 0.25f), used(rows * k);
  std::vector<uint16_t> xh(rows * k);
  for (int64_t i = 0; i < rows * k; ++i) {
    x[i] = (float)(draw() % 2001) / 1000.0f - 1.0f;
    xh[i] = accel_half_from_float(x[i]);
    used[i] = half ? accel_float_from_half(xh[i]) : x[i];
  }
  std::vector<uint8_t> w(n * bytes);
  std::vector<uint16_t> scales(n * groups);
  std::vector<int> trits(n * k);
  for (uint16_t& s : scales) s = accel_half_from_float((float)(draw() % 1000 + 1) / 1000.0f);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int b = 0; b < group / 64 * 13; ++b) {
        int value = 0, power = 1;
        for (int i = 0; i < 5; ++i, power *= 3) {
          const int j = 5 * b + i, t = j < group ? (int)(draw() % 3) : 1;
          if (j < group) trits[r * k + g * group + j] = t;
          value += power * t;
        }
        w[r * bytes + g * (group / 64 * 13) + b] = (uint8_t)value;
      }
    }
  }
  const accel_host host = {sizeof(accel_host), ACCEL_ABI_VERSION, parallel_for, scratch, fail};
  accel_call call = {};
  call.host = &host;
  call.threads = 1;
  const int64_t shape[2] = {rows, k}, strides[2] = {k, 1}, one = 1;
  const accel_array ax = {half ? (void*)xh.data() : x.data(), shape, strides, rows * k, 2,
                          half ? ACCEL_FLOAT16 : ACCEL_FLOAT32};
  const accel_array ab = {bias.data(), &n, &one, n, 1, ACCEL_FLOAT32};
  t5::Problem p = {&call, rows, n, k, 0, group, &ax, w.data(), bytes, w.data() + n * bytes, scales.data(), {groups, 1},
                   ACCEL_FLOAT16, &ab, y.data(), ACCEL_FLOAT32, INFINITY, 1};
  (rows <= t5::kSmallRows ? t5::kNeonBodies.small : t5::kNeonBodies.large)(p);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t r = 0; r < n; ++r, ++compared) {
      double sum = 0.25, size = 0.25;
      for (int64_t j = 0; j < k; ++j) {
        const double term = (double)used[m * k + j] * accel_float_from_half(scales[r * groups + j / group]) *
                            (trits[r * k + j] - 1);
        sum += term;
        size += fabs(term);
      }
      const double allowed = fabs(sum) * 0x1p-23 + 4 * sqrt((double)k) * 0x1p-24 * size;
      if (!(fabs(y[m * n + r] - sum) <= allowed)) ++wrong;
    }
  }
  for (void* block : blocks) free(block);
  blocks.clear();
}

}  // namespace

int main() {
  for (int group : {64, 128}) {
    for (int64_t rows : {1, 2, 3, 4, 7, 16, 17, 40}) {
      for (int64_t n : {1, 9, 70}) {
        for (int64_t groups : {1, 3, 5}) check(group, rows, n, groups, rows % 2 == 0);
      }
    }
  }
  printf("%ld results compared, %ld wrong\n", compared, wrong);
  return wrong != 0;
}
