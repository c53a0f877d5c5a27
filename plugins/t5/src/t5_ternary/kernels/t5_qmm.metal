// Products of many rows with t5 weights: tiles of weights are unpacked into threadgroup memory and multiplied by matrix
// instructions. Weights are never written to device memory.
//
//   y[m, n] = sum_k x[m, k] * scales[n, k / GS] * trit[n, k]  (+ bias[n])        trit in -1, 0, 1
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K / GS * BYTES) uint8; scales (N, K / GS) of T; bias (N) of B:
//            as in t5_qmv.metal, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   GS 64 or 128; WARPS_M of SIMD_GROUPS share columns. RESIDENT threadgroups shall fit a multiprocessor
// Edges      any N; any M; K is a multiple of GS
// Bytes      weights are read once for each 64 * WARPS_M rows (on CUDA in words, some of which have two bytes more), x
//            once for each 32 * SIMD_GROUPS / WARPS_M columns, scales twice, from nearby
// Numbers    exactness `rounding`: a weight is plus or minus a scale, exact in T; products exact, sums in float32.
//            Row-invariant for all M, but sums are not made in the order of t5_mma
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes; threadgroup (i, j) makes rows [i, i + 1) * 64 * WARPS_M of columns
//            [j, j + 1) * 32 * SIMD_GROUPS / WARPS_M; each SIMD group 64 rows of 32 columns
// Threadgroup memory   twice, for each row and column of a tile: 64 of T
//
// A step is 64 values of k, all or half of a group: twelve bytes, which are 60 values in their order, and behind them
// four values of the group's last bytes, which have four for each step. Two lanes unpack a column's: six bytes each, so
// that they store words of two neighbours, and two values of the last.

#include "tiles_mma.h"

// Bytes of a lane: four in the first word, two in the lower half of the second, whose upper half may be anything.
template <int GS, bool VECTORS, typename WP>
METAL_FUNC void fetch_run(thread uint* to, WP from) {
#ifdef __CUDACC__
  if (GS == 128 && VECTORS) {
    // Two bytes before or behind them are of the same group.
    const unsigned long long address = reinterpret_cast<unsigned long long>(from);
    const uint* words = reinterpret_cast<const uint*>(address & ~3ull);
    const uint a = __ldg(words), b = __ldg(words + 1);
    const bool odd = (address & 2) != 0;
    to[0] = odd ? __byte_perm(a, b, 0x5432) : a;
    to[1] = odd ? b >> 16 : b;
    return;
  }
#endif
  to[0] = from[0] | (uint(from[1]) << 8) | (uint(from[2]) << 16) | (uint(from[3]) << 24);
  to[1] = from[4] | (uint(from[5]) << 8);
}

// Two trits in half times two scales of T.
template <typename T>
METAL_FUNC uint scaled(uint trits, uint scales) {
  return f16_pair_mul(trits, scales);
}
template <>
METAL_FUNC uint scaled<bfloat>(uint trits, uint scales) {
  // The bits of 1.875 in half are those of 1 in bfloat.
  return bf16_pair_mul(f16_pair_fma(trits, 1.875f, 0.0f), scales);
}

// The weights of the bytes in the lower halves of the halves of a word: five words, each with one of both.
template <typename T>
METAL_FUNC void weights_of(thread uint* weights, uint bytes, uint scale) {
  // 1024 + byte, less 1024 + 121: the number whose digits -1, 0 and 1 to base 3 are the trits.
  uint rest = f16_pair_fma(mask_or(bytes, 0x00ff00ffu, 0x64006400u), 1.0f, -1145.0f);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // Adding 1536 leaves no place for a fraction: the integer next to a third.
    const uint next = f16_pair_fma(f16_pair_fma(rest, 1.0f / 3.0f, 1536.0f), 1.0f, -1536.0f);
    weights[i] = scaled<T>(f16_pair_fused(next, 0xc200c200u, rest), scale);  // rest - 3 * next
    rest = next;
  }
  weights[4] = scaled<T>(rest, scale);
}

// The weights of these bytes as 15 words of two neighbours, the first one below.
template <typename T>
METAL_FUNC void weights_of_run(thread uint* to, thread const uint* bytes, uint scale) {
  // Byte i and byte i + 3 together: values i * 5 ... and 15 + i * 5 ...
  uint v[15];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const uint upper = i == 0 ? bytes[0] >> 24 : i == 1 ? bytes[1] : bytes[1] >> 8;
    weights_of<T>(v + 5 * i, join_low(bytes[0] >> (8 * i), upper), scale);
  }
#pragma unroll
  for (int p = 0; p < 7; p++) {
    to[p] = join_low(v[2 * p], v[2 * p + 1]);
    to[8 + p] = join_high(v[2 * p + 1], v[2 * p + 2]);
  }
  to[7] = mask_or(v[14], 0x0000ffffu, v[0] & 0xffff0000u);
}

// Two of the four values, the lower or the upper two, that the group's last bytes have for its step `part`.
template <typename T, int GS>
METAL_FUNC uint weights_of_rest(uint bytes, int part, bool upper, uint scale) {
  // The last two bytes in the halves: trits 0 to 4 of one, 0 to 2 of the other, which is not there if GS is 64.
  uint v[5];
  weights_of<T>(v, join_low(bytes, bytes >> 8), scale);
  if (GS == 64 || part == 0) {
    return upper ? join_low(v[2], v[3]) : join_low(v[0], v[1]);
  }
  return upper ? join_high(v[1], v[2]) : mask_or(v[4], 0x0000ffffu, v[0] & 0xffff0000u);
}

