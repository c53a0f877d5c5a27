/* Matrix products in float64, to judge kernels by: plain loops, no intrinsics, nothing shared with the kernels
 * they judge. The same source is compiled once per instruction set (reference_body.h) so that the compiler can
 * use wide registers; all variants give the same bits. */
#pragma once

#include <cstdint>

namespace accel::reference {

/* y[m][r] = sum over k of w[row_begin + r][k] * x[m][k], mag the sum of the absolute values. */
struct Product {
  const double* x; // (m, k)
  int64_t m, k, row_begin, row_end;
  double* y;       // (m, row_end - row_begin)
  double* mag;
};

enum class Dense { Float32, Float16, Bfloat16 };

/* w: (n, k * bits / 32) words, codes of `bits` bits as one little-endian bit stream per row; scales and biases:
 * (n, k / group). bits in 1..6, 8; group a multiple of 32; k a multiple of group. */
void affine(const Product& p, const uint32_t* w, const float* scales, const float* biases, int bits, int group);

/* w: (n, k) of the given type. */
void dense(const Product& p, const void* w, Dense type);

} // namespace accel::reference
