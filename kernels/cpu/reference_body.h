/* The loops of reference.h, compiled once per instruction set with ACCEL_VARIANT naming the namespace and
 * ACCEL_VECTOR the bytes of its registers. */
#include <cmath>
#include <cstring>

#include "reference.h"

namespace accel::reference::ACCEL_VARIANT {

constexpr int kLanes = 16;   // partial sums; their number is part of the result's bits
constexpr int64_t kBlock = 512;

// The compiler's own vector types, since it keeps arrays of partial sums in memory otherwise.
constexpr int kWidth = ACCEL_VECTOR / sizeof(double), kVectors = kLanes / kWidth;
typedef double Doubles __attribute__((vector_size(ACCEL_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(ACCEL_VECTOR)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(8)));
typedef double Octet __attribute__((vector_size(64)));

/* 32 weights from `BITS` words: code i is bits [i * BITS, (i + 1) * BITS) of the words, lowest bit first. A float times a
 * code of at most 8 bits is exact in double. */
template <int BITS>
inline void decode32(const uint32_t* w, double scale, double bias, double* out) {
  int32_t q[32];
  constexpr uint32_t mask = (1u << BITS) - 1;
  if constexpr (BITS == 8) {
    for (int i = 0; i < 32; i += 8) {
      Bytes bytes;
      std::memcpy(&bytes, w + i / 4, sizeof bytes);
      const Octet weights = __builtin_convertvector(__builtin_convertvector(bytes, Ints), Octet) * scale + bias;
      std::memcpy(out + i, &weights, sizeof weights);
    }
    return;
  } else if constexpr (32 % BITS == 0) {
    // Eight codes lie in one word.
    constexpr Words shifts = {0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS};
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = w[i * BITS / 4] >> (8 * i * BITS % 32);
      const Words codes = ((Words{} + word) >> shifts) & mask;
      const Octet weights = __builtin_convertvector((Ints)codes, Octet) * scale + bias;
      std::memcpy(out + 8 * i, &weights, sizeof weights);
    }
    return;
  } else {
    // A code lies within the two bytes that begin with the one its first bit is in (little-endian memory).
    uint8_t bytes[4 * BITS + 1];
    std::memcpy(bytes, w, 4 * BITS);
    bytes[4 * BITS] = 0;
    for (int i = 0; i < 32; ++i) {
      uint16_t pair;
      std::memcpy(&pair, bytes + i * BITS / 8, sizeof pair);
      q[i] = int32_t((pair >> (i * BITS % 8)) & mask);
    }
  }
  for (int i = 0; i < 32; ++i) out[i] = scale * q[i] + bias;
}

struct Sums {
  double y[kLanes], mag[kLanes];
};

/* `count` is a multiple of kLanes. */
inline void accumulate(const double* w, const double* x, int64_t count, Sums& s) {
  constexpr int64_t not_sign = INT64_MAX;
  Doubles y[kVectors], mag[kVectors];
  std::memcpy(y, s.y, sizeof y);
  std::memcpy(mag, s.mag, sizeof mag);
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      Doubles a, b;
      std::memcpy(&a, w + i + v * kWidth, sizeof a);
      std::memcpy(&b, x + i + v * kWidth, sizeof b);
      const Doubles product = a * b;
      y[v] += product;
      mag[v] += (Doubles)((Longs)product & not_sign);
    }
  }
  std::memcpy(s.y, y, sizeof y);
  std::memcpy(s.mag, mag, sizeof mag);
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
      std::memset(sums, 0, sizeof(Sums) * size_t(m1 - m0));
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
    int64_t g = row * groups + first / group, left = group - first % group;
    for (int64_t i = 0; i < count; i += 32, left -= 32) {
      if (left == 0) left = group, ++g;
      decode32<BITS>(w + row * words + (first + i) / 32 * BITS, scales[g], biases[g], out + i);
    }
  });
}

#if ACCEL_VECTOR == 64 && defined(__GNUC__) && !defined(__clang__)
#define ACCEL_REFERENCE_TABLE
#include "reference_table.h"
#endif

void affine(const Product& p, const uint32_t* w, const float* scales, const float* biases, int bits, int group,
            int64_t begin, int64_t end) {
#ifdef ACCEL_REFERENCE_TABLE
  if (p.m == 1 && bits == 1) return affine_one<1>(p, w, scales, biases, group, begin, end);
  if (p.m == 1 && bits == 2) return affine_one<2>(p, w, scales, biases, group, begin, end);
#endif
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
