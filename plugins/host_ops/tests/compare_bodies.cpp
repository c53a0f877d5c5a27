/* Runs every kernel twice, with the portable body (which the other tests compare with float64) and with the one for
 * NEON, on random inputs, and compares. Exit status 1 if they differ by more than rounding does. */
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "common.h"

#define KERNELS(X)                                                                                               \
  X(rms_norm) X(residual_rms_norm) X(layer_norm) X(rope) X(silu) X(gelu) X(gelu_approx) X(gelu_fast_approx)      \
  X(relu2) X(swiglu) X(swiglu_oai) X(geglu) X(geglu_approx) X(softcap) X(residual) X(logsumexp) X(softmax) X(argmax)
#define DECLARE(name) extern "C" void host_ops_##name(const accel_call*);
KERNELS(DECLARE)

namespace {

using Kernel = void (*)(const accel_call*);
using Shape = std::vector<int64_t>;

struct Array {
  Shape shape, strides;
  std::vector<char> memory;
  accel_array view;

  Array(const Shape& s, int32_t dtype) : shape(s), strides(s) {
    int64_t size = 1;
    for (size_t d = s.size(); d-- > 0; size *= s[d]) strides[d] = size;
    memory.resize((size_t)size * 8 + 8);
    view = {NULL, NULL, NULL, size, (int32_t)s.size(), dtype};
    attach();
    for (int64_t i = 0; i < size; ++i) {
      if (dtype == ACCEL_FLOAT64) {
        ((double*)view.data)[i] = pow(10.0, -4.0 * (double)i / (double)size);
      } else if (dtype != ACCEL_UINT32) {
        accel_store_float(view.data, i, dtype, (float)(rand() % 20001 - 10000) / 2500.0f);
      }
    }
  }
  Array(const Array& a) : shape(a.shape), strides(a.strides), memory(a.memory), view(a.view) { attach(); }
  void attach() {
    view.data = memory.data();
    view.shape = shape.data();
    view.strides = strides.data();
  }
};

void parallel_for(const accel_call*, int64_t n, int64_t grain, accel_task task, void* arg) {
  for (int64_t i = 0; i < n; i += grain) task(arg, i, i + grain < n ? i + grain : n);
}
void* scratch(const accel_call*, size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }
void fail(const accel_call*, const char* message) {
  puts(message);
  exit(1);
}

int64_t compared = 0, wrong = 0;

void compare(const char* name, Kernel kernel, std::vector<Array> in, std::vector<Array> out,
             const std::vector<accel_param>& params) {
  const accel_host host = {sizeof host, 1, parallel_for, scratch, fail};
  std::vector<accel_array*> inputs, outputs;
  for (Array& a : in) inputs.push_back(&a.view);
  for (Array& a : out) outputs.push_back(&a.view);
  std::vector<std::vector<char>> portable;
  for (uint64_t isa : {(uint64_t)0, (uint64_t)ACCEL_ISA_NEON}) {
    const accel_call call = {sizeof call, 1, &host, inputs.data(), outputs.data(), (int32_t)in.size(),
                             (int32_t)out.size(), params.data(), (int32_t)params.size(), 1, isa};
    for (Array& a : out) memset(a.view.data, 7, a.memory.size());
    kernel(&call);
    for (Array& a : out) {
      if (isa == 0) portable.push_back(a.memory);
    }
  }
  for (size_t k = 0; k < out.size(); ++k) {
    const accel_array& y = out[k].view;
    for (int64_t i = 0; i < y.size; ++i, ++compared) {
      if (y.dtype == ACCEL_UINT32) {
        wrong += ((uint32_t*)y.data)[i] != ((uint32_t*)portable[k].data())[i];
        continue;
      }
      const float a = accel_load_float(portable[k].data(), i, y.dtype);
      const float b = accel_load_float(y.data, i, y.dtype);
      const double unit = y.dtype == ACCEL_FLOAT32 ? 6e-8 : y.dtype == ACCEL_FLOAT16 ? 5e-4 : 4e-3;
      if (fabs(a - b) <= unit * (32 * fabs(a) + 8)) continue;
      if (++wrong < 20) printf("%s, dtype %d, element %lld: %g, not %g\n", name, y.dtype, (long long)i, b, a);
    }
  }
}

accel_param number(double v) {
  accel_param p;
  p.f = v;
  return p;
}
accel_param integer(int64_t v) {
  accel_param p;
  p.i = v;
  return p;
}

}  // namespace

int main() {
  const accel_param eps = number(1e-5), yes = integer(1);
  for (int32_t t : {ACCEL_FLOAT32, ACCEL_FLOAT16, ACCEL_BFLOAT16}) {
    for (int64_t n : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 577, 9000}) {
      const Shape s = {3, n};
      const Array x(s, t), r(s, t), w({n}, t), b({n}, ACCEL_FLOAT32);
#define COMPARE(name, ...) compare(#name, host_ops_##name, __VA_ARGS__)
      COMPARE(rms_norm, {x, w}, {Array(s, t)}, {eps});
      COMPARE(residual_rms_norm, {x, r, b}, {Array(s, t), Array(s, ACCEL_FLOAT32)}, {eps});
      COMPARE(layer_norm, {x, w, b}, {Array(s, t)}, {eps, yes, yes});
      COMPARE(silu, {x}, {Array(s, t)}, {});
      COMPARE(gelu, {x}, {Array(s, t)}, {});
      COMPARE(gelu_approx, {x}, {Array(s, t)}, {});
      COMPARE(gelu_fast_approx, {x}, {Array(s, t)}, {});
      COMPARE(swiglu, {x, r}, {Array(s, t)}, {});
      COMPARE(geglu, {x, r}, {Array(s, t)}, {});
      COMPARE(geglu_approx, {x, r}, {Array(s, t)}, {});
      COMPARE(relu2, {x}, {Array(s, t)}, {});
      COMPARE(swiglu_oai, {x, r}, {Array(s, t)}, {number(1.702), number(7)});
      COMPARE(softcap, {x}, {Array(s, t)}, {number(30)});
      COMPARE(residual, {x, r}, {Array(s, t)}, {});
      COMPARE(logsumexp, {x}, {Array({3, 1}, t)}, {});
      COMPARE(softmax, {x}, {Array(s, t)}, {});
      COMPARE(argmax, {x}, {Array({3}, ACCEL_UINT32)}, {});
      if (n == 1) continue;
      for (int64_t traditional : {0, 1}) {
        COMPARE(rope, {Array({2, 3, n}, t), Array({n / 2}, ACCEL_FLOAT64)}, {Array({2, 3, n}, t)},
                {integer(4095), integer(traditional)});
        COMPARE(rope, {Array({2, 3, n}, t), Array({2, n / 2}, ACCEL_FLOAT64)}, {Array({2, 3, n}, t)},
                {integer(4095), integer(traditional)});
      }
    }
  }
  printf("%lld results compared, %lld wrong\n", (long long)compared, (long long)wrong);
  return wrong != 0;
}
