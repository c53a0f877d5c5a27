/* The loops of reference.h, compiled once per instruction set with ACCEL_VARIANT naming the namespace. */
#include <cmath>
#include <cstring>

#include "reference.h"

namespace accel::reference::ACCEL_VARIANT {

constexpr int kLanes = 16;   // partial sums; their number is part of the result's bits
constexpr int64_t kBlock = 512;

/* 32 codes from `BITS` words. */
template <int BITS>
inline void unpack32(const uint32_t* w, int32_t* q) {
  constexpr uint32_t mask = (1u << BITS) - 1;
  if constexpr (32 % BITS == 0) {
    constexpr int per_word = 32 / BITS;
    for (int i = 0; i < BITS; ++i) {
      for (int j = 0; j < per_word; ++j) q[i * per_word + j] = int32_t((w[i] >> (j * BITS)) & mask);
    }
  } else {
    // A code may lie across two words; the word behind the last one is not read.
    uint32_t padded[BITS + 1];
    std::memcpy(padded, w, sizeof(uint32_t) * BITS);
    padded[BITS] = 0;
    for (int i = 0; i < 32; ++i) {
      const int word = i * BITS / 32, shift = i * BITS % 32;
      const uint64_t pair = uint64_t(padded[word + 1]) << 32 | padded[word];
      q[i] = int32_t(uint32_t(pair >> shift) & mask);
    }
  }
}

struct Sums {
  double y[kLanes] = {}, mag[kLanes] = {};
};

/* `count` is a multiple of kLanes. */
inline void accumulate(const double* w, const double* x, int64_t count, Sums& s) {
  double y[kLanes], mag[kLanes];
  for (int j = 0; j < kLanes; ++j) y[j] = s.y[j], mag[j] = s.mag[j];
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double product = w[i + j] * x[i + j];
      y[j] += product;
      mag[j] += std::fabs(product);
    }
  }
  for (int j = 0; j < kLanes; ++j) s.y[j] = y[j], s.mag[j] = mag[j];
}

inline double total(const double* v) {
  double sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += v[j];
  return sum;
}

/* decode(row, first, count, out) gives `count` weights of a row; then all rows of x see that block. */
template <typename Decode>
void product(const Product& p, int64_t begin, int64_t end, Decode&& decode) {
  alignas(64) double w[kBlock], tail[kLanes];
  const int64_t rows = p.row_end - p.row_begin;
  constexpr int64_t kAtOnce = 16; // rows of x whose sums are kept while a row of w is decoded once
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t m0 = 0; m0 < p.m; m0 += kAtOnce) {
      const int64_t m1 = m0 + kAtOnce < p.m ? m0 + kAtOnce : p.m;
      Sums sums[kAtOnce];
      for (int64_t k = 0; k < p.k; k += kBlock) {
        const int64_t count = k + kBlock < p.k ? kBlock : p.k - k;
        decode(p.row_begin + row, k, count, w);
        const int64_t whole = count / kLanes * kLanes;
        for (int64_t i = count; i < whole + kLanes && whole != count; ++i) w[i] = 0;
        for (int64_t m = m0; m < m1; ++m) {
          const double* x = p.x + m * p.k + k;
          accumulate(w, x, whole, sums[m - m0]);
          if (whole != count) {
            for (int j = 0; j < kLanes; ++j) tail[j] = whole + j < count ? x[whole + j] : 0;
            accumulate(w + whole, tail, kLanes, sums[m - m0]);
          }
        }
      }
      for (int64_t m = m0; m < m1; ++m) {
        p.y[m * rows + row] = total(sums[m - m0].y);
        p.mag[m * rows + row] = total(sums[m - m0].mag);
      }
    }
  }
}

template <int BITS>
void affine_rows(const Product& p, const uint32_t* w, const float* scales, const float* biases, int group,
                 int64_t begin, int64_t end) {
  const int64_t words = p.k * BITS / 32, groups = p.k / group;
  product(p, begin, end, [&](int64_t row, int64_t first, int64_t count, double* out) {
    alignas(64) int32_t q[32];
    for (int64_t i = 0; i < count; i += 32) {
      const int64_t g = row * groups + (first + i) / group;
      // A float times a code of at most 8 bits is exact in double.
      const double scale = scales[g], bias = biases[g];
      unpack32<BITS>(w + row * words + (first + i) / 32 * BITS, q);
      for (int j = 0; j < 32; ++j) out[i + j] = scale * q[j] + bias;
    }
  });
}

void affine(const Product& p, const uint32_t* w, const float* scales, const float* biases, int bits, int group,
            int64_t begin, int64_t end) {
  switch (bits) {
    case 1: return affine_rows<1>(p, w, scales, biases, group, begin, end);
    case 2: return affine_rows<2>(p, w, scales, biases, group, begin, end);
    case 3: return affine_rows<3>(p, w, scales, biases, group, begin, end);
    case 4: return affine_rows<4>(p, w, scales, biases, group, begin, end);
    case 5: return affine_rows<5>(p, w, scales, biases, group, begin, end);
    case 6: return affine_rows<6>(p, w, scales, biases, group, begin, end);
    case 8: return affine_rows<8>(p, w, scales, biases, group, begin, end);
  }
}

inline float as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

/* Exponent and fraction moved into place are the value times 2^-112, subnormals included; in double that scaling
 * is exact. Infinities and NaNs keep an all-ones exponent. */
inline double half_value(uint16_t h) {
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x70000000u : 0u;
  return double(as_float(magnitude | special | sign)) * 0x1p112;
}

void dense(const Product& p, const void* weights, Dense type, int64_t begin, int64_t end) {
  const int64_t k = p.k;
  if (type == Dense::Float32) {
    const float* w = static_cast<const float*>(weights);
    product(p, begin, end, [=](int64_t row, int64_t first, int64_t count, double* out) {
      for (int64_t i = 0; i < count; ++i) out[i] = w[row * k + first + i];
    });
  } else if (type == Dense::Float16) {
    const uint16_t* w = static_cast<const uint16_t*>(weights);
    product(p, begin, end, [=](int64_t row, int64_t first, int64_t count, double* out) {
      for (int64_t i = 0; i < count; ++i) out[i] = half_value(w[row * k + first + i]);
    });
  } else {
    const uint16_t* w = static_cast<const uint16_t*>(weights);
    product(p, begin, end, [=](int64_t row, int64_t first, int64_t count, double* out) {
      for (int64_t i = 0; i < count; ++i) out[i] = as_float(uint32_t(w[row * k + first + i]) << 16);
    });
  }
}

} // namespace accel::reference::ACCEL_VARIANT
