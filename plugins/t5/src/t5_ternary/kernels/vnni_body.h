/* y = x @ W.T (+ bias) for 1..16 rows of x by integer dot products: AVX-512 VNNI and VBMI.
 *
 * Layout     W as in product.cpp, read in lines of sixteen words as planes.h describes: 4096 weights are fourteen lines
 *            in groups of 128, sixteen in groups of 64.
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. x enters as fixed point of 24 bits (accel/fixed_point.h). What the digits of one lane add up to,
 *            sum of (digit - 1) * v, is an exact integer below 2^31; it is rounded to float32 and multiplied by its
 *            group's scale into one float32 sum per lane.
 * Rows       Independent of each other: integers are exact, and output (m, r) has one float32 sum of sixteen lanes,
 *            fed with lines in order and summed up in one fixed tree, whatever other rows, outputs or threads there
 *            are.
 * Method     Byte permutations look digits up, by six bits of the eight of a byte v: floor(57 v / 256) tells v / 9 and
 *            thereby the three high digits, 2 v less that the two low ones. One vpdpbusd a plane multiplies and adds 64
 *            digits. With several rows of x digits are unpacked once for all; neighbouring rows of W share every load
 *            of x.
 * Source     Written for this library.
 */
#ifndef T5_VNNI_BODY_H
#define T5_VNNI_BODY_H

#include <math.h>

#include "isa_avx512.h"
#include "planes.h"
#include "qmv_body.h"

namespace t5 {
namespace {

/* Groups whose scales are converted at a time, a multiple of what a block holds. */
constexpr int64_t kGroupBlock = 256;
/* Bytes to fetch ahead: far enough for memory to answer, by the second-level cache, which has room for more requests
 * than the first, and from there in time. */
constexpr int64_t kFar = 16384, kNear = 2048;

/* What digits are looked up by: the high index for the three high ones, the low index for the others. */
constexpr int high_index(int v) { return 57 * v >> 8; }
constexpr int low_index(int v) { return (2 * v - high_index(v)) & 63; }

struct Tables {
  alignas(64) uint8_t of[5][64];
  constexpr Tables() : of() {
    for (int v = 0; v < 243; ++v) {
      for (int i = 0, rest = v; i < 5; ++i, rest /= 3) {
        of[i][i < 2 ? low_index(v) : high_index(v)] = (uint8_t)(rest % 3);
      }
    }
  }
  /* Whether bytes that meet in an index have the same digits there. */
  constexpr bool serve() const {
    for (int v = 0; v < 243; ++v) {
      for (int i = 0, rest = v; i < 5; ++i, rest /= 3) {
        if (of[i][i < 2 ? low_index(v) : high_index(v)] != rest % 3) return false;
      }
    }
    return true;
  }
};
constexpr Tables kTables{};
static_assert(kTables.serve());

/* A line of W before the digits are looked up. */
struct Split {
  __m512i low, high; /* indices, of which permutations take six bits */
  explicit Split(__m512i v) {
    const __m512i even = _mm512_maddubs_epi16(v, _mm512_set1_epi16(57));
    const __m512i odd = _mm512_maddubs_epi16(v, _mm512_set1_epi16(57 << 8));
    const __m512i swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    high = _mm512_mask_shuffle_epi8(odd, 0x5555555555555555ull, even, swap);
    low = _mm512_sub_epi8(_mm512_add_epi8(v, v), high);
  }
  Split() = default;
  template <int I>
  __m512i digit() const {
    return _mm512_permutexvar_epi8(I < 2 ? low : high, _mm512_load_si512(kTables.of[I]));
  }
};

template <int SIZE>
struct Vnni {
  using M = LaneMap<SIZE>;

  struct Job {
    const Problem* p;
    const Line* lines; /* of x: [line][row] */
    const float* unit; /* per row */
    const int32_t* rows; /* which rows of the call these are; they are `count` */
    int count;
    int64_t grain, pieces, lanes; /* units per piece; how many pieces, and threads that take them in turns */
    int64_t far, near;            /* bytes from what is read to what is fetched to the second and first level */
  };

  /* Rows of W at a time. */
  static constexpr int kOutputs = 4;

