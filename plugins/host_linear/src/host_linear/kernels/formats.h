/* The weight formats: how a row of W lies in memory, and what its codes mean.
 *
 * A row is made of chunks of 32 weights along k (the last chunk of a dense row may be shorter):
 *
 *   format    bytes a chunk   scales a chunk   weight j of the chunk
 *   float32   128             -                bytes [4 j, 4 j + 4), IEEE binary32, little-endian
 *   float16   64              -                bytes [2 j, 2 j + 2), IEEE binary16
 *   bfloat16  64              -                bytes [2 j, 2 j + 2), the upper half of a binary32
 *   mxfp4     16              1, E8M0          E2M1 in bits [4 j, 4 j + 4), LSB first, times the chunk's scale
 *   nvfp4     16              2, E4M3          E2M1 likewise, times scale j / 16
 *   mxfp8     32              1, E8M0          E4M3 in byte j, times the chunk's scale
 *
 *   E2M1  bit 3 sign, bits 2..1 exponent (bias 1), bit 0 mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6
 *   E4M3  bit 7 sign, bits 6..3 exponent (bias 7), bits 2..0 mantissa; 0x7f and 0xff are NaN, there is no infinity
 *   E8M0  2^(code - 127); 255 is infinity, as in mlx 0.32 (a NaN in the specification)
 *
 * All weights are exact in float32 but for scales at the very ends of E8M0's range, where the product is
 * rounded once or becomes infinite, as in stock.
 * nvfp4 rows may end with half a chunk.
 *
 * Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0; the byte layout is
 * that of mlx.core.quantize(..., mode=...).
 */
#ifndef HOST_LINEAR_FORMATS_H
#define HOST_LINEAR_FORMATS_H

#include <stdint.h>

namespace linear {

enum Format : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kMxfp4 = 3, kNvfp4 = 4, kMxfp8 = 5 };

constexpr int64_t kChunk = 32;

namespace {

constexpr int64_t chunk_bytes(Format f) {
  return f == kFloat32 ? 128 : f == kMxfp4 || f == kNvfp4 ? 16 : f == kMxfp8 ? 32 : 64;
}
constexpr int64_t chunk_scales(Format f) { return f == kNvfp4 ? 2 : f == kMxfp4 || f == kMxfp8 ? 1 : 0; }

constexpr float kInfinity = __builtin_inff();

struct E2M1 {
  alignas(64) float value[16];
  constexpr E2M1() : value() {
    constexpr float size[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int i = 0; i < 8; ++i) {
      value[i] = size[i];
      value[i + 8] = -size[i];
    }
  }
};
constexpr E2M1 kE2M1{};

constexpr float power_of_two(int exponent) { /* at least -149 */
  float v = 1.0f;
  for (int i = 0; i < exponent; ++i) v *= 2.0f;
  for (int i = 0; i > exponent; --i) v *= 0.5f;
  return v;
}


struct E4M3 {
  alignas(64) float value[256];
  constexpr E4M3() : value() {
    for (int i = 0; i < 128; ++i) {
      const int e = i >> 3, m = i & 7;
      const float v = e ? (float)(8 + m) * power_of_two(e - 10) : (float)m * power_of_two(-9);
      value[i] = i == 127 ? __builtin_nanf("") : v;
      value[i + 128] = i == 127 ? __builtin_nanf("") : -v;
    }
  }
};
constexpr E4M3 kE4M3{};

struct E8M0 {
  alignas(64) float value[256];
  constexpr E8M0() : value() {
    value[0] = power_of_two(-127);
    for (int i = 1; i < 255; ++i) value[i] = 2.0f * value[i - 1];
    value[255] = kInfinity;
  }
};
constexpr E8M0 kE8M0{};

/* The scale that a format's scale byte means. */
template <Format F>
float scale_of(uint8_t code) {
  return F == kNvfp4 ? kE4M3.value[code] : kE8M0.value[code];
}

}  // namespace
}  // namespace linear
#endif
