/* No instruction set in particular: sixteen floats in an array, and codes to weights by tables.
 *
 * A fused multiply-add costs a library call where the processor has none that the compiler may use: products are
 * rounded before they are added, which stays within the bound.
 */
#ifndef HOST_LINEAR_ISA_PORTABLE_H
#define HOST_LINEAR_ISA_PORTABLE_H

#include "problem.h"

namespace linear {
namespace {

struct Portable {
  struct V {
    float f[16];
  };
  static constexpr bool kReadsLines = false;
  static constexpr int kMaxTile = 2; /* rows of x per tile */
  static constexpr int tile_rows(int mt) { return mt == 1 ? 2 : 1; } /* rows of W per tile of mt rows of x */

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

  static V hold(const V& v) { return v; }

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

  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }
  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) accel_store_float(out, i, dtype, p[i]);
  }

  template <Format F>
  static constexpr bool permutes() { return false; }
  template <Format F>
  static void permute_chunk(float*) {}

  /* Weights 16 * STEP ... of a chunk, whose first byte and first scale are given. */
  template <Format F, int STEP>
  static V weights(const uint8_t* chunk, const uint8_t* scales) {
    V v;
    if constexpr (F == kFloat32) {
      memcpy(v.f, chunk + 64 * STEP, sizeof v.f);
    } else if constexpr (F == kFloat16 || F == kBfloat16) {
      uint16_t h[16];
      memcpy(h, chunk + 32 * STEP, sizeof h);
      for (int i = 0; i < 16; ++i) v.f[i] = F == kFloat16 ? accel_float_from_half(h[i]) : accel_float_from_bfloat(h[i]);
    } else {
      const float scale = scale_of<F>(scales[F == kNvfp4 ? STEP : 0]);
      for (int i = 0; i < 16; ++i) {
        const int j = 16 * STEP + i;
        const float value = F == kMxfp8 ? kE4M3.value[chunk[j]] : kE2M1.value[(chunk[j / 2] >> (j % 2 * 4)) & 15];
        v.f[i] = value * scale;
      }
    }
    return v;
  }

  /* The blocked product keeps rows of x in the lanes. */
  struct Wide {
    struct F {
      float f[4];
    };
    static constexpr int kLanes = 4, kVectors = 2, kColumns = 2;

    template <class Op>
    static F each(Op op) {
      return {{op(0), op(1), op(2), op(3)}};
    }
    static F zero() { return {}; }
    static F load(const float* p) { return each([=](int i) { return p[i]; }); }
    static void store(float* p, F v) { memcpy(p, v.f, sizeof v.f); }
    static F add(F a, F b) { return each([=](int i) { return a.f[i] + b.f[i]; }); }
    static F fma(F a, F b, F c) { return each([=](int i) { return a.f[i] * b.f[i] + c.f[i]; }); }
    static F set1(const float* p) { return {{*p, *p, *p, *p}}; }
  };

  /* out[j][i] = in[i][j], kLanes by kLanes. */
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    for (int i = 0; i < Wide::kLanes; ++i) {
      for (int j = 0; j < Wide::kLanes; ++j) out[j * out_stride + i] = in[i * in_stride + j];
    }
  }
};

}  // namespace
}  // namespace linear
#endif