  static inline __attribute__((always_inline)) __m512 rounded(__m512i high, __m512i mid, __m512i low) {
    const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(high, 8), mid);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), low));
  }

  /* One row of x: a sum per plane, since chains of dot products are slow and there is nothing else to do meanwhile. */
  template <int I>
  static inline __attribute__((always_inline)) void one_digit(const Split (&w)[kOutputs], const Line& x,
                                                              __m512i (&part)[kOutputs][3]) {
    __m512i digit[kOutputs];
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) digit[r] = w[r].template digit<I>();
#pragma GCC unroll 3
    for (int p = 0; p < 3; ++p) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) part[r][p] = _mm512_dpbusd_epi32(part[r][p], digit[r], x.plane[p][I]);
    }
  }
  static inline __attribute__((always_inline)) void one(const Split (&w)[kOutputs], const Line& x,
                                                        const __m512 (&scale)[kOutputs], __m512 (&out)[kOutputs]) {
    __m512i part[kOutputs][3];
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) {
      part[r][0] = part[r][1] = _mm512_setzero_si512();
      part[r][2] = x.start;
    }
    one_digit<0>(w, x, part);
    one_digit<1>(w, x, part);
    one_digit<2>(w, x, part);
    one_digit<3>(w, x, part);
    one_digit<4>(w, x, part);
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) {
      out[r] = _mm512_fmadd_ps(rounded(part[r][0], part[r][1], part[r][2]), scale[r], out[r]);
    }
  }

  /* Several rows: planes pass through one sum that is shifted in between, which saves instructions and registers. The
   * integers are the same. */
  template <int MT>
  static inline __attribute__((always_inline)) void several(const __m512i (&digit)[kOutputs][5], const Line* x,
                                                            const __m512 (&scale)[kOutputs], float (*sums)[16]) {
    __m512i sum[MT][kOutputs];
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) sum[m][r] = _mm512_setzero_si512();
    }
