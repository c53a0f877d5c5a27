// Products of many rows with affine weights: tiles of weights are unpacked into threadgroup memory and multiplied by
// matrix instructions. Weights are never written to device memory.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / GS] * code[n, k] + biases[n, k / GS])  (+ bias[n])
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K * BITS / 32) uint; scales, biases (N, K / GS) of S; bias (N) of
//            B: as in affine_qmv.metal, biases unread if SYMMETRIC, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   BITS 1, 2 or 4; GS 32, 64 or 128; WARPS_M of SIMD_GROUPS share columns. FOLDED: S is T, BITS is 1 or
//            2, and twice each scale is finite. RESIDENT threadgroups shall fit a multiprocessor
// Edges      any N; any M; K is a multiple of GS
// Bytes      weights are read once for each 64 * WARPS_M rows, x once for each 32 * SIMD_GROUPS / WARPS_M columns
// Numbers    exactness `rounding`: codes are exact in T, products exact, sums in float32. If FOLDED, codes times
//            their scales are, too, exact in T: -1, 0, 1 or 2 for two bits, twice that is -1 or 1 for one; what is
//            left, bias + scale or bias + scale / 2 times the sum of x over the group, is added in float32 where it is
//            not zero. Row-invariant for all M, but sums are not made in the order of affine_mma
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes; threadgroup (i, j) makes rows [i, i + 1) * 64 * WARPS_M of columns
//            [j, j + 1) * 32 * SIMD_GROUPS / WARPS_M; each SIMD group 64 rows of 32 columns
// Threadgroup memory   twice, for each row and column of a tile: 64 of T; and floats, at most 2 a row and 4 a column
//
// Values of x and codes lie in threadgroup memory in the order in which codes are unpacked: word j of those that belong
// to one word of w has code j of its lower and of its upper half.

#include "tiles_mma.h"

// What depends on T: bits of codes that a mantissa has room for, the power of two above them, and a pair of them.
template <typename T>
struct Exact {
  static constant constexpr int MANTISSA = 10, ABOVE = 1024, BITS_OF_ABOVE = 0x6400, ONE = 0x3c00;
  static METAL_FUNC uint fma_pair(uint v, float k, float c) {
    return f16_pair_fma(v, k, c);
  }
  static METAL_FUNC uint mul_pair(uint v, uint k) {
    return f16_pair_mul(v, k);
  }
};
template <>
struct Exact<bfloat> {
  static constant constexpr int MANTISSA = 7, ABOVE = 128, BITS_OF_ABOVE = 0x4300, ONE = 0x3f80;
  static METAL_FUNC uint fma_pair(uint v, float k, float c) {
    return bf16_pair_fma(v, k, c);
  }
  static METAL_FUNC uint mul_pair(uint v, uint k) {
    return bf16_pair_mul(v, k);
  }
};

// Code j of both halves of `w` as a pair of T; if FOLDED less 1, or twice what is 1/2 less for one bit, times the
// scale.
template <typename T, int BITS, int SYMMETRIC, bool FOLDED>
METAL_FUNC uint weight_of(uint w, int j, uint scale) {
  typedef Exact<T> E;
  if (FOLDED && BITS == 1 && SYMMETRIC != 2) {
    // -1 and 1 differ by the sign.
    const uint sign = mask_or((j == 15 ? w : w << (15 - j)), 0x80008000u, uint(E::ONE) * 0x00010001u);
    return E::mul_pair(sign ^ 0x80008000u, scale);
  }
  constexpr int FITS = E::MANTISSA / BITS, STEP = FITS >= 4 ? 4 : FITS >= 2 ? 2 : 1;
  const int shift = j % STEP * BITS;
  const float unit = 1.0f / float(1 << shift);
  const uint mask = (((1u << BITS) - 1u) << shift) * 0x00010001u;
  const uint v = mask_or(w >> (j / STEP * STEP * BITS), mask, uint(E::BITS_OF_ABOVE) * 0x00010001u);
  const float middle = FOLDED ? 1.0f : 0.0f;
  const uint code = E::fma_pair(v, unit, -float(E::ABOVE) * unit - middle);
  return FOLDED ? E::mul_pair(code, scale) : code;
}

// What is on its way from device memory for the next step.
template <int HALF, int X_TASKS, int W_TASKS, int FACTORS>
struct Ahead {
  uint x[X_TASKS][2][HALF];
  uint w[W_TASKS], fold[W_TASKS];
  float scale[FACTORS], offset[FACTORS];
};

