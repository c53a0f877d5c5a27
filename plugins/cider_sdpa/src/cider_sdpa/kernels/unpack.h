/* Rows of codes to floats, sixteen elements at a time. Included once per instruction set. */
#ifndef CIDER_SDPA_UNPACK_H
#define CIDER_SDPA_UNPACK_H

#include "problem.h"

namespace cider {
namespace {

/* How sixteen codes lie in 2 * bits bytes: code i is in the bytes control[4 i], control[4 i + 1], from bit shift[i]. */
struct Unpacker {
  alignas(64) uint8_t control[64];
  alignas(64) uint32_t shift[16];
  uint32_t mask;
  int bytes;

  explicit Unpacker(int bits) : mask((1u << bits) - 1), bytes(2 * bits) {
    for (int i = 0; i < 16; ++i) {
      const int first = i * bits / 8;
      control[4 * i] = (uint8_t)first;
      control[4 * i + 1] = (uint8_t)(first + 1 < bytes ? first + 1 : 0x80); /* 0x80: a zero */
      control[4 * i + 2] = control[4 * i + 3] = 0x80;
      shift[i] = (uint32_t)(i * bits % 8);
    }
  }
  float code(const uint8_t* p, int i) const {
    const uint32_t high = control[4 * i + 1] < 16 ? p[control[4 * i + 1]] : 0u;
    return (float)(((p[control[4 * i]] | high << 8) >> shift[i]) & mask);
  }
};

constexpr int64_t kFactors = 256; /* scales (biases) converted at a time */

template <class I, class T>
void widen_factors(const void* data, int64_t at, int64_t n, float* out) {
  const typename T::Element* p = (const typename T::Element*)data + at;
  for (int64_t i = 0; i < n; i += 16) {
    I::store(out + i, n - i < 16 ? I::get_part(T(), p + i, (int)(n - i)) : I::get(T(), p + i));
  }
}

/* The scales (biases) of n rows from (b, h, first), `groups` each, as floats. */
template <class I>
void load_factors(const Tensor& t, int64_t b, int64_t h, int64_t first, int64_t n, int64_t groups, float* out) {
  const int64_t* e = t.stride;
  const int64_t at = b * e[0] + h * e[1] + first * e[2];
  if ((e[3] == 1 || groups == 1) && (e[2] == groups || n == 1)) {
    if (t.dtype == ACCEL_FLOAT32) return widen_factors<I, F32>(t.data, at, n * groups, out);
    if (t.dtype == ACCEL_FLOAT16) return widen_factors<I, F16>(t.data, at, n * groups, out);
    return widen_factors<I, BF16>(t.data, at, n * groups, out);
  }
  for (int64_t s = 0; s < n; ++s) {
    for (int64_t g = 0; g < groups; ++g) *out++ = accel_load_float(t.data, at + s * e[2] + g * e[3], t.dtype);
  }
}

/* n rows from (b, h, first), `width` elements each (a multiple of 16), `stride` floats apart. */
template <class I>
void unpack_rows(const Codes& c, int64_t b, int64_t h, int64_t first, int64_t n, int64_t width, float* out,
                 int64_t stride) {
  const Unpacker how(c.bits);
  alignas(64) float scales[kFactors + 16], biases[kFactors + 16];
  const int64_t *w = c.words.stride, groups = width / c.group, rows = groups <= kFactors ? kFactors / groups : 1;
  for (int64_t s = 0; s < n; s += rows) {
    const int64_t here = min64(rows, n - s);
    /* A row with more groups than fit is done in parts. */
    for (int64_t g = 0; g < groups; g += kFactors) {
      const int64_t some = min64(kFactors, groups - g);
      Tensor from = c.scales, shift = c.biases;
      if (g) {
        from.data = (const char*)from.data + g * from.stride[3] * (int64_t)accel_itemsize(from.dtype);
        shift.data = (const char*)shift.data + g * shift.stride[3] * (int64_t)accel_itemsize(shift.dtype);
      }
      load_factors<I>(from, b, h, first + s, here, some, scales);
      load_factors<I>(shift, b, h, first + s, here, some, biases);
      for (int64_t r = 0; r < here; ++r) {
        const uint8_t* p = (const uint8_t*)c.words.data + 4 * (b * w[0] + h * w[1] + (first + s + r) * w[2]);
        p += g * c.group * c.bits / 8;
        float* to = out + (s + r) * stride + g * c.group;
        for (int64_t x = 0; x < some; ++x) {
          const typename I::V scale = I::set1(scales[r * some + x]), bias = I::set1(biases[r * some + x]);
          for (int64_t d = 0; d < c.group; d += 16, p += how.bytes, to += 16) {
            I::store(to, I::affine(scale, I::codes(p, how), bias));
          }
        }
      }
    }
  }
}

/* The words of n rows from (b, h, first), to be fetched ahead. */
inline Ahead ahead_of(const Codes& c, int64_t b, int64_t h, int64_t first, int64_t width) {
  const int64_t* w = c.words.stride;
  return {(const char*)c.words.data + 4 * (b * w[0] + h * w[1] + first * w[2]), 4 * w[2], width * c.bits / 8};
}

}  // namespace
}  // namespace cider
#endif