#pragma GCC unroll 3
    for (int p = 0; p < 3; ++p) {
#pragma GCC unroll 5
      for (int i = 0; i < 5; ++i) {
#pragma GCC unroll 4
        for (int m = 0; m < MT; ++m) {
          const __m512i plane = x[m].plane[p][i];
#pragma GCC unroll 4
          for (int r = 0; r < kOutputs; ++r) sum[m][r] = _mm512_dpbusd_epi32(sum[m][r], digit[r][i], plane);
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
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        float* to = sums[m * kUnit + r];
        const __m512 all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[m][r], x[m].start));
        _mm512_store_ps(to, _mm512_fmadd_ps(all, scale[r], _mm512_load_ps(to)));
      }
    }
  }

  /* One line of kOutputs rows of W times all rows of x. */
  template <bool ONE>
  static inline __attribute__((always_inline)) void line(const Split (&split)[kOutputs],
                                                         const __m512 (&scale)[kOutputs], const Line* x, int count,
                                                         __m512 (&acc)[kOutputs], float (*sums)[16]) {
    if constexpr (ONE) {
      one(split, *x, scale, acc);
    } else {
      __m512i digit[kOutputs][5];
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        digit[r][0] = split[r].template digit<0>();
        digit[r][1] = split[r].template digit<1>();
        digit[r][2] = split[r].template digit<2>();
        digit[r][3] = split[r].template digit<3>();
        digit[r][4] = split[r].template digit<4>();
      }
      int m = 0;
      for (; m + 2 <= count; m += 2) several<2>(digit, x + m, scale, sums + m * kUnit);
      if (m < count) several<1>(digit, x + m, scale, sums + m * kUnit);
    }
  }

  /* Groups g0 ... g0 + groups of outputs n0 ... n0 + kOutputs - 1, all rows: sums[m * kUnit + r].
   *   scale  of these groups, `groups` for each output */
  template <bool ONE>
  static void outputs(const Job& job, int64_t n0, int64_t g0, int64_t groups, const float* scale, float (*sums)[16]) {
    const Problem& p = *job.p;
    const M& map = kLanes<SIZE>;
    const int64_t far = job.far, near = job.near;
    const uint8_t* w[kOutputs];
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) w[r] = p.w + least(n0 + r, p.n - 1) * p.w_stride + g0 * M::kBytes;
    __m512 acc[kOutputs];
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) acc[r] = _mm512_load_ps(sums[r]);
    const Line* x = job.lines + M::lines(g0 * SIZE) * job.count;
    int64_t g = 0;
    for (; M::kBlocks && g + M::kBlockGroups <= groups; g += M::kBlockGroups) {
      alignas(64) int32_t shared[kOutputs][16];
      Split split[kOutputs];
      __m512 s[kOutputs];
      for (int j = 0; j < 13; ++j, x += job.count) {
        const __m512i of = _mm512_load_si512(map.group[j]);
#pragma GCC unroll 4
        for (int r = 0; r < kOutputs; ++r) {
          const __m512i packed = _mm512_loadu_si512(w[r] + 64 * j);
          __builtin_prefetch(w[r] + 64 * j + far, 0, 2);
          __builtin_prefetch(w[r] + 64 * j + near);
          _mm512_mask_store_epi32(shared[r], map.shared[j], packed);
          split[r] = Split(packed);
          s[r] = _mm512_permutexvar_ps(of, _mm512_loadu_ps(scale + r * groups + g + map.base[j]));
        }
        line<ONE>(split, s, x, job.count, acc, sums);
      }
      const __m512i of = _mm512_load_si512(map.group[13]);
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        const float* of_block = scale + r * groups + g;
        split[r] = Split(_mm512_load_si512(shared[r]));
        s[r] = _mm512_permutex2var_ps(_mm512_loadu_ps(of_block), of, _mm512_loadu_ps(of_block + 16));
        w[r] += M::kBlockBytes;
      }
      line<ONE>(split, s, x, job.count, acc, sums);
      x += job.count;
    }
    const __m512i word_of = _mm512_load_si512(map.tail_word), group_of = _mm512_load_si512(map.tail_group);
    for (; g < groups; g += M::kTailGroups, x += job.count) {
      const __mmask64 have = ((__mmask64)1 << (least(M::kTailGroups, groups - g) * M::kBytes)) - 1;
      Split split[kOutputs];
      __m512 s[kOutputs];
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) {
        const __m512i packed = w[r] + 64 <= p.w_end ? _mm512_loadu_si512(w[r]) : _mm512_maskz_loadu_epi8(have, w[r]);
        __builtin_prefetch(w[r] + far, 0, 2);
        __builtin_prefetch(w[r] + near);
        w[r] += M::kTailBytes;
        split[r] = Split(_mm512_permutexvar_epi32(word_of, packed));
        s[r] = _mm512_permutexvar_ps(group_of, _mm512_loadu_ps(scale + r * groups + g));
      }
      line<ONE>(split, s, x, job.count, acc, sums);
    }
    if constexpr (ONE) {
#pragma GCC unroll 4
      for (int r = 0; r < kOutputs; ++r) _mm512_store_ps(sums[r], acc[r]);
    }
  }

  /* Scales of `groups` groups of eight rows from n0 on, one row after the other. Rows of scales without gaps are
   * converted as one. */
  static void load_scales(const Problem& p, int64_t n0, int64_t g0, int64_t groups, float* scale) {
    if (groups == p.k / p.group && p.s_stride[1] == 1 && p.s_stride[0] == groups && n0 + kUnit <= p.n) {
      load_floats<Avx512>(p.scales, n0 * groups, 1, p.s_dtype, scale, kUnit * groups);
    } else {
      for (int64_t r = 0; r < kUnit; ++r) { /* what is written beyond the row, the next row overwrites */
        const int64_t row = least(n0 + r, p.n - 1); /* surplus rows repeat the last */
        load_floats<Avx512>(p.scales, row * p.s_stride[0] + g0 * p.s_stride[1], p.s_stride[1], p.s_dtype,
                            scale + r * groups, groups);
      }
    }
    /* A line loads as many scales as it has lanes, and meets what is too much with zeros. */
    _mm512_storeu_ps(scale + kUnit * groups, _mm512_setzero_ps());
  }

  /* Threads that take pieces in turns would each read every other piece of W, and what is fetched ahead at the end of a
   * piece would be for somebody else: so that piece i is part i / lanes of stretch i % lanes, and a thread that takes
   * every lanes-th piece reads on where it was. */
  static void piece(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    (void)end;
    const int64_t i = begin / job.grain, length = job.pieces / job.lanes, longer = job.pieces % job.lanes;
    const int64_t lane = i % job.lanes, first = lane * length + least(lane, longer) + i / job.lanes;
    run(arg, first * job.grain, (first + 1) * job.grain);
  }

  /* Units of eight outputs. */
  static void run(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const Problem& p = *job.p;
    const int64_t stop = least(end * kUnit, p.n), n_groups = p.k / p.group;
    alignas(64) float sums[kSmallRows * kUnit][16], scale[kUnit * kGroupBlock + 16];
    for (int64_t n0 = begin * kUnit; n0 < stop; n0 += kUnit) {
      for (int64_t i = 0; i < job.count * kUnit; ++i) _mm512_store_ps(sums[i], _mm512_setzero_ps());
      for (int64_t g0 = 0; g0 < n_groups; g0 += kGroupBlock) {
        const int64_t groups = least(kGroupBlock, n_groups - g0);
        load_scales(p, n0, g0, groups, scale);
        for (int r = 0; r < kUnit; r += kOutputs) {
          if (job.count == 1) {
            outputs<true>(job, n0 + r, g0, groups, scale + r * groups, sums + r);
          } else {
            outputs<false>(job, n0 + r, g0, groups, scale + r * groups, sums + r);
          }
        }
      }
      for (int64_t r = 0; r < least(kUnit, stop - n0); ++r) {
        const accel_array* bias = p.bias;
        const float b = bias ? accel_load_float(bias->data, (n0 + r) * bias->strides[0], bias->dtype) : 0.0f;
        for (int m = 0; m < job.count; ++m) {
          float y = Avx512::sum(sums[m * kUnit + r]) * job.unit[m];
          if (bias) y += b;
          accel_store_float(p.y, job.rows[m] * p.n + n0 + r, p.y_dtype, y);
        }
      }
    }
  }

  static void small(const Problem& p) {
    const int64_t n_lines = M::lines(p.k);
    const size_t of_x = (size_t)p.k * sizeof(float), of_planes = 15 * (size_t)plane_bytes(p.k);
    char* scratch = (char*)accel_scratch(p.call, (size_t)(p.rows * n_lines) * sizeof(Line) + of_planes + of_x + 64);
    if (!scratch) return;
    Line* lines = (Line*)scratch;
    int8_t* planes = (int8_t*)(lines + p.rows * n_lines);
    float* x = (float*)(planes + of_planes);
    float unit[kSmallRows];
    int32_t rows[kSmallRows];
    const int count = fit_rows(p, x, planes, lines, unit, rows);
    if (!count) return;
    if (count < p.rows) { /* close the gaps */
      const size_t size = (size_t)count * sizeof(Line);
      for (int64_t i = 1; i < n_lines; ++i) memmove(lines + i * count, lines + i * p.rows, size);
    }
    const int64_t units = ceil_div(p.n, kUnit), wanted = count_pieces(p);
    const int64_t grain = ceil_div(units, wanted < 1 ? 1 : wanted);
    /* Whole tiles, so that every line is asked for once. */
    const int64_t tile_bytes = kOutputs * p.w_stride;
    const int64_t far = tile_bytes > 0 ? tile_bytes * ceil_div(kFar, tile_bytes) : 0;
    const int64_t near = tile_bytes > 0 ? tile_bytes * ceil_div(kNear, tile_bytes) : 0;
    Job job = {&p, lines, unit, rows, count, grain, ceil_div(units, grain), p.call->threads, far, near};
    if (job.pieces < 2 || p.call->threads < 2) {
      run(&job, 0, units);
    } else {
      accel_parallel_for(p.call, units, grain, piece, &job);
    }
  }

  /* The rows of a call that fit fixed point, at the front of unit and rows and of each line; the others are left to the
   * float32 kernel, one by one. */
  static int fit_rows(const Problem& p, float* x, int8_t* planes, Line* lines, float* unit, int32_t* rows) {
    const int64_t stride = p.x->strides[p.x->ndim - 1];
    int32_t left[kSmallRows];
    int fit = 0, unfit = 0;
    for (int64_t m = 0; m < p.rows; ++m) {
      load_floats<Avx512>(p.x->data, accel_row_offset(p.x, p.row0 + m), stride, p.x->dtype, x, p.k);
      unit[fit] = accel_fixed::unit_of(x, p.k, p.spread, p.zeros);
      if (unit[fit] == 0) {
        left[unfit++] = (int32_t)(p.row0 + m);
        continue;
      }
      make_planes<SIZE>(x, p.k, unit[fit], planes);
      make_lines<SIZE>(planes, p.k, lines + fit, p.rows);
      rows[fit++] = (int32_t)(p.row0 + m);
    }
    /* Memory of a call is kept until it ends: one piece serves all these rows. */
    float* of_row = unfit ? (float*)accel_scratch(p.call, small_rows_bytes(1, p.k)) : NULL;
    if (unfit && !of_row) return 0;
    for (int i = 0; i < unfit; ++i) {
      Problem alone = p;
      alone.row0 = left[i];
      alone.rows = 1;
      small_rows_in<Avx512>(alone, of_row);
    }
    return fit;
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
