/* No instruction set in particular: sixteen floats in an array. Products are rounded before they are added, since a
 * fused multiply-add costs a library call where the compiler may not use one. */
#ifndef CIDER_SDPA_ISA_PORTABLE_H
#define CIDER_SDPA_ISA_PORTABLE_H

#include "problem.h"
#include "unpack.h"

namespace cider {
namespace {

struct Portable {
  struct V {
    float f[16];
  };
  static constexpr int kRows = 2, kCols = 1, kThinRows = 1, kThinCols = 2, kDotRows = 1, kTreeRows = 1, kTreeCols = 1;
  static constexpr int64_t kTurn = 6;

  template <class F>
  static V each(F f) {
    V v;
    for (int i = 0; i < 16; ++i) v.f[i] = f(i);
    return v;
  }
  static V zero() { return {}; }
  static V set1(float v) { return each([&](int) { return v; }); }
  static V add(const V& a, const V& b) { return each([&](int i) { return a.f[i] + b.f[i]; }); }
  static V sub(const V& a, const V& b) { return each([&](int i) { return a.f[i] - b.f[i]; }); }
  static V mul(const V& a, const V& b) { return each([&](int i) { return a.f[i] * b.f[i]; }); }
  static V div(const V& a, const V& b) { return each([&](int i) { return a.f[i] / b.f[i]; }); }
  static V max(const V& a, const V& b) { return each([&](int i) { return a.f[i] > b.f[i] ? a.f[i] : b.f[i]; }); }
  static V fma(const V& a, const V& b, const V& c) { return each([&](int i) { return a.f[i] * b.f[i] + c.f[i]; }); }
  static V load(const float* p) { return each([&](int i) { return p[i]; }); }
  static void store(float* p, const V& v) { memcpy(p, v.f, sizeof v.f); }

  template <class T>
  static V get(T, const typename T::Element* p) {
    return each([&](int i) { return to_float(T(), p[i]); });
  }
  template <class T>
  static V get_part(T, const typename T::Element* p, int n) {
    return each([&](int i) { return i < n ? to_float(T(), p[i]) : 0.0f; });
  }
  static V codes(const uint8_t* p, const Unpacker& u) {
    return each([&](int i) { return u.code(p, i); });
  }
  /* rounded once */
  static V affine(const V& scale, const V& code, const V& bias) {
    return each([&](int i) { return (float)((double)scale.f[i] * code.f[i] + (double)bias.f[i]); });
  }
  static V keep_first(const V& v, int n, float other) { return each([&](int i) { return i < n ? v.f[i] : other; }); }
  static V replace(const V& v, const V& m, float other) {
    return each([&](int i) { return m.f[i] != 0 ? other : v.f[i]; });
  }
  static float sum(const V& v) {
    float h[8];
    for (int i = 0; i < 8; ++i) h[i] = v.f[i] + v.f[i + 8];
    for (int i = 0; i < 4; ++i) h[i] += h[i + 4];
    return (h[0] + h[2]) + (h[1] + h[3]);
  }
  static float highest(const V& v) {
    float m = v.f[0];
    for (int i = 1; i < 16; ++i) m = v.f[i] > m ? v.f[i] : m;
    return m;
  }
  /* Adding and subtracting 1.5 * 2^23 leaves the nearest integer. */
  static V nearest(const V& x) { return each([&](int i) { return (x.f[i] + 12582912.0f) - 12582912.0f; }); }
  static V times_power(const V& v, const V& n, const V& x, float limit) {
    return each([&](int i) {
      if (x.f[i] < limit) return 0.0f;
      return n.f[i] == n.f[i] ? v.f[i] * accel_float_of_bits((uint32_t)((int32_t)n.f[i] + 127) << 23) : n.f[i];
    });
  }

  /* Sums over the lanes of 16 vectors: as for AVX-512. */
  static V fold4(const V& a, const V& b, const V& c, const V& d) {
    V v;
    const V* from[4] = {&a, &b, &c, &d};
    for (int j = 0; j < 4; ++j) {
      float h[8];
      for (int i = 0; i < 8; ++i) h[i] = from[j]->f[i] + from[j]->f[i + 8];
      for (int i = 0; i < 4; ++i) v.f[4 * j + i] = h[i] + h[i + 4];
    }
    return v;
  }
  static V fold16(const V& p, const V& q, const V& r, const V& s) {
    V v;
    const V* from[4] = {&p, &q, &r, &s};
    for (int g = 0; g < 4; ++g) {
      for (int j = 0; j < 4; ++j) {
        const float* f = from[g]->f + 4 * j;
        v.f[4 * j + g] = (f[0] + f[2]) + (f[1] + f[3]);
      }
    }
    return v;
  }
  static void transpose(const V* r, float* out, int64_t stride) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) out[i * stride + j] = r[j].f[i];
    }
  }
  static void put(F32, float* p, const V& v, int n) { memcpy(p, v.f, (size_t)n * sizeof(float)); }
  static void put(F16, uint16_t* p, const V& v, int n) {
    for (int i = 0; i < n; ++i) p[i] = accel_half_from_float(v.f[i]);
  }
  static void put(BF16, uint16_t* p, const V& v, int n) {
    for (int i = 0; i < n; ++i) p[i] = accel_bfloat_from_float(v.f[i]);
  }
};

}  // namespace
}  // namespace cider
#endif
