/* y = x @ W.T (+ bias) for 1..16 rows of x by integer dot products: 1, 2, 4 and 8 bits, AVX-512 VNNI.
 *
 * Layout     W as in qmv_body.h: code j of a row at bits [j * bits, (j + 1) * bits), LSB first. A line is 64 bytes of a
 *            row of W, 512 / bits codes, sixteen words in the lanes of a register; a group of 32, 64 or 128 codes is a
 *            number of whole words (1 ... 32).
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. x enters as fixed point of 24 bits (planes.h). What the codes of one word add up to,
 *            sum of (code - center) * v, is an exact integer below 2^31 (for 8 bits two such, of the high and the low
 *            digits), is rounded to float32 and multiplied by its group's scale into one float32 sum per lane; to these
 *            comes (bias + center * scale) * sum(v) over the groups. With the center in the middle of the codes both
 *            parts are as small as the weights are, so that nothing cancels that the weights do not cancel.
 * Rows       Independent of each other: integers are exact, and output (m, r) has one float32 sum of sixteen lanes,
 *            fed with lines in order and summed up in one fixed tree, whatever other rows, outputs or threads there
 *            are.
 * Method     One shift and one mask turn a register of packed codes into 64 bytes, and one vpdpbusd a plane multiplies
 *            and adds 64 codes; nothing is permuted but the scales. Three dot products replace four conversions and
 *            four multiply-adds of float32, so that decode waits for memory and not for unpacking. With several rows of
 *            x, codes are unpacked once for all; neighbouring rows of W share every load of x.
 * Symmetric  If bias = -ratio * scale holds exactly for the whole layer, biases are not read.
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_VNNI_BODY_H
#define BONSAI_QMV_VNNI_BODY_H

#include <math.h>

#include "planes.h"

namespace bonsai {
namespace {

/* Groups whose scales are converted at a time, a multiple of what a line can hold. */
constexpr int kGroupBlock = 256;

/* Bytes to fetch ahead: far enough for memory to answer, by the second-level cache, which has room for more requests
 * than the first, and from there in time. */
constexpr int64_t kFar = 16384, kNear = 2048;

template <int BITS>
struct Vnni {
  using L = Line<BITS>;
  static constexpr int kSteps = L::kSteps;
  /* Rows of W at a time: as many as the registers hold with all their codes unpacked. */
  static constexpr int kOutputs = BITS == 1 ? 2 : 4;
  /* Rows of x at a time, if there are several. */
  static constexpr int kTile = BITS == 1 ? 4 : 2;

  struct Job {
    const Problem* p;
    const L* lines; /* of x: [line][row] */
    const float* totals; /* [row][group], rows `total_stride` apart */
    int64_t total_stride;
    const float* unit; /* per row */
    const int32_t* rows; /* which rows of the call these are; they are `count` */
    int count;
    int64_t grain, pieces, lanes; /* units per piece; how many pieces, and threads that take them in turns */
    int64_t far, near;            /* bytes from what is read to what is fetched to the second and first level */
    int shift;                    /* bytes of a group, as a power of two */
  };

  /* out[m][r] += codes of line r times line m of x, as integers, rounded once, times the scales.
   * One row of x: a sum per plane, since chains of dot products are slow and there is nothing else to do meanwhile.
   * Several: planes pass through one sum that is shifted in between, which saves instructions and registers. The
   * integers are the same. */
  template <int MT>
  static inline __attribute__((always_inline)) void line(const __m512i (&codes)[kOutputs][kSteps], const L* x,
                                                         const __m512 (&scale)[kOutputs], __m512 (&out)[MT][kOutputs]) {
    __m512i sum[MT][kOutputs];
    if constexpr (BITS == 8) {
      __m512i low[MT][kOutputs];
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
        for (int r = 0; r < kOutputs; ++r) {
          sum[m][r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[r][0], x[m].plane[0][0]);
          low[m][r] = _mm512_dpbusd_epi32(x[m].start[1], codes[r][0], x[m].plane[2][0]);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
        for (int r = 0; r < kOutputs; ++r) {
          sum[m][r] = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum[m][r], 8), codes[r][0], x[m].plane[1][0]);
          const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[m][r], x[m].start[0]));
          const __m512 all = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low[m][r]));
          out[m][r] = _mm512_fmadd_ps(all, scale[r], out[m][r]);
        }
      }
      return;
    } else if constexpr (MT == 1) {
      __m512i part[kOutputs][3];
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        part[r][0] = part[r][1] = _mm512_setzero_si512();
        part[r][2] = start(*x);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 3
        for (int p = 0; p < 3; ++p) {
          const __m512i digits = x->plane[p][i];
#pragma GCC unroll 4
          for (int r = 0; r < kOutputs; ++r) part[r][p] = _mm512_dpbusd_epi32(part[r][p], codes[r][i], digits);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(part[r][0], 8), part[r][1]);
        sum[0][r] = _mm512_add_epi32(_mm512_slli_epi32(high, 8), part[r][2]);
      }
    } else {
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
        for (int r = 0; r < kOutputs; ++r) sum[m][r] = _mm512_setzero_si512();
      }
