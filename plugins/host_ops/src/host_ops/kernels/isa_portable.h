/* No instruction set in particular: vectors of four floats as the compiler provides them.
 *
 * A fused multiply-add costs a library call where the processor has none that the compiler may use. Products are
 * therefore rounded before they are added; what needs the exact error of a product asks for kFused.
 */
#ifndef HOST_OPS_ISA_PORTABLE_H
#define HOST_OPS_ISA_PORTABLE_H

#include "common.h"

namespace host_ops {
namespace {

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef double D __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr bool kFused = false;

  static F set1(float v) { return F{v, v, v, v}; }
  static D set1d(double v) { return D{v, v}; }
  static F load(const float* p) {
    F v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, F v) { memcpy(p, &v, sizeof v); }
  /* The first n < kLanes elements; the others are 0. */
  static F load_part(const float* p, int64_t n) {
    F v = set1(0.0f);
    for (int64_t i = 0; i < n; ++i) v[i] = p[i];
    return v;
  }
  static void store_part(float* p, F v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = v[i];
  }
  static F fma(F a, F b, F c) { return a * b + c; }
  static D fma(D a, D b, D c) { return a * b + c; }

  /* Lanes 0 ... kLanes / 2 - 1 and the others as float64, and back. */
  static D lower(F v) { return D{(double)v[0], (double)v[1]}; }
  static D upper(F v) { return D{(double)v[2], (double)v[3]}; }
  static F join(D lower, D upper) { return F{(float)lower[0], (float)lower[1], (float)upper[0], (float)upper[1]}; }

  /* Neighbours 2i and 2i + 1 change places. */
  static F swap_pairs(F v) { return F{v[1], v[0], v[3], v[2]}; }

  /* n contiguous half-precision numbers to floats and back. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    if (dtype == ACCEL_FLOAT16) {
      for (int64_t i = 0; i < n; ++i) out[i] = accel_float_from_half(p[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = accel_float_from_bfloat(p[i]);
    }
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    if (dtype == ACCEL_FLOAT16) {
      for (int64_t i = 0; i < n; ++i) out[i] = accel_half_from_float(p[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = accel_bfloat_from_float(p[i]);
    }
  }
};

}  // namespace
}  // namespace host_ops
#endif
