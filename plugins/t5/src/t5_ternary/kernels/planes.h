/* Activations as three planes of signed bytes, in the order in which strips of W want them (strips.h).
 *
 * Layout     [stretch of 64 weights][row][plane][16][4]: four numbers for each row of a stretch's codes. A group of 128
 *            is two stretches. Behind them, [group][row], what sums begin with where codes are digits and weights
 *            digit - 1: -(sum of v over the group).
 * Exactness  see accel/fixed_point.h.
 */
#ifndef T5_PLANES_H
#define T5_PLANES_H

#include <accel/fixed_point.h>
#include <string.h>

#include "qmv_body.h"
#include "strips.h"

namespace t5 {
namespace {

/* Bytes of a stretch of a row. */
constexpr int64_t kStretchBytes = 192;

/* Bytes of the planes of some rows, of one row as floats and of the starts. */
inline size_t planes_bytes(int64_t rows, int64_t k, int64_t group) {
  return (size_t)(rows * (k / 64 * kStretchBytes + k / group * (int64_t)sizeof(int32_t)) + k * (int64_t)sizeof(float));
}

/* The rows of a call that fit fixed point. */
struct Rows {
  int8_t* digits;
  int32_t* starts;
  int count;
  float unit[kSmallRows];
  int32_t row[kSmallRows]; /* of the call */
};

/* Planes and starts of one row; `rows` from stretch to stretch and from group to group. */
template <int SIZE>
void make_planes(const float* x, int64_t k, float unit, int8_t* out, int32_t* starts, int64_t rows) {
  using M = StripMap<SIZE>;
  const __m512 inverse = _mm512_set1_ps(1.0f / unit);
  for (int64_t g = 0; g < k / SIZE; ++g, x += SIZE, starts += rows) {
    alignas(64) int8_t digit[3][SIZE];
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < SIZE; j += 16) {
      const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + j), inverse));
      accel_fixed::split_digits(v, digit[0] + j, digit[1] + j, digit[2] + j);
      sum = _mm512_sub_epi32(sum, v);
    }
    *starts = _mm512_reduce_add_epi32(sum);
    for (int s = 0; s < SIZE / 64; ++s, out += rows * kStretchBytes) {
      const __m512i from = _mm512_load_si512(kStrips<SIZE>.weight[g % M::kGroups] + 64 * s);
      for (int p = 0; p < 3; ++p) {
        const __m512i a = _mm512_load_si512(digit[p]), b = _mm512_load_si512(digit[p] + (SIZE - 64));
        _mm512_storeu_si512(out + 64 * p, _mm512_permutex2var_epi8(a, from, b));
      }
    }
  }
}

/* The rows that fit, one behind the other; the others are left to the float32 kernel, one by one. False if nothing is
 * left to do. */
template <int SIZE>
bool fit_rows(const Problem& p, Rows& fit) {
  const int64_t stretches = p.k / 64, groups = p.k / SIZE, stride = p.x->strides[p.x->ndim - 1];
  fit.digits = (int8_t*)accel_scratch(p.call, planes_bytes(p.rows, p.k, SIZE));
  if (!fit.digits) return false;
  float* x = (float*)(fit.digits + p.rows * stretches * kStretchBytes);
  fit.starts = (int32_t*)(x + p.k);
  fit.count = 0;
  int32_t left[kSmallRows];
  int unfit = 0;
  for (int64_t m = 0; m < p.rows; ++m) {
    load_floats<Avx512>(p.x->data, accel_row_offset(p.x, p.row0 + m), stride, p.x->dtype, x, p.k);
    const float unit = accel_fixed::unit_of(x, p.k, p.spread, p.zeros);
    if (unit == 0) {
      left[unfit++] = (int32_t)(p.row0 + m);
      continue;
    }
    make_planes<SIZE>(x, p.k, unit, fit.digits + fit.count * kStretchBytes, fit.starts + fit.count, p.rows);
    fit.unit[fit.count] = unit;
    fit.row[fit.count++] = (int32_t)(p.row0 + m);
  }
  /* Memory of a call is kept until it ends: one piece serves all these rows. */
  float* of_row = unfit ? (float*)accel_scratch(p.call, small_rows_bytes(1, p.k)) : NULL;
  if (unfit && !of_row) return false;
  for (int i = 0; i < unfit; ++i) {
    Problem alone = p;
    alone.row0 = left[i];
    alone.rows = 1;
    small_rows_in<Avx512>(alone, of_row);
  }
  if (fit.count && fit.count < p.rows) { /* close the gaps */
    for (int64_t s = 1; s < stretches; ++s) {
      memmove(fit.digits + s * fit.count * kStretchBytes, fit.digits + s * p.rows * kStretchBytes,
              (size_t)(fit.count * kStretchBytes));
    }
    for (int64_t g = 1; g < groups; ++g) {
      memmove(fit.starts + g * fit.count, fit.starts + g * p.rows, (size_t)fit.count * sizeof(int32_t));
    }
  }
  return fit.count > 0;
}

}  // namespace
}  // namespace t5
#endif