#pragma GCC unroll 3
      for (int p = 0; p < 3; ++p) {
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 4
          for (int m = 0; m < MT; ++m) {
            const __m512i digits = x[m].plane[p][i];
#pragma GCC unroll 4
            for (int r = 0; r < kOutputs; ++r) sum[m][r] = _mm512_dpbusd_epi32(sum[m][r], codes[r][i], digits);
          }
        }
        if (p < 2) {
#pragma GCC unroll 4
          for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
            for (int r = 0; r < kOutputs; ++r) sum[m][r] = _mm512_slli_epi32(sum[m][r], 8);
          }
        }
      }
      if constexpr (BITS != 1) {
#pragma GCC unroll 4
        for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
          for (int r = 0; r < kOutputs; ++r) sum[m][r] = _mm512_add_epi32(sum[m][r], start(x[m]));
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        out[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][r]), scale[r], out[m][r]);
      }
    }
  }
  static __m512i start(const L& x) {
    if constexpr (BITS == 1) return _mm512_setzero_si512();
    else return x.start[0];
  }

  /* Lane l of a line belongs to group l * groups_per_line / 16 of it. */
  static __m512i lane_groups(int group) {
    const int words = group * BITS / 32; /* per group */
    return _mm512_srl_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                            _mm_cvtsi32_si128(__builtin_ctz((unsigned)words)));
  }

  /* Scales of `groups` groups of eight rows from n0 on, one row after the other, and what the biases come to: sums[m *
   * kUnit + r] += (bias + center * scale) * total over the groups. Rows of scales without gaps are converted as one. */
  static inline void prepare(const Job& job, int64_t n0, int64_t g0, int64_t groups, float* scale, float (*sums)[16]) {
    const Problem& p = *job.p;
    const bool biased = !p.symmetric, has_offset = biased || (float)kCenter<BITS> != p.ratio;
    const bool whole = groups == p.k / p.group && p.s_stride[1] == 1 && p.s_stride[0] == groups && n0 + kUnit <= p.n &&
                       (!biased || (p.b_stride[1] == 1 && p.b_stride[0] == groups));
    const __m512 center = _mm512_set1_ps((float)kCenter<BITS> - p.ratio);
    alignas(64) float offset[kUnit * kGroupBlock + 16];
    const int64_t pieces = whole ? 1 : kUnit, length = whole ? kUnit * groups : groups;
    for (int64_t r = 0; r < pieces; ++r) {
      const int64_t row = min64(n0 + r, p.n - 1); /* surplus rows repeat the last */
      const int64_t s_at = row * p.s_stride[0] + g0 * p.s_stride[1], b_at = row * p.b_stride[0] + g0 * p.b_stride[1];
      for (int64_t g = 0; g < length; g += 16) { /* what is written beyond the row, the next row overwrites */
        const __m512 s = some_floats(p.scales, p.s_dtype, s_at + g * p.s_stride[1], p.s_stride[1], length - g);
        _mm512_storeu_ps(scale + r * groups + g, s);
        if (!has_offset) continue;
        const __m512 b = biased ? some_floats(p.biases, p.b_dtype, b_at + g * p.b_stride[1], p.b_stride[1], length - g)
                                : _mm512_setzero_ps();
        _mm512_storeu_ps(offset + r * groups + g, _mm512_fmadd_ps(center, s, b));
      }
    }
    /* A line loads as many scales as it has lanes, and meets what is too much with zeros. */
    _mm512_storeu_ps(scale + kUnit * groups, _mm512_setzero_ps());
    if (!has_offset) return;
    _mm512_storeu_ps(offset + kUnit * groups, _mm512_setzero_ps());
    for (int m = 0; m < job.count; ++m) {
      const float* totals = job.totals + m * job.total_stride + g0; /* zeros beyond the last group */
#pragma GCC unroll 8
      for (int r = 0; r < kUnit; ++r) {
        __m512 sum = _mm512_load_ps(sums[m * kUnit + r]);
        for (int64_t g = 0; g < groups; g += 16) {
          sum = _mm512_fmadd_ps(_mm512_loadu_ps(offset + r * groups + g), _mm512_loadu_ps(totals + g), sum);
        }
        _mm512_store_ps(sums[m * kUnit + r], sum);
      }
    }
  }

  /* Lines of groups g0 ... g0 + groups of outputs n0 ... n0 + kOutputs - 1, all rows: sums[m * kUnit + r]. */
  template <bool ONE>
  static void outputs(const Job& job, int64_t n0, int64_t g0, int64_t groups, const float* scale, float (*sums)[16]) {
    const Problem& p = *job.p;
    const int shift = job.shift;
    const int64_t begin = g0 << shift, end = (g0 + groups) << shift, far = job.far, near = job.near;
    const uint8_t* w[kOutputs];
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) w[r] = p.w + min64(n0 + r, p.n - 1) * p.w_stride;
    __m512 one[1][kOutputs];
    if constexpr (ONE) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) one[0][r] = _mm512_load_ps(sums[r]);
    }
    const __m512i of_lane = lane_groups(p.group), mask = _mm512_set1_epi8((char)((1u << BITS) - 1));
    const L* x = job.lines + begin / 64 * job.count;
    auto step = [&](int64_t byte, __mmask16 have, bool full) __attribute__((always_inline)) {
      __m512i codes[kOutputs][kSteps];
      __m512 s[kOutputs];
      const float* of_line = scale + ((byte - begin) >> shift);
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        const __m512i packed =
            full ? _mm512_loadu_si512(w[r] + byte) : _mm512_maskz_loadu_epi32(have, w[r] + byte);
        __builtin_prefetch(w[r] + byte + far, 0, 2);
        __builtin_prefetch(w[r] + byte + near);
        s[r] = _mm512_permutexvar_ps(of_lane, _mm512_loadu_ps(of_line + r * groups));
        if constexpr (BITS == 8) {
          codes[r][0] = packed;
        } else {
#pragma GCC unroll 8
          for (int i = 0; i < kSteps; ++i) {
            codes[r][i] = _mm512_and_si512(i ? _mm512_srli_epi32(packed, (unsigned)(i * BITS)) : packed, mask);
          }
        }
      }
      if constexpr (ONE) {
        line<1>(codes, x, s, one);
      } else {
        int m = 0;
        for (; m + kTile <= job.count; m += kTile) line_in_memory<kTile>(codes, x + m, s, sums + m * kUnit);
        if constexpr (kTile == 4) {
          if (m + 2 <= job.count) {
            line_in_memory<2>(codes, x + m, s, sums + m * kUnit);
            m += 2;
          }
        }
        if (m < job.count) line_in_memory<1>(codes, x + m, s, sums + m * kUnit);
      }
      x += ONE ? 1 : job.count;
    };
    int64_t byte = begin;
    for (; byte + 64 <= end; byte += 64) step(byte, 0xffff, true);
    if (byte < end) step(byte, (__mmask16)((1u << ((end - byte) / 4)) - 1), false);
    if constexpr (ONE) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) _mm512_store_ps(sums[r], one[0][r]);
    }
  }

  template <int MT>
  static inline __attribute__((always_inline)) void line_in_memory(const __m512i (&codes)[kOutputs][kSteps],
                                                                   const L* x, const __m512 (&scale)[kOutputs],
                                                                   float (*sums)[16]) {
    __m512 out[MT][kOutputs];
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) out[m][r] = _mm512_load_ps(sums[m * kUnit + r]);
    }
    line<MT>(codes, x, scale, out);
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) _mm512_store_ps(sums[m * kUnit + r], out[m][r]);
    }
  }

  /* Threads that take pieces in turns would each read every other piece of W, and what is fetched ahead at the end of
   * a piece would be for somebody else: so that piece i is part i / lanes of stretch i % lanes, and a thread that takes
   * every lanes-th piece reads on where it was. */
  static void piece(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    (void)end;
    const int64_t i = begin / job.grain, length = job.pieces / job.lanes, longer = job.pieces % job.lanes;
    const int64_t lane = i % job.lanes, first = lane * length + min64(lane, longer) + i / job.lanes;
    run(arg, first * job.grain, (first + 1) * job.grain);
  }

  /* Units of eight outputs. */
  static void run(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const Problem& p = *job.p;
    const int64_t stop = min64(end * kUnit, p.n), n_groups = p.k / p.group;
    alignas(64) float sums[kSmallRows * kUnit][16], scale[kUnit * kGroupBlock + 16];
    for (int64_t n0 = begin * kUnit; n0 < stop; n0 += kUnit) {
      for (int i = 0; i < job.count * kUnit; ++i) _mm512_store_ps(sums[i], _mm512_setzero_ps());
      for (int64_t g0 = 0; g0 < n_groups; g0 += kGroupBlock) {
        const int64_t groups = min64(kGroupBlock, n_groups - g0);
        prepare(job, n0, g0, groups, scale, sums);
        for (int r = 0; r < kUnit; r += kOutputs) {
          if (job.count == 1) {
            outputs<true>(job, n0 + r, g0, groups, scale + r * groups, sums + r);
          } else {
            outputs<false>(job, n0 + r, g0, groups, scale + r * groups, sums + r);
          }
        }
      }
      const int64_t n = min64(kUnit, stop - n0);
      const __mmask8 have = (__mmask8)((1u << n) - 1);
      __m256 bias = _mm256_setzero_ps();
      if (p.bias) {
        alignas(32) float b[8] = {0};
        for (int64_t r = 0; r < n; ++r) {
          b[r] = accel_load_float(p.bias->data, (n0 + r) * p.bias->strides[0], p.bias->dtype);
        }
        bias = _mm256_load_ps(b);
      }
      for (int m = 0; m < job.count; ++m) {
        alignas(32) float y[8];
        Avx512::sum8(sums + m * kUnit, y);
        __m256 v = _mm256_mul_ps(_mm256_load_ps(y), _mm256_set1_ps(job.unit[m]));
        if (p.bias) v = _mm256_add_ps(v, bias);
        const int64_t at = job.rows[m] * p.n + n0;
        if (p.y_dtype == ACCEL_FLOAT32) {
          _mm256_mask_storeu_ps((float*)p.y + at, have, v);
        } else if (p.y_dtype == ACCEL_FLOAT16) {
          _mm_mask_storeu_epi16((uint16_t*)p.y + at, have, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
        } else {
          _mm256_store_ps(y, v);
          for (int64_t r = 0; r < n; ++r) ((uint16_t*)p.y)[at + r] = accel_bfloat_from_float(y[r]);
        }
      }
    }
  }

  static void small(const Problem& p) {
    if (!(p.spread < INFINITY)) {
      small_rows<Avx512>(p);
      return;
    }
    const int64_t n_lines = ceil_div(p.k, L::kWeights), padded = n_lines * L::kWeights;
    const int64_t total_stride = ceil_div(p.k / p.group, 16) * 16 + 16;
    char* scratch = (char*)accel_scratch(
        p.call, (size_t)(p.rows * n_lines) * sizeof(L) + (size_t)(padded + p.rows * total_stride) * sizeof(float));
    if (!scratch) return;
    L* lines = (L*)scratch;
    float *x = (float*)(lines + p.rows * n_lines), *totals = x + padded;
    memset(x + p.k, 0, (size_t)(padded - p.k) * sizeof(float));
    float unit[kSmallRows];
    int32_t rows[kSmallRows];
    const int fit = fit_rows(p, x, unit, rows, [&](int at) {
      float* t = totals + at * total_stride;
      for (int64_t g = p.k / p.group; g < total_stride; ++g) t[g] = 0;
      make_planes<BITS>(x, p.k, p.group, unit[at], lines + at, p.rows, t);
    });
    if (!fit) return;
    if (fit < p.rows) { /* close the gaps */
      for (int64_t i = 1; i < n_lines; ++i) memmove(lines + i * fit, lines + i * p.rows, (size_t)fit * sizeof(L));
    }
    const int64_t units = ceil_div(p.n, kUnit), grain = ceil_div(units, count_pieces(p) < 1 ? 1 : count_pieces(p));
    /* Whole tiles, so that every line is asked for once. */
    const int64_t tile_bytes = kOutputs * p.w_stride;
    const int64_t far = tile_bytes > 0 ? tile_bytes * ceil_div(kFar, tile_bytes) : 0;
    const int64_t near = tile_bytes > 0 ? tile_bytes * ceil_div(kNear, tile_bytes) : 0;
    const int shift = __builtin_ctz((unsigned)(p.group * BITS / 8));
    Job job = {&p,  lines, totals, total_stride,           unit,             rows,  fit,
               grain, ceil_div(units, grain), p.call->threads, far, near, shift};
    if (job.pieces < 2 || p.call->threads < 2) {
      run(&job, 0, units);
    } else {
      accel_parallel_for(p.call, units, grain, piece, &job);
    }
  }
};

inline void vnni_small_rows(const Problem& p) {
  switch (p.bits) {
    case 1: Vnni<1>::small(p); break;
    case 2: Vnni<2>::small(p); break;
    case 4: Vnni<4>::small(p); break;
    case 8: Vnni<8>::small(p); break;
    default: small_rows<Avx512>(p);
  }
}

}  // namespace
}  // namespace bonsai
#endif
