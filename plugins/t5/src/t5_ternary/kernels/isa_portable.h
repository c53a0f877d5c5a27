/* No instruction set in particular: sixteen floats in an array; digits come from a table. */
#ifndef T5_ISA_PORTABLE_H
#define T5_ISA_PORTABLE_H

#include "problem.h"

namespace t5 {
namespace {

/* digit - 1 for every byte; bytes above 242 are taken modulo 3^5, whatever that gives. */
struct Digits {
  float of[256][5];
  constexpr Digits() : of() {
    for (int v = 0; v < 256; ++v) {
      int rest = v;
      for (int i = 0; i < 5; ++i, rest /= 3) of[v][i] = (float)(rest % 3 - 1);
    }
  }
};
constexpr Digits kDigits{};

struct Portable {
  struct V {
    float f[16];
  };

  static V zero() { return {}; }
  static V set1(float v) {
    V out;
    for (float& f : out.f) f = v;
    return out;
  }
  static V load(const float* p) {
    V v;
    memcpy(v.f, p, sizeof v.f);
    return v;
  }
  static void store(float* p, const V& v) { memcpy(p, v.f, sizeof v.f); }
  /* Products are rounded before they are added: a fused operation is a library call where the processor has none. */
  static V fma(const V& a, const V& b, const V& c) {
    V v;
    for (int i = 0; i < 16; ++i) v.f[i] = a.f[i] * b.f[i] + c.f[i];
    return v;
  }
  static float sum(const float* lanes) {
    float a[8];
    for (int j = 0; j < 8; ++j) a[j] = lanes[j] + lanes[j + 8];
    for (int n = 4; n > 0; n /= 2) {
      for (int j = 0; j < n; ++j) a[j] += a[j + n];
    }
    return a[0];
  }
  static void digits(const uint8_t* chunk, V* out) {
    for (int b = 0; b < 16; ++b) {
      for (int i = 0; i < 5; ++i) out[i].f[b] = kDigits.of[chunk[b]][i];
    }
  }
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }

  struct Wide {
    struct F {
      float f[4];
    };
    static constexpr int kLanes = 4, kVectors = 2, kMaxPanel = 4;
    template <class Op>
    static F each(Op op) {
      return {{op(0), op(1), op(2), op(3)}};
    }
    static F zero() { return {}; }
    static F load(const float* p) {
      return each([=](int i) { return p[i]; });
    }
    static void store(float* p, F v) { memcpy(p, v.f, sizeof v.f); }
    static F add(F a, F b) {
      return each([=](int i) { return a.f[i] + b.f[i]; });
    }
    static F mul(F a, F b) {
      return each([=](int i) { return a.f[i] * b.f[i]; });
    }
    static F fma(F a, F b, F c) {
      return each([=](int i) { return a.f[i] * b.f[i] + c.f[i]; });
    }
    static F set1(float v) { return {{v, v, v, v}}; }
    static void digits(const uint8_t* bytes, F* out) {
      for (int l = 0; l < 4; ++l) {
        for (int i = 0; i < 5; ++i) out[i].f[l] = kDigits.of[bytes[l]][i];
      }
    }
  };
};

}  // namespace
}  // namespace t5
#endif
