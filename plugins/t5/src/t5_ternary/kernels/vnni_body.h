/* y = x @ W.T (+ bias) for 1..16 rows of x by integer dot products: AVX-512 VNNI and VBMI.
 *
 * Layout     W as in product.cpp, read in strips (strips.h).
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding, in the order of few_rows.h.
 * Method     Sixteen rows of W are the lanes; a word of x, four numbers, meets all of them. One vpdpbusd a plane
 *            multiplies and adds 64 digits, and what is left in the lanes when a group ends are its sums: nothing is
 *            added across lanes. With several rows of x digits are unpacked once for all.
 * Source     Written for this library.
 */
#ifndef T5_VNNI_BODY_H
#define T5_VNNI_BODY_H

#include "few_rows.h"

namespace t5 {
namespace {

template <int SIZE>
struct Vnni {
  using M = StripMap<SIZE>;
  static constexpr int kRows = SIZE / 4; /* of codes of a group */

  static inline __attribute__((always_inline)) __m512i four(const int8_t* x) {
    int32_t v;
    memcpy(&v, x, 4);
    return _mm512_set1_epi32(v);
  }

  /* One row of x: digits are multiplied as they are looked up. */
  static void one(void* arg, int64_t begin, int64_t end) {
    const FewJob& job = *(const FewJob*)arg;
    const Problem& p = *job.p;
    const int64_t n_groups = p.k / SIZE;
    alignas(64) float scale[kLaneGroups][16], acc[4][16];
    Walk<SIZE> walk(job, begin, end);
    for (int64_t unit = begin; unit < end; ++unit) {
      for (int i = 0; i < 4; ++i) _mm512_store_ps(acc[i], _mm512_setzero_ps());
      const int8_t* x = job.x->digits;
      for (int64_t g0 = 0; g0 < n_groups; g0 += M::kGroups) {
        if (g0 % kLaneGroups == 0) {
          scales_to_lanes(p, unit * kOutputs, g0, least(kLaneGroups, n_groups - g0), scale);
        }
        Strip<SIZE> strip;
        walk.next(strip);
        __m512i rest[M::kGroups][SIZE / 64];
        strip.template rest<0>([&](int q, int j, __m512i codes) __attribute__((always_inline)) {
          rest[q][j - 5 * M::kWords] = codes;
        });
#pragma GCC unroll 4
        for (int q = 0; q < M::kGroups; ++q, x += SIZE * 3) {
          if (g0 + q >= n_groups) break;
          __m512i sum[2][3]; /* by turns: chains of dot products are slow */
          sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = sum[1][2] = _mm512_setzero_si512();
          sum[0][2] = _mm512_set1_epi32(job.x->starts[g0 + q]);
          auto add = [&](int, int j, __m512i codes) __attribute__((always_inline)) {
#pragma GCC unroll 3
            for (int i = 0; i < 3; ++i) {
              __m512i& to = sum[j % 2][i];
              to = _mm512_dpbusd_epi32(to, codes, four(x + j / 16 * kStretchBytes + i * 64 + j % 16 * 4));
            }
          };
#pragma GCC unroll 6
          for (int f = 0; f < M::kWords; ++f) strip.template whole<0>(q, f, add);
#pragma GCC unroll 2
          for (int j = 0; j < SIZE / 64; ++j) add(q, 5 * M::kWords + j, rest[q][j]);
          const int at = (int)(g0 + q) % 4;
          _mm512_store_ps(acc[at], collected(_mm512_add_epi32(sum[0][0], sum[1][0]), _mm512_add_epi32(sum[0][1], sum[1][1]),
                                             _mm512_add_epi32(sum[0][2], sum[1][2]),
                                             _mm512_load_ps(scale[(g0 + q) % kLaneGroups]), _mm512_load_ps(acc[at])));
        }
      }
      finish(job, unit * kOutputs, acc);
    }
  }

