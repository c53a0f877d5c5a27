/* One row of x with codes of 1 or 2 bits: what product() in reference_body.h computes, with the same bits.
 *
 * A group has two or four different weights. They are kept in a register, by code and repeated so that bits above a
 * code do not matter, and are picked by the codes. Included within the namespace of a variant with 64-byte registers,
 * by compilers that know __builtin_shuffle. */

template <int BITS>
void affine_one(const Product& p, const uint32_t* w, const float* scales, const float* biases, int group,
                int64_t begin, int64_t end) {
  constexpr Doubles codes = BITS == 1 ? Doubles{0, 1, 0, 1, 0, 1, 0, 1} : Doubles{0, 1, 2, 3, 0, 1, 2, 3};
  constexpr Longs first = {0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS}, second = first + 8 * BITS;
  constexpr int64_t not_sign = INT64_MAX;
  const int64_t words = p.k * BITS / 32, groups = p.k / group;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = p.row_begin + row;
    const uint32_t* next = w + at * words;
    Doubles y0{}, y1{}, mag0{}, mag1{};
    for (int64_t g = 0; g < groups; ++g) {
      const Doubles weights = codes * double(scales[at * groups + g]) + double(biases[at * groups + g]);
      const double* x = p.x + g * group;
      for (int i = 0; i < group; i += 32, next += BITS) {
        for (int half = 0; half < 2; ++half) {
          const Longs word = Longs{} + int64_t(BITS == 1 ? *next >> 16 * half : next[half]);
          Doubles x0, x1;
          std::memcpy(&x0, x + i + 16 * half, sizeof x0);
          std::memcpy(&x1, x + i + 16 * half + 8, sizeof x1);
          const Doubles product0 = __builtin_shuffle(weights, word >> first) * x0;
          const Doubles product1 = __builtin_shuffle(weights, word >> second) * x1;
          y0 += product0;
          y1 += product1;
          mag0 += (Doubles)((Longs)product0 & not_sign);
          mag1 += (Doubles)((Longs)product1 & not_sign);
        }
      }
    }
    Sums sums;
    std::memcpy(sums.y, &y0, sizeof y0);
    std::memcpy(sums.y + 8, &y1, sizeof y1);
    std::memcpy(sums.mag, &mag0, sizeof mag0);
    std::memcpy(sums.mag + 8, &mag1, sizeof mag1);
    p.y[row] = total(sums.y);
    p.mag[row] = total(sums.mag);
  }
}
