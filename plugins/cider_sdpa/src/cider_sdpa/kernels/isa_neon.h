/* NEON (64-bit ARM): sixteen floats in four registers. */
#ifndef CIDER_SDPA_ISA_NEON_H
#define CIDER_SDPA_ISA_NEON_H

#include <arm_neon.h>

#include "problem.h"
#include "unpack.h"

namespace cider {
namespace {

struct Neon {
  struct V {
    float32x4_t f[4];
  };
  static constexpr int kRows = 3, kCols = 2, kThinRows = 1, kThinCols = 4, kDotRows = 1, kTreeRows = 1, kTreeCols = 1;
  static constexpr int64_t kTurn = 10;

  template <class F>
  static V each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  static V zero() { return set1(0.0f); }
  static V set1(float v) { return each([&](int) { return vdupq_n_f32(v); }); }
  static V add(V a, V b) { return each([&](int i) { return vaddq_f32(a.f[i], b.f[i]); }); }
  static V sub(V a, V b) { return each([&](int i) { return vsubq_f32(a.f[i], b.f[i]); }); }
  static V mul(V a, V b) { return each([&](int i) { return vmulq_f32(a.f[i], b.f[i]); }); }
  static V div(V a, V b) { return each([&](int i) { return vdivq_f32(a.f[i], b.f[i]); }); }
  static V max(V a, V b) { return each([&](int i) { return vmaxq_f32(a.f[i], b.f[i]); }); } /* NaN if either is */
  static V fma(V a, V b, V c) { return each([&](int i) { return vfmaq_f32(c.f[i], a.f[i], b.f[i]); }); }
  static V load(const float* p) { return each([&](int i) { return vld1q_f32(p + 4 * i); }); }
  static void store(float* p, V v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.f[i]);
  }

  static V codes(const uint8_t* p, const Unpacker& u) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = u.code(p, i);
    return load(lanes);
  }
  static V affine(V scale, V code, V bias) { return fma(scale, code, bias); } /* rounded once */

  static V get(F32, const float* p) { return load(p); }
  static V get(F16, const uint16_t* p) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
  }
  static V get(BF16, const uint16_t* p) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  /* The first n of 16, zeros after them; nothing beyond is read. */
  template <class T>
  static V get_part(T, const typename T::Element* p, int n) {
    typename T::Element copy[16] = {};
    memcpy(copy, p, (size_t)n * sizeof *p);
    return get(T(), copy);
  }

  static V keep_first(V v, int n, float other) {
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32x4_t end = vdupq_n_s32(n);
    const float32x4_t o = vdupq_n_f32(other);
    return each([&](int i) { return vbslq_f32(vcltq_s32(vld1q_s32(lane + 4 * i), end), v.f[i], o); });
  }
  static V replace(V v, V m, float other) {
    const float32x4_t o = vdupq_n_f32(other);
    return each([&](int i) { return vbslq_f32(vceqzq_f32(m.f[i]), v.f[i], o); });
  }
  static float sum(V v) {
    const float32x4_t q = vaddq_f32(vaddq_f32(v.f[0], v.f[2]), vaddq_f32(v.f[1], v.f[3]));
    const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(vpadd_f32(d, d), 0);
  }
  static float highest(V v) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.f[0], v.f[1]), vmaxq_f32(v.f[2], v.f[3])));
  }

  static V nearest(V x) { return each([&](int i) { return vrndnq_f32(x.f[i]); }); }
  static V times_power(V v, V n, V x, float limit) {
    const float32x4_t low = vdupq_n_f32(limit);
    return each([&](int i) {
      const int32x4_t e = vshlq_n_s32(vcvtq_s32_f32(n.f[i]), 23);
      const int32x4_t y = vaddq_s32(vreinterpretq_s32_f32(v.f[i]), e);
      return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_s32(y), vcltq_f32(x.f[i], low)));
    });
  }

  /* Sums over the lanes of 16 vectors: as for AVX-512. */
  static float32x4_t one(V a) { return vaddq_f32(vaddq_f32(a.f[0], a.f[2]), vaddq_f32(a.f[1], a.f[3])); }
  static V fold4(V a, V b, V c, V d) { return {{one(a), one(b), one(c), one(d)}}; }
  static float32x4_t halves(float32x4_t a, float32x4_t b) {
    return vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
  }
  static V fold16(V p, V q, V r, V s) {
    return each([&](int i) { return vpaddq_f32(halves(p.f[i], q.f[i]), halves(r.f[i], s.f[i])); });
  }
  /* out[i * stride + j] = r[j][i] */
  static void transpose(const V* r, float* out, int64_t stride) {
    for (int j = 0; j < 16; j += 4) {
      for (int i = 0; i < 4; ++i) {
        const float32x4x2_t a = vtrnq_f32(r[j].f[i], r[j + 1].f[i]), b = vtrnq_f32(r[j + 2].f[i], r[j + 3].f[i]);
        float* to = out + 4 * i * stride + j;
        vst1q_f32(to, vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0])));
        vst1q_f32(to + stride, vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1])));
        vst1q_f32(to + 2 * stride, vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])));
        vst1q_f32(to + 3 * stride, vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1])));
      }
    }
  }

  template <class T>
  static void put(T, typename T::Element* p, V v, int n) {
    float f[16];
    store(f, v);
    put_floats(T(), p, f, n);
  }
  static void put_floats(F32, float* p, const float* f, int n) { memcpy(p, f, (size_t)n * sizeof(float)); }
  static void put_floats(F16, uint16_t* p, const float* f, int n) {
    for (int i = 0; i < n; ++i) p[i] = accel_half_from_float(f[i]);
  }
  static void put_floats(BF16, uint16_t* p, const float* f, int n) {
    for (int i = 0; i < n; ++i) p[i] = accel_bfloat_from_float(f[i]);
  }
};

}  // namespace
}  // namespace cider
#endif
