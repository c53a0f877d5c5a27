/* What the files of this library share: the bodies' interface, and the scalar conversions of the half types.
 *
 * Everything with a body here has internal linkage. The kernel bodies are compiled once per instruction set; an
 * inline function with external linkage would be merged by the linker, and the one copy that is kept could be the
 * one made of instructions this processor lacks.
 */
#ifndef HOST_OPS_COMMON_H
#define HOST_OPS_COMMON_H

#include <accel/half.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace host_ops {

enum class Activation {
  silu, gelu, gelu_approx, gelu_fast_approx, relu2, swiglu, swiglu_oai, geglu, geglu_approx, softcap, residual
};

/* The kernels for one instruction set. Inputs and outputs have been checked (entries.cpp). */
struct Bodies {
  void (*rms_norm)(const accel_call*);
  void (*residual_rms_norm)(const accel_call*);
  void (*layer_norm)(const accel_call*);
  void (*rope)(const accel_call*);
  void (*activate)(const accel_call*, Activation);
  void (*logsumexp)(const accel_call*);
  void (*softmax)(const accel_call*);
  void (*argmax)(const accel_call*);
};

/* ACCEL_BUILD_* say which files the build could compile (mlx_accel_add_kernels). */
extern const Bodies kPortableBodies;
#if defined(ACCEL_BUILD_AVX2)
extern const Bodies kAvx2Bodies;
#endif
#if defined(ACCEL_BUILD_AVX512)
extern const Bodies kAvx512Bodies;
#endif
#if defined(__aarch64__)
extern const Bodies kNeonBodies;
#endif

namespace {

/* Elements that are converted at a time: a block of floats stays in the first-level cache. A multiple of all vector
 * lengths. */
constexpr int64_t kBlock = 512;

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* An array as rows of its last dimension, whose leading dimensions are enumerated in row-major order. */
struct Rows {
  const accel_array* array;
  int64_t n, rows, stride; /* of the last dimension, in elements */
  bool dense;              /* row-contiguous */

  Rows() = default;
  explicit Rows(const accel_array* a) : array(a) {
    n = a->ndim ? a->shape[a->ndim - 1] : 1;
    stride = a->ndim && n > 1 ? a->strides[a->ndim - 1] : 1;
    rows = n ? a->size / n : 0;
    dense = accel_is_row_contiguous(a) != 0;
  }

  /* Elements from the start of the array to row `row`; `skip` trailing dimensions are part of a row. */
  int64_t offset(int64_t row, int32_t skip = 1) const {
    int64_t at = 0;
    if (dense) {
      at = row;
      for (int32_t d = array->ndim > skip ? array->ndim - skip : 0; d < array->ndim; ++d) at *= array->shape[d];
      return at;
    }
    for (int32_t d = array->ndim - 1 - skip; d >= 0; --d) {
      at += (row % array->shape[d]) * array->strides[d];
      row /= array->shape[d];
    }
    return at;
  }
};

/* Runs the callable body(begin, end) over [0, n): on the pool if the work, `elements` in all, is worth waking it,
 * in pieces of about `piece` elements. */
template <class Body>
void run(const accel_call* call, int64_t n, int64_t elements, int64_t piece, int64_t worth, const Body& body) {
  if (elements < worth || call->threads == 1 || n < 2) {
    body((int64_t)0, n);
    return;
  }
  const int64_t grain = max64(1, piece / max64(1, elements / n));
  accel_parallel_for(
      call, n, grain, [](void* arg, int64_t begin, int64_t end) { (*(const Body*)arg)(begin, end); }, (void*)&body);
}

}  // namespace
}  // namespace host_ops
#endif
