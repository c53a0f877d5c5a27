/* NEON (64-bit ARM): sixteen floats in four registers, and codes to weights.
 *
 * Four codes lie in one 32-bit word, copied to all lanes and shifted by each lane's own count. Every load of codes
 * stays inside the chunk of 32 weights (4 * bits bytes): near its end the word is taken from further front and
 * shifted further.
 */
#ifndef BONSAI_QMV_ISA_NEON_H
#define BONSAI_QMV_ISA_NEON_H

#include <arm_neon.h>

#include "problem.h"

namespace bonsai {
namespace {

struct Neon {
  struct V {
    float32x4_t f[4];
  };
  static constexpr int kNarrowRows = 4;
  static constexpr int kAccumulators = 4;
  static constexpr int kMaxTile = 4;

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

  /* out[i] = sum of the 16 lanes of i, for 8 values of i, each by the same tree of halvings. */
  static void sum8(const float (*lanes)[16], float* out) {
    for (int i = 0; i < 8; ++i) {
      const V v = load(lanes[i]);
      const float32x4_t q = vaddq_f32(vaddq_f32(v.f[0], v.f[2]), vaddq_f32(v.f[1], v.f[3]));
      const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
      out[i] = vget_lane_f32(vpadd_f32(d, d), 0);
    }
  }

  static constexpr bool permutes(int) { return false; }
  static void permute_chunk(float*) {}

  /* n contiguous half-precision numbers to floats. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      const uint16x4_t h = vld1_u16(p + i);
      vst1q_f32(out + i, dtype == ACCEL_FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u16(h))
                                                : vreinterpretq_f32_u32(vshll_n_u16(h, 16)));
    }
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }

  template <int BITS>
  struct Group {
    float32x4_t scale, bias;
    Group() = default;
    Group(float s, float b) : scale(vdupq_n_f32(s)), bias(vdupq_n_f32(b)) {}

    template <int FIRST>
    float32x4_t four(const uint8_t* chunk) const {
      constexpr int end = 4 * BITS - 4, from = BITS * FIRST / 8, offset = from < end ? from : end;
      constexpr int a = BITS * FIRST - 8 * offset;
      static const int32_t shift[4] = {-a, -(a + BITS), -(a + 2 * BITS), -(a + 3 * BITS)}; /* left by less than 0 */
      uint32_t word;
      memcpy(&word, chunk + offset, 4);
      const uint32x4_t q = vandq_u32(vshlq_u32(vdupq_n_u32(word), vld1q_s32(shift)), vdupq_n_u32((1u << BITS) - 1));
      return vfmaq_f32(bias, vcvtq_f32_u32(q), scale);
    }

    template <int STEP>
    V weights(const uint8_t* chunk) const {
      constexpr int j = 16 * STEP;
      return {{four<j>(chunk), four<j + 4>(chunk), four<j + 8>(chunk), four<j + 12>(chunk)}};
    }
  };

  struct Wide {
    using F = float32x4_t;
    using I = uint32x4_t;
    static constexpr int kLanes = 4, kVectors = 2, kMaxPanel = 12;
    static F zero() { return vdupq_n_f32(0.0f); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F v) { vst1q_f32(p, v); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F set1(float v) { return vdupq_n_f32(v); }
    static I load_words(const uint32_t* p) { return vld1q_u32(p); }
    template <int S>
    static I right(I v) { return vshlq_u32(v, vdupq_n_s32(-S)); }
    template <int S>
    static I left(I v) { return vshlq_n_u32(v, S); }
    static I either(I a, I b) { return vorrq_u32(a, b); }
    static I mask(I v, uint32_t m) { return vandq_u32(v, vdupq_n_u32(m)); }
    static F decode(F scale, I q, F bias) { return vfmaq_f32(bias, scale, vcvtq_f32_u32(q)); }
  };
};

}  // namespace
}  // namespace bonsai
#endif
