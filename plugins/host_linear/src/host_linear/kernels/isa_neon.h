/* NEON (64-bit ARM): sixteen floats in four registers, and codes to weights. Every load of codes stays inside the
 * sixteen weights it is for.
 */
#ifndef HOST_LINEAR_ISA_NEON_H
#define HOST_LINEAR_ISA_NEON_H

#include <arm_neon.h>

#include "problem.h"

namespace linear {
namespace {

struct Neon {
  struct V {
    float32x4_t f[4];
  };
  static constexpr bool kReadsLines = false;
  static constexpr int kMaxTile = 4;
  static constexpr int tile_rows(int mt) { return mt == 1 ? 4 : mt == 2 ? 2 : 1; }

  static V zero() {
    const float32x4_t z = vdupq_n_f32(0.0f);
    return {{z, z, z, z}};
  }
  static V load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
  static void store(float* p, V v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.f[i]);
  }
  static V fma(V a, V b, V c) {
    return {{vfmaq_f32(c.f[0], a.f[0], b.f[0]), vfmaq_f32(c.f[1], a.f[1], b.f[1]),
             vfmaq_f32(c.f[2], a.f[2], b.f[2]), vfmaq_f32(c.f[3], a.f[3], b.f[3])}};
  }

  static V hold(const V& v) { return v; }

  /* out[i] = sum of the 16 lanes of i, for 8 values of i, each by the same tree of halvings. */
  static void sum8(const float (*lanes)[16], float* out) {
    for (int i = 0; i < 8; ++i) {
      const V v = load(lanes[i]);
      const float32x4_t q = vaddq_f32(vaddq_f32(v.f[0], v.f[2]), vaddq_f32(v.f[1], v.f[3]));
      const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
      out[i] = vget_lane_f32(vpadd_f32(d, d), 0);
    }
  }

  static float32x4_t four_halves(uint16x4_t h, int32_t dtype) {
    return dtype == ACCEL_FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u16(h)) : vreinterpretq_f32_u32(vshll_n_u16(h, 16));
  }
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(out + i, four_halves(vld1_u16(p + i), dtype));
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    int64_t i = 0;
    if (dtype == ACCEL_FLOAT16) {
      for (; i + 4 <= n; i += 4) vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(p + i))));
    }
    for (; i < n; ++i) accel_store_float(out, i, dtype, p[i]);
  }

  template <Format F>
  static constexpr bool permutes() { return false; }
  template <Format F>
  static void permute_chunk(float*) {}

  /* Sixteen signed bytes to floats. */
  static V from_bytes(int8x16_t b) {
    const int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
  }

  template <Format F, int STEP>
  static V weights(const uint8_t* chunk, const uint8_t* scales) {
    V v;
    if constexpr (F == kFloat32) {
      return load((const float*)chunk + 16 * STEP);
    } else if constexpr (F == kFloat16 || F == kBfloat16) {
      const uint16_t* h = (const uint16_t*)chunk + 16 * STEP;
      const int32_t dtype = F == kFloat16 ? ACCEL_FLOAT16 : ACCEL_BFLOAT16;
      for (int i = 0; i < 4; ++i) v.f[i] = four_halves(vld1_u16(h + 4 * i), dtype);
    } else if constexpr (F == kMxfp8) {
      /* As half-precision numbers, whose exponents have one more bit, 2^-8 of the value; NaN as in isa_avx2.h. */
      const float scale = scale_of<F>(scales[0]);
      const int8x16_t b = vld1q_s8((const int8_t*)chunk + 16 * STEP);
      for (int i = 0; i < 2; ++i) {
        const uint16x8_t s = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(i ? vget_high_s8(b) : vget_low_s8(b)), 7));
        const uint16x8_t carry = veorq_u16(s, vaddq_u16(s, vdupq_n_u16(0x80)));
        const uint16x8_t h = vbslq_u16(vdupq_n_u16(0x4000), carry, s);
        v.f[2 * i] = vmulq_n_f32(vmulq_n_f32(four_halves(vget_low_u16(h), ACCEL_FLOAT16), 256.0f), scale);
        v.f[2 * i + 1] = vmulq_n_f32(vmulq_n_f32(four_halves(vget_high_u16(h), ACCEL_FLOAT16), 256.0f), scale);
      }
    } else {
      /* Twice the value is a small integer: a table of bytes, and half the scale. A negative zero loses its
       * sign, which no sum that starts at zero shows; infinite scales stay infinite. */
      static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
      const uint8x8_t packed = vld1_u8(chunk + 8 * STEP);
      const uint8x8x2_t codes = vzip_u8(vand_u8(packed, vdup_n_u8(15)), vshr_n_u8(packed, 4));
      const float scale = scale_of<F>(scales[F == kNvfp4 ? STEP : 0]);
      v = from_bytes(vqtbl1q_s8(vld1q_s8(twice), vcombine_u8(codes.val[0], codes.val[1])));
      for (int i = 0; i < 4; ++i) v.f[i] = vmulq_n_f32(vmulq_n_f32(v.f[i], 0.5f), scale);
    }
    return v;
  }

  struct Wide {
    using F = float32x4_t;
    static constexpr int kLanes = 4, kVectors = 4, kColumns = 6;
    static F zero() { return vdupq_n_f32(0.0f); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F v) { vst1q_f32(p, v); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F set1(const float* p) { return vld1q_dup_f32(p); }
  };

  /* out[j][i] = in[i][j], 4 by 4. */
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    const float32x4_t a = vld1q_f32(in), b = vld1q_f32(in + in_stride);
    const float32x4_t c = vld1q_f32(in + 2 * in_stride), d = vld1q_f32(in + 3 * in_stride);
    const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
    vst1q_f32(out, vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0])));
    vst1q_f32(out + out_stride, vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1])));
    vst1q_f32(out + 2 * out_stride, vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0])));
    vst1q_f32(out + 3 * out_stride, vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1])));
  }
};

}  // namespace
}  // namespace linear
#endif