// Sums of x over groups, or parts of a step, by matrix instructions with ones. The SIMD groups that share rows, ACROSS
// of them, share these as well: `which` has blocks which, which + ACROSS ... of 16 of the 64 rows, the first of them at
// `to`. Adds 32 values of k, `chunk` and the three next; the first ones of a sum if `first`.
template <typename T, int ACROSS>
METAL_FUNC void add_totals(thread float (*to)[4], threadgroup const uint4* xt, int row0, int which, int chunk,
                           bool first, ushort lane) {
  const uint one = uint(Exact<T>::ONE) * 0x00010001u;
  const int r = lane / 4, at = chunk + lane % 4;
#pragma unroll
  for (int j = 0; j < (4 + ACROSS - 1) / ACROSS; j++) {
    const int pair = row0 / 2 + (which + j * ACROSS) * 8 + r;
    if (which + j * ACROSS < 4) {
      const uint4 a = xt[pair_slot(pair, 0, at)], b = xt[pair_slot(pair, 1, at)];
      if (first) {
        mma_16x8x16_first<T>(to[j], a.x, a.y, a.z, a.w, one, one, lane);
      } else {
        mma_16x8x16<T>(to[j], a.x, a.y, a.z, a.w, one, one, lane);
      }
      mma_16x8x16<T>(to[j], b.x, b.y, b.z, b.w, one, one, lane);
    }
  }
}
template <int ACROSS, int PARTS>
METAL_FUNC void store_totals(threadgroup float* totals, thread const float (*from)[4], int row0, int which, int part,
                             ushort lane) {
#pragma unroll
  for (int j = 0; j < (4 + ACROSS - 1) / ACROSS; j++) {
    const int row = row0 + (which + j * ACROSS) * 16 + lane / 4;
    if (which + j * ACROSS < 4 && lane % 4 == 0) {
      totals[row * PARTS + part] = from[j][0];
      totals[(row + 8) * PARTS + part] = from[j][2];
    }
  }
}

// Adds what is left of a step, or of the group that ended with it, to the sums of 64 rows and 32 columns.
template <int PARTS>
METAL_FUNC void add_left(thread float (*sums)[4][4], threadgroup const float* totals, threadgroup const float* offsets,
                         int row0, int column0, ushort lane) {
  const int r = lane / 4, q = lane % 4;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float f0 = offsets[(column0 + j * 8 + 2 * q) * PARTS + part];
      const float f1 = offsets[(column0 + j * 8 + 2 * q + 1) * PARTS + part];
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float t = totals[(row0 + i * 16 + h * 8 + r) * PARTS + part];
          sums[i][j][h * 2] = fma(f0, t, sums[i][j][h * 2]);
          sums[i][j][h * 2 + 1] = fma(f1, t, sums[i][j][h * 2 + 1]);
        }
      }
    }
  }
}