  /* acc of MT rows of x += what a group gives them. */
  template <int MT>
  static inline __attribute__((always_inline)) void group(const uint8_t* codes, const int8_t* x, int64_t stretch,
                                                          const int32_t* starts, __m512 scale, float (*acc)[16]) {
    __m512i sum[MT][3];
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
      sum[m][0] = sum[m][1] = _mm512_setzero_si512();
      sum[m][2] = _mm512_set1_epi32(starts[m]);
    }
    for (int s = 0; s < SIZE / 64; ++s, x += stretch, codes += 1024) {
#pragma GCC unroll 4
      for (int j = 0; j < 16; ++j) {
        const __m512i row = _mm512_load_si512(codes + j * 64);
#pragma GCC unroll 4
        for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 3
          for (int i = 0; i < 3; ++i) {
            sum[m][i] = _mm512_dpbusd_epi32(sum[m][i], row, four(x + m * kStretchBytes + i * 64 + j * 4));
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
      _mm512_store_ps(acc[m], collected(sum[m][0], sum[m][1], sum[m][2], scale, _mm512_load_ps(acc[m])));
    }
  }

  static void several(void* arg, int64_t begin, int64_t end) {
    const FewJob& job = *(const FewJob*)arg;
    const Problem& p = *job.p;
    const int64_t n_groups = p.k / SIZE, stretch = job.x->count * kStretchBytes;
    const int count = job.x->count;
    alignas(64) float scale[kLaneGroups][16], acc[4 * kSmallRows][16];
    alignas(64) uint8_t codes[M::kGroups][kRows][64];
    Walk<SIZE> walk(job, begin, end);
    for (int64_t unit = begin; unit < end; ++unit) {
      for (int i = 0; i < 4 * count; ++i) _mm512_store_ps(acc[i], _mm512_setzero_ps());
      const int8_t* x = job.x->digits;
      for (int64_t g0 = 0; g0 < n_groups; g0 += M::kGroups) {
        if (g0 % kLaneGroups == 0) {
          scales_to_lanes(p, unit * kOutputs, g0, least(kLaneGroups, n_groups - g0), scale);
        }
        Strip<SIZE> strip;
        walk.next(strip);
        auto put = [&](int q, int j, __m512i row) __attribute__((always_inline)) {
          _mm512_store_si512(codes[q][j], row);
        };
#pragma GCC unroll 12
        for (int f = 0; f < 12; ++f) strip.template whole<0>(f / M::kWords, f % M::kWords, put);
        strip.template rest<0>(put);
        for (int64_t g = g0; g < least(g0 + M::kGroups, n_groups); ++g, x += SIZE / 64 * stretch) {
          const uint8_t* row = codes[g - g0][0];
          const __m512 s = _mm512_load_ps(scale[g % kLaneGroups]);
          const int32_t* starts = job.x->starts + g * count;
          float(*to)[16] = acc + g % 4 * count;
          int m = 0;
          for (; m + 4 <= count; m += 4) group<4>(row, x + m * kStretchBytes, stretch, starts + m, s, to + m);
          switch (count - m) {
            case 3: group<3>(row, x + m * kStretchBytes, stretch, starts + m, s, to + m); break;
            case 2: group<2>(row, x + m * kStretchBytes, stretch, starts + m, s, to + m); break;
            case 1: group<1>(row, x + m * kStretchBytes, stretch, starts + m, s, to + m); break;
            default: break;
          }
        }
      }
      finish(job, unit * kOutputs, acc);
    }
  }

  static void small(const Problem& p) {
    Rows x;
    if (fit_rows<SIZE>(p, x)) run_few(p, x, x.count == 1 ? one : several, NULL);
  }
};

inline void vnni_small_rows(const Problem& p) {
  if (!(p.spread < INFINITY)) {
    small_rows<Avx512>(p);
  } else if (p.group == 64) {
    Vnni<64>::small(p);
  } else {
    Vnni<128>::small(p);
  }
}

}  // namespace
}  // namespace t5
#endif
