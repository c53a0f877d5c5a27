/* NEON (64-bit ARM): vectors of four floats. */
#ifndef HOST_OPS_ISA_NEON_H
#define HOST_OPS_ISA_NEON_H

#include <arm_neon.h>

#include "common.h"

namespace host_ops {
namespace {

struct Neon {
  using F = float32x4_t;
  using D = float64x2_t;
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr bool kFused = true;

  static F set1(float v) { return vdupq_n_f32(v); }
  static D set1d(double v) { return vdupq_n_f64(v); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F v) { vst1q_f32(p, v); }
  /* The first n < kLanes elements; the others are 0. */
  static F load_part(const float* p, int64_t n) {
    float part[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < n; ++i) part[i] = p[i];
    return vld1q_f32(part);
  }
  static void store_part(float* p, F v, int64_t n) {
    float part[4];
    vst1q_f32(part, v);
    for (int64_t i = 0; i < n; ++i) p[i] = part[i];
  }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static D fma(D a, D b, D c) { return vfmaq_f64(c, a, b); }

  /* Lanes 0 ... kLanes / 2 - 1 and the others as float64, and back. */
  static D lower(F v) { return vcvt_f64_f32(vget_low_f32(v)); }
  static D upper(F v) { return vcvt_high_f64_f32(v); }
  static F join(D lower, D upper) { return vcvt_high_f32_f64(vcvt_f32_f64(lower), upper); }

  /* Neighbours 2i and 2i + 1 change places. */
  static F swap_pairs(F v) { return vrev64q_f32(v); }

  /* n contiguous half-precision numbers to floats and back. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      const uint16x4_t h = vld1_u16(p + i);
      store(out + i, dtype == ACCEL_FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u16(h))
                                            : vreinterpretq_f32_u32(vshll_n_u16(h, 16)));
    }
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      const F v = load(p + i);
      vst1_u16(out + i, dtype == ACCEL_FLOAT16 ? vreinterpret_u16_f16(vcvt_f16_f32(v)) : bfloat(v));
    }
    for (; i < n; ++i) out[i] = dtype == ACCEL_FLOAT16 ? accel_half_from_float(p[i]) : accel_bfloat_from_float(p[i]);
  }

 private:
  static uint16x4_t bfloat(F v) {
    const uint32x4_t u = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t nan = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, nan), 16);
  }
};

}  // namespace
}  // namespace host_ops
#endif
