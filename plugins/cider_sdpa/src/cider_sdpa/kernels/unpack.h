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

/* n rows from (b, h, first), `width` elements each (a multiple of 16), `stride` floats apart. */
template <class I>
void unpack_rows(const Codes& c, int64_t b, int64_t h, int64_t first, int64_t n, int64_t width, float* out,
                 int64_t stride) {
  const Unpacker how(c.bits);
  const int64_t *w = c.words.stride, *e = c.scales.stride, *z = c.biases.stride;
  for (int64_t s = first; s < first + n; ++s, out += stride) {
    const uint8_t* p = (const uint8_t*)c.words.data + 4 * (b * w[0] + h * w[1] + s * w[2]);
    const int64_t scales = b * e[0] + h * e[1] + s * e[2], biases = b * z[0] + h * z[1] + s * z[2];
    for (int64_t d = 0; d < width; d += c.group) {
      const int64_t g = d / c.group;
      const typename I::V scale = I::set1(load_as_float(c.scales.data, scales + g * e[3], c.scales.dtype));
      const typename I::V bias = I::set1(load_as_float(c.biases.data, biases + g * z[3], c.biases.dtype));
      for (int64_t x = d; x < d + c.group; x += 16, p += how.bytes) {
        I::store(out + x, I::affine(scale, I::codes(p, how), bias));
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