// What is on its way from device memory for the next step.
template <int X_TASKS, int W_TASKS>
struct Ahead {
  uint x[X_TASKS][2][4];
  uint w[W_TASKS][2], rest[W_TASKS], scale[W_TASKS];
};

template <typename T, typename O, int GS, bool HAS_BIAS, int WARPS_M, int SIMD_GROUPS, bool VECTORS, typename XP,
          typename WP, typename SP, typename BP>
METAL_FUNC void t5_qmm(XP x, WP w, SP scales, BP bias, device O* y, threadgroup uint4* xs, threadgroup uint4* ws,
                       int m_end, int n_end, int k_end, int m_begin, int n_begin, ushort simd_group, ushort lane) {
  constexpr int LANES = 32 * SIMD_GROUPS, ROWS = 64 * WARPS_M, COLUMNS = 32 * (SIMD_GROUPS / WARPS_M);
  constexpr int PARTS = GS / DEEP, BYTES = 12 * PARTS + PARTS;
  constexpr int X_TASKS = (ROWS * 4 + LANES - 1) / LANES, W_TASKS = COLUMNS * 2 / LANES;
  const int thread_index = simd_group * 32 + lane, groups = k_end / GS, steps = k_end / DEEP;
  const int row0 = simd_group % WARPS_M * 64, column0 = simd_group / WARPS_M * 32;
  threadgroup uint* const words = (threadgroup uint*)ws;
  float sums[4][4][4];
  mma_clear(sums);
  Ahead<X_TASKS, W_TASKS> ahead;
#pragma unroll 1
  for (int step = -1; step < steps; step++) {
    const int here = step % 2, there = (step + 1) % 2, group = (step + 1) / PARTS, part = (step + 1) % PARTS;
    if (step + 1 < steps) {
      // Beyond the ends it is the last row or column again, which is computed and not stored.
#pragma unroll
      for (int i = 0; i < X_TASKS; i++) {
        const int task = i * LANES + thread_index, chunk = task % 8, first = m_begin + row_of(task / 8);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const XP from = x + (long(min(first + 8 * h, m_end - 1)) * k_end + group * GS);
          thread uint* to = ahead.x[i][h];
          if (GS == DEEP) {
            load_words<4, VECTORS>(to, from + chunk * 8);
          } else {
            load_words<2, VECTORS>(to, from + (part * 60 + chunk * 8));
            load_words<2, VECTORS>(to + 2, from + (chunk < 7 ? part * 60 + chunk * 8 + 4 : 120 + part * 4));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < W_TASKS; i++) {
        const int task = i * LANES + thread_index, column = min(n_begin + task / 2, n_end - 1);
        const WP from = w + (long(column) * (groups * BYTES) + group * BYTES);
        fetch_run<GS, VECTORS>(ahead.w[i], from + (part * 12 + task % 2 * 6));
        if (part == 0) {
          uint rest = 0;
          if (lane % 2 == 0) {
            rest = from[PARTS * 12];
            if (PARTS == 2) {
              rest |= uint(from[PARTS * 12 + PARTS - 1]) << 8;
            }
          }
          ahead.rest[i] = simd_shuffle(rest, ushort(lane / 2 * 2));
          ahead.scale[i] = bits_of(scales[long(column) * groups + group]) * 0x00010001u;
        }
      }
    }
    if (step >= 0) {
#pragma unroll
      for (int s = 0; s < DEEP / 32; s++) {
        mma_tile<T>(sums, xs + here * (ROWS * 8), ws + here * (COLUMNS * 8), row0, column0, s * 4, false, lane);
      }
    }
    if (step + 1 < steps) {
#pragma unroll
      for (int i = 0; i < X_TASKS; i++) {
        const int task = i * LANES + thread_index;
        if (task < ROWS * 4) {
          store_pair(xs + there * (ROWS * 8), task / 8, task % 8, ahead.x[i][0], ahead.x[i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < W_TASKS; i++) {
        const int task = i * LANES + thread_index, column = task / 2, second = task % 2;
        uint weights[15];
        weights_of_run<T>(weights, ahead.w[i], ahead.scale[i]);
        // Word j of a column is word j % 4 of chunk j / 4.
        const int turn = turned(column) * 4, begin = (there * COLUMNS + column) * 32;
#pragma unroll
        for (int j = 0; j < 15; j++) {
          words[(begin + second * 15 + j) ^ turn] = weights[j];
        }
        words[(begin + 30 + second) ^ turn] = weights_of_rest<T, GS>(ahead.rest[i], part, second == 1, ahead.scale[i]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  mma_store<O, HAS_BIAS>(y, sums, bias, 1.0f, m_begin + row0, m_end, n_begin + column0, n_end, lane);
}

// --- kernel t5_qmm ---
constexpr int ROWS = 64 * WARPS_M, COLUMNS = 32 * (SIMD_GROUPS / WARPS_M);
threadgroup uint4 xs[2 * ROWS * 8];
threadgroup uint4 ws[2 * COLUMNS * 8];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
// Arrays that begin between multiples of 16 bytes are views, and rare.
if (aligned(x) && aligned(w)) {
  t5_qmm<T, O, GS, HAS_BIAS, WARPS_M, SIMD_GROUPS, true>(
      x, w, scales, bias, y, xs, ws, m_end, scales_shape[0], x_shape[x_ndim - 1], threadgroup_position_in_grid.x * ROWS,
      threadgroup_position_in_grid.y * COLUMNS, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
} else {
  t5_qmm<T, O, GS, HAS_BIAS, WARPS_M, SIMD_GROUPS, false>(
      x, w, scales, bias, y, xs, ws, m_end, scales_shape[0], x_shape[x_ndim - 1], threadgroup_position_in_grid.x * ROWS,
      threadgroup_position_in_grid.y * COLUMNS, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
