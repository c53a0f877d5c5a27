// Products of many rows with t5 weights on Metal: tiles of weights are unpacked into threadgroup memory and multiplied
// by SIMD-group matrices. Weights are never written to device memory.
//
//   y[m, n] = sum_k x[m, k] * scales[n, k / GS] * trit[n, k]  (+ bias[n])        trit in -1, 0, 1
//
// Inputs     x (..., K) of half, bfloat or float; w (N, K / GS * BYTES) uint8; scales (N, K / GS) of half, bfloat or
//            float; bias (N) of B: as in t5_qmv.metal, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   T, type of the tiles: that of x and scales, float if they differ; GS 64 or 128; TILE_ROWS 32 or 64
// Edges      any N; any M; K is a multiple of GS
// Bytes      weights are read once for each TILE_ROWS rows, scales twice, from nearby; x once for each 64 columns
// Numbers    exactness `rounding`: a weight is plus or minus a scale, exact in T; products exact, sums in float.
//            Row-invariant for all M, but sums are not made in the order of t5_qmv
// Geometry   threadgroups of 128 lanes; threadgroup (i, j) makes rows [i, i + 1) * TILE_ROWS of columns [j, j + 1) * 64
// Threadgroup memory   32 of T for each row and column of a tile
//
// A group is GS / 16 runs of three bytes, and one or two bytes more, which have one trit for each run. A lane takes a
// run and its trit, 16 values; x lies in the same order.

#include "tiles_simdgroup.h"
#include "t5_qmv.metal"

// Place 16 r + i is trit i of run r, and place 16 r + 15 the trit behind the runs.
template <int GS>
struct RunsOrder {
  static METAL_FUNC int k_of(int place) {
    const int run = place / 16, i = place % 16;
    return i < 15 ? run * 15 + i : GS / 16 * 15 + run;
  }
};

// The trits of the bytes behind the runs, plus 1, two bits each.
template <int GS>
METAL_FUNC uint rest_of(uint bytes) {
  uint digits = 0;
#pragma unroll
  for (int b = 0; b < GS / 64; b++) {
    uint rest = (bytes >> (8 * b)) & 0xffu;
#pragma unroll
    for (int i = 0; i < 5; i++) {
      digits |= rest % 3 << (10 * b + 2 * i);
      rest /= 3;
    }
  }
  return digits;
}

template <typename T, typename O, int GS, int TILE_ROWS, bool HAS_BIAS, typename XP, typename WP, typename SP,
          typename BP>
METAL_FUNC void t5_qmm_simd(XP x, WP w, SP scales, BP bias, device O* y, threadgroup vec<T, 4>* xs,
                            threadgroup vec<T, 4>* ws, int m_end, int n_end, int k_end, int m_begin, int n_begin,
                            int simd_group, int lane) {
  typedef TileX<TILE_ROWS> Row;
  constexpr int STEPS = GS / TILE_DEEP, RUNS = GS / 16, BYTES = 3 * RUNS + GS / 64;
  const int thread_index = simd_group * 32 + lane, groups = k_end / GS;
  // 16 values of x, and 16 weights of a column. Beyond the ends it is the last one again, which is not stored.
  long rows[Row::COUNT];
  tile_rows<TILE_ROWS>(rows, m_begin, m_end, k_end, thread_index);
  const int own = thread_index / 2, half_of_step = thread_index % 2, column = min(n_begin + own, n_end - 1);
  const WP bytes = w + long(column) * (groups * BYTES);
  simdgroup_matrix<float, 8, 8> sums[TileSums<TILE_ROWS>::DOWN][4];
  tile_clear<TILE_ROWS>(sums);
  T held[4 * Row::COUNT];
  uint rest = 0;
  float scale = 0.0f;
  for (int step = 0; step < groups * STEPS; step++) {
    const int group = step / STEPS, run = step % STEPS * 2 + half_of_step;
    if (step % STEPS == 0) {
      scale = float(scales[long(column) * groups + group]);
      if (half_of_step == 0) {
        rest = bytes[group * BYTES + 3 * RUNS];
        if (GS == 128) {
          rest |= uint(bytes[group * BYTES + 3 * RUNS + GS / 128]) << 8;
        }
      }
      rest = rest_of<GS>(simd_shuffle(rest, ushort(lane / 2 * 2)));
    }
    tile_fetch_x<T, TILE_ROWS, RunsOrder<GS>>(held, x + group * GS, rows, step % STEPS * TILE_DEEP, thread_index);
    uint fetched[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      fetched[i] = bytes[group * BYTES + 3 * run + i];
    }
    // Until all have multiplied the last step.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_put_x<T, TILE_ROWS>(xs, held, thread_index);
    float trits[16];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      trits_of(trits + 5 * i, fetched[i]);
    }
    trits[15] = float((rest >> (2 * run)) & 3u) - 1.0f;
#pragma unroll
    for (int v = 0; v < 16; v += 4) {
      T values[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        values[j] = T(trits[v + j] * scale);
      }
      tile_put<T>(ws + tile_at(own, half_of_step * 16 + v), values);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply<T, TILE_ROWS>(sums, xs, ws, simd_group);
  }
  tile_store<O, TILE_ROWS, HAS_BIAS>(y, sums, bias, m_begin, m_end, n_begin, n_end, simd_group, lane);
}

// --- kernel t5_qmm_simd ---
threadgroup vec<T, 4> xs[TILE_ROWS * 8];
threadgroup vec<T, 4> ws[TILE_COLUMNS * 8];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
t5_qmm_simd<T, O, GS, TILE_ROWS, HAS_BIAS>(
    x, w, scales, bias, y, xs, ws, m_end, scales_shape[0], x_shape[x_ndim - 1],
    threadgroup_position_in_grid.x * TILE_ROWS, threadgroup_position_in_grid.y * TILE_COLUMNS,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
