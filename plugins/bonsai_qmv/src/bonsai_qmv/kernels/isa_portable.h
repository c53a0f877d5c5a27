/* No instruction set in particular: sixteen floats in an array, and codes to weights.
 *
 * A fused multiply-add costs a library call where the processor has none that the compiler may use. Weights are
 * therefore made in float64, where scale * code is exact, and rounded to float32 from there; products are rounded
 * before they are added. Both stay well within the bound.
 */
#ifndef BONSAI_QMV_ISA_PORTABLE_H
#define BONSAI_QMV_ISA_PORTABLE_H

#include "problem.h"

namespace bonsai {
namespace {

struct Portable {
  struct V {
    float f[16];
  };
  static constexpr int kNarrowRows = 1;
  static constexpr int kAccumulators = 2;
  static constexpr int kMaxTile = 2;

  static V zero() { return {}; }
  static V load(const float* p) {
    V v;
    memcpy(v.f, p, sizeof v.f);
    return v;
  }
  static void store(float* p, const V& v) { memcpy(p, v.f, sizeof v.f); }
  static V fma(const V& a, const V& b, const V& c) {
    V v;
    for (int i = 0; i < 16; ++i) v.f[i] = a.f[i] * b.f[i] + c.f[i];
    return v;
  }

  /* out[i] = sum of the 16 lanes of i, for 8 values of i, each by the same tree of halvings. */
  static void sum8(const float (*lanes)[16], float* out) {
    for (int i = 0; i < 8; ++i) {
      float a[8];
      for (int j = 0; j < 8; ++j) a[j] = lanes[i][j] + lanes[i][j + 8];
      for (int n = 4; n > 0; n /= 2) {
        for (int j = 0; j < n; ++j) a[j] += a[j + n];
      }
      out[i] = a[0];
    }
  }

  static constexpr bool permutes(int) { return false; }
  static void permute_chunk(float*) {}

  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }

  template <int BITS>
  struct Group {
    double scale, bias;
    float table[1 << (BITS < 5 ? BITS : 0)]; /* up to 4 bits: the weight of every code */
    Group() = default;
    Group(float s, float b) : scale(s), bias(b) {
      if constexpr (BITS < 5) {
        for (int q = 0; q < 1 << BITS; ++q) table[q] = (float)(scale * q + bias);
      }
    }

    template <int STEP>
    V weights(const uint8_t* chunk) const {
      V v;
      for (int i = 0; i < 16; ++i) {
        const int bit = BITS * (16 * STEP + i), at = bit / 8, shift = bit % 8;
        uint32_t q = chunk[at];
        if (shift + BITS > 8) q |= (uint32_t)chunk[at + 1] << 8;
        q = (q >> shift) & ((1u << BITS) - 1);
        if constexpr (BITS < 5) {
          v.f[i] = table[q];
        } else {
          v.f[i] = (float)(scale * q + bias);
        }
      }
      return v;
    }
  };

  struct Wide {
    struct F {
      float f[4];
    };
    struct I {
      uint32_t i[4];
    };
    static constexpr int kLanes = 4, kVectors = 2, kMaxPanel = 4;

    template <class T, class Op>
    static T each(Op op) {
      return {{op(0), op(1), op(2), op(3)}};
    }
    static F zero() { return {}; }
    static F load(const float* p) { return each<F>([=](int i) { return p[i]; }); }
    static void store(float* p, F v) { memcpy(p, v.f, sizeof v.f); }
    static F add(F a, F b) { return each<F>([=](int i) { return a.f[i] + b.f[i]; }); }
    static F fma(F a, F b, F c) { return each<F>([=](int i) { return a.f[i] * b.f[i] + c.f[i]; }); }
    static F decode(F s, I q, F b) { return each<F>([=](int i) { return (float)((double)s.f[i] * q.i[i] + b.f[i]); }); }
    static F set1(float v) { return {{v, v, v, v}}; }
    static I load_words(const uint32_t* p) { return each<I>([=](int i) { return p[i]; }); }
    template <int S>
    static I right(I v) { return each<I>([=](int i) { return v.i[i] >> S; }); }
    template <int S>
    static I left(I v) { return each<I>([=](int i) { return v.i[i] << S; }); }
    static I either(I a, I b) { return each<I>([=](int i) { return a.i[i] | b.i[i]; }); }
    static I mask(I v, uint32_t m) { return each<I>([=](int i) { return v.i[i] & m; }); }
  };
};

}  // namespace
}  // namespace bonsai
#endif