template <typename T, typename S, typename O, int BITS, int GS, int SYMMETRIC, bool HAS_BIAS, bool FOLDED, int WARPS_M,
          int SIMD_GROUPS, bool VECTORS, typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void affine_qmm(XP x, WP w, SP scales, SP biases, BP bias, device O* y, threadgroup uint4* xs,
                           threadgroup uint4* ws, threadgroup float* totals, threadgroup float* factors,
                           threadgroup float* offsets, int m_end, int n_end, int k_end, int m_begin, int n_begin,
                           ushort simd_group, ushort lane) {
  constexpr int LANES = 32 * SIMD_GROUPS, ROWS = 64 * WARPS_M, COLUMNS = 32 * (SIMD_GROUPS / WARPS_M);
  // A word of w has codes of SPAN values of k; WORDS of them are a step.
  constexpr int HALF = 16 / BITS, SPAN = 2 * HALF, WORDS = DEEP / SPAN, VECTORS_OF_WORD = HALF / 4;
  constexpr int X_TASKS = (ROWS / 2 * WORDS + LANES - 1) / LANES, W_TASKS = COLUMNS * WORDS / LANES;
  // Groups in a step, or parts of one.
  constexpr int PARTS = GS < DEEP ? DEEP / GS : 1, PART = DEEP / PARTS;
  // Steps of a group: what is left meets the sum of x over all of them, in the step behind the last one.
  constexpr int TURNS = GS > DEEP ? GS / DEEP : 1, ACROSS = SIMD_GROUPS / WARPS_M;
  constexpr int FACTORS = (COLUMNS * PARTS + LANES - 1) / LANES;
  // Whether something is left beside weights that are FOLDED, or weights are not. For one bit sums are twice what they
  // should be.
  constexpr bool LEFT = !(FOLDED && (SYMMETRIC == 2 || (BITS == 1 && SYMMETRIC == 1)));
  constexpr bool TWICE = FOLDED && BITS == 1 && SYMMETRIC != 2;
  static_assert(COLUMNS * WORDS % LANES == 0, "shares are not equal");
  const int thread_index = simd_group * 32 + lane, q = lane % 4;
  const int groups = k_end / GS, steps = (k_end + DEEP - 1) / DEEP;
  const int row0 = simd_group % WARPS_M * 64, column0 = simd_group / WARPS_M * 32;
  float sums[4][4][4], own[(4 + ACROSS - 1) / ACROSS][4];
  mma_clear(sums);
  Ahead<HALF, X_TASKS, W_TASKS, FACTORS> ahead;
#pragma unroll 1
  for (int step = -1; step < steps; step++) {
    const int next = (step + 1) * DEEP, here = step % 2, there = (step + 1) % 2;
    const bool begins = TURNS == 1 || step % TURNS == 0, ends = TURNS == 1 || step % TURNS == TURNS - 1;
    if (step + 1 < steps) {
#pragma unroll
      for (int i = 0; i < X_TASKS; i++) {
        const int task = i * LANES + thread_index, first = m_begin + row_of(task / WORDS);
        const int k = next + task % WORDS * SPAN;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (k < k_end && task < ROWS / 2 * WORDS) {
            load_words<HALF, VECTORS>(ahead.x[i][h], x + (long(min(first + 8 * h, m_end - 1)) * k_end + k));
          } else {
#pragma unroll
            for (int j = 0; j < HALF; j++) {
              ahead.x[i][h][j] = 0;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < W_TASKS; i++) {
        const int task = i * LANES + thread_index, column = min(n_begin + task / WORDS, n_end - 1);
        const int k = min(next + task % WORDS * SPAN, k_end - SPAN);
        load_words<1, true>(&ahead.w[i], w + (long(column) * (k_end / SPAN) + k / SPAN));
        if (FOLDED) {
          ahead.fold[i] = bits_of(scales[long(column) * groups + k / GS]) * 0x00010001u;
        }
      }
#pragma unroll
      for (int i = 0; i < FACTORS; i++) {
        const int task = i * LANES + thread_index;
        if (!FOLDED && task < COLUMNS * PARTS) {
          const int column = min(n_begin + task / PARTS, n_end - 1);
          const int group = min((next + task % PARTS * PART) / GS, groups - 1);
          ahead.scale[i] = float(scales[long(column) * groups + group]);
        }
      }
    }
    if (LEFT && ends && step >= 0) {
#pragma unroll
      for (int i = 0; i < FACTORS; i++) {
        const int task = i * LANES + thread_index;
        if (task < COLUMNS * PARTS) {
          const int column = min(n_begin + task / PARTS, n_end - 1);
          const int group = min((step * DEEP + task % PARTS * PART) / GS, groups - 1);
          const long at = long(column) * groups + group;
          const float scale = FOLDED || SYMMETRIC > 0 ? float(scales[at]) : 0.0f;
          const float offset = SYMMETRIC > 0 ? scale * (-0.5f * float(SYMMETRIC)) : float(biases[at]);
          ahead.offset[i] = FOLDED ? fma(TWICE ? 2.0f : 1.0f, offset, scale) : offset;
        }
      }
    }
    if (step >= 0) {
      threadgroup const uint4* xt = xs + here * (ROWS * 8);
      threadgroup const uint4* wt = ws + here * (COLUMNS * 8);
      if (LEFT && step > 0 && begins) {
        add_left<PARTS>(sums, totals + here * (ROWS * PARTS), offsets + here * (COLUMNS * PARTS), row0, column0, lane);
      }
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        float d[4][4][4];
#pragma unroll
        for (int s = 0; s < PART / 32; s++) {
          const int chunk = part * (PART / 8) + s * 4;
          mma_tile<T>(FOLDED ? sums : d, xt, wt, row0, column0, chunk, s == 0 && !FOLDED, lane);
          if (LEFT) {
            add_totals<T, ACROSS>(own, xt, row0, column0 / 32, chunk, begins && s == 0, lane);
          }
        }
        if (LEFT && ends) {
          store_totals<ACROSS, PARTS>(totals + there * (ROWS * PARTS), own, row0, column0 / 32, part, lane);
        }
        if (!FOLDED) {
          threadgroup const float* factor = factors + here * (COLUMNS * PARTS);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float f0 = factor[(column0 + j * 8 + 2 * q) * PARTS + part];
            const float f1 = factor[(column0 + j * 8 + 2 * q + 1) * PARTS + part];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
              for (int h = 0; h < 2; h++) {
                sums[i][j][h * 2] = fma(f0, d[i][j][h * 2], sums[i][j][h * 2]);
                sums[i][j][h * 2 + 1] = fma(f1, d[i][j][h * 2 + 1], sums[i][j][h * 2 + 1]);
              }
            }
          }
        }
      }
    }
    if (step + 1 < steps) {
#pragma unroll
      for (int i = 0; i < X_TASKS; i++) {
        const int task = i * LANES + thread_index, pair = task / WORDS, word = task % WORDS;
        uint b[2][HALF];
#pragma unroll
        for (int j = 0; j < HALF; j++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint low = ahead.x[i][h][j / 2], high = ahead.x[i][h][(HALF + j) / 2];
            b[h][j] = j % 2 == 0 ? join_low(low, high) : join_high(low, high);
          }
        }
#pragma unroll
        for (int v = 0; v < VECTORS_OF_WORD; v++) {
          if (task < ROWS / 2 * WORDS) {
            store_pair(xs + there * (ROWS * 8), pair, word * VECTORS_OF_WORD + v, b[0] + 4 * v, b[1] + 4 * v);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < W_TASKS; i++) {
        const int task = i * LANES + thread_index, column = task / WORDS, word = task % WORDS;
#pragma unroll
        for (int v = 0; v < VECTORS_OF_WORD; v++) {
          uint4 to;
          to.x = weight_of<T, BITS, SYMMETRIC, FOLDED>(ahead.w[i], 4 * v, ahead.fold[i]);
          to.y = weight_of<T, BITS, SYMMETRIC, FOLDED>(ahead.w[i], 4 * v + 1, ahead.fold[i]);
          to.z = weight_of<T, BITS, SYMMETRIC, FOLDED>(ahead.w[i], 4 * v + 2, ahead.fold[i]);
          to.w = weight_of<T, BITS, SYMMETRIC, FOLDED>(ahead.w[i], 4 * v + 3, ahead.fold[i]);
          ws[there * (COLUMNS * 8) + slot(column, word * VECTORS_OF_WORD + v)] = to;
        }
      }
#pragma unroll
      for (int i = 0; i < FACTORS; i++) {
        const int task = i * LANES + thread_index;
        if (!FOLDED && task < COLUMNS * PARTS) {
          factors[there * (COLUMNS * PARTS) + task] = ahead.scale[i];
        }
      }
    }
    if (LEFT && ends && step >= 0) {
#pragma unroll
      for (int i = 0; i < FACTORS; i++) {
        const int task = i * LANES + thread_index;
        if (task < COLUMNS * PARTS) {
          offsets[there * (COLUMNS * PARTS) + task] = ahead.offset[i];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (LEFT) {
    const int here = steps % 2;
    add_left<PARTS>(sums, totals + here * (ROWS * PARTS), offsets + here * (COLUMNS * PARTS), row0, column0, lane);
  }
  const float unit = TWICE ? 0.5f : 1.0f;
  mma_store<O, HAS_BIAS>(y, sums, bias, unit, m_begin + row0, m_end, n_begin + column0, n_end, lane);
}

// --- kernel affine_qmm ---
constexpr int ROWS = 64 * WARPS_M, COLUMNS = 32 * (SIMD_GROUPS / WARPS_M), PARTS = GS < DEEP ? DEEP / GS : 1;
threadgroup uint4 xs[2 * ROWS * 8];
threadgroup uint4 ws[2 * COLUMNS * 8];
threadgroup float totals[2 * ROWS * PARTS];
threadgroup float factors[2 * COLUMNS * PARTS];
threadgroup float offsets[2 * COLUMNS * PARTS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
if (aligned(x)) {
  affine_qmm<T, S, O, BITS, GS, SYMMETRIC, HAS_BIAS, FOLDED, WARPS_M, SIMD_GROUPS, true>(
      x, w, scales, biases, bias, y, xs, ws, totals, factors, offsets, m_end, w_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.x * ROWS, threadgroup_position_in_grid.y * COLUMNS, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
} else {
  affine_qmm<T, S, O, BITS, GS, SYMMETRIC, HAS_BIAS, FOLDED, WARPS_M, SIMD_GROUPS, false>(
      x, w, scales, biases, bias, y, xs, ws, totals, factors, offsets, m_end, w_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.x * ROWS, threadgroup_position_in_grid.y * COLUMNS, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
}
