/* NEON (64-bit ARM): sixteen floats in four registers.
 *
 * Of a byte v in a 16-bit lane, floor(v / 3^i) is one multiplication and one shift, exact up to 242. A digit is
 * floor(v / 3^i) - 3 floor(v / 3^(i+1)).
 */
#ifndef T5_ISA_NEON_H
#define T5_ISA_NEON_H

#include <arm_neon.h>

#include "problem.h"

namespace t5 {
namespace {

/* The five digits of eight bytes. */
inline void digits8(uint16x8_t v, int16x8_t* out) {
  const uint16x8_t q[6] = {v, vshrq_n_u16(vmulq_n_u16(v, 171), 9), vshrq_n_u16(vmulq_n_u16(v, 228), 11),
                           vshrq_n_u16(vmulq_n_u16(v, 76), 11), vshrq_n_u16(vmulq_n_u16(v, 203), 14), vdupq_n_u16(0)};
  for (int i = 0; i < 5; ++i) {
    out[i] = vsubq_s16(vreinterpretq_s16_u16(vmlsq_n_u16(q[i], q[i + 1], 3)), vdupq_n_s16(1));
  }
}

struct Neon {
  struct V {
    float32x4_t f[4];
  };

  static V set1(float v) {
    const float32x4_t s = vdupq_n_f32(v);
    return {{s, s, s, s}};
  }
  static V zero() { return set1(0.0f); }
  static V load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
  static void store(float* p, V v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.f[i]);
  }
  static V fma(V a, V b, V c) {
    return {{vfmaq_f32(c.f[0], a.f[0], b.f[0]), vfmaq_f32(c.f[1], a.f[1], b.f[1]),
             vfmaq_f32(c.f[2], a.f[2], b.f[2]), vfmaq_f32(c.f[3], a.f[3], b.f[3])}};
  }
  static float sum(const float* lanes) {
    const V v = load(lanes);
    const float32x4_t q = vaddq_f32(vaddq_f32(v.f[0], v.f[2]), vaddq_f32(v.f[1], v.f[3]));
    const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(vpadd_f32(d, d), 0);
  }
  static void digits(const uint8_t* chunk, V* out) {
    const uint8x16_t bytes = vld1q_u8(chunk);
    int16x8_t lo[5], hi[5];
    digits8(vmovl_u8(vget_low_u8(bytes)), lo);
    digits8(vmovl_u8(vget_high_u8(bytes)), hi);
    for (int i = 0; i < 5; ++i) {
      out[i] = {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo[i]))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo[i]))),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi[i]))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi[i])))}};
    }
  }
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      const uint16x4_t h = vld1_u16(p + i);
      vst1q_f32(out + i, dtype == ACCEL_FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u16(h))
                                                : vreinterpretq_f32_u32(vshll_n_u16(h, 16)));
    }
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }

  struct Wide {
    using F = float32x4_t;
    static constexpr int kLanes = 4, kVectors = 2, kMaxPanel = 12;
    static F zero() { return vdupq_n_f32(0.0f); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F v) { vst1q_f32(p, v); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F set1(float v) { return vdupq_n_f32(v); }
    static void digits(const uint8_t* bytes, F* out) {
      uint32_t word;
      memcpy(&word, bytes, 4);
      int16x8_t d[5];
      digits8(vmovl_u8(vcreate_u8(word)), d);
      for (int i = 0; i < 5; ++i) out[i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(d[i])));
    }
  };
};

}  // namespace
}  // namespace t5
#endif
