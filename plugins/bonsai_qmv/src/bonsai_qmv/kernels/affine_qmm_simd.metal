// Products of many rows with affine weights on Metal: tiles of weights are unpacked into threadgroup memory and
// multiplied by SIMD-group matrices. Weights are never written to device memory.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / GS] * code[n, k] + biases[n, k / GS])  (+ bias[n])
//
// Inputs     x (..., K) of half, bfloat or float; w (N, K * BITS / 32) uint; scales, biases (N, K / GS) of half, bfloat
//            or float; bias (N) of B: as in affine_qmv.metal, biases unread if SYMMETRIC, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   T, type of the tiles: that of x and scales, float if they differ; BITS 1, 2 or 4; GS 32, 64 or 128;
//            TILE_ROWS 32 or 64. WHOLE: tiles have weights, not codes; if T is float, or if weights are values of T,
//            which they are where BITS is 1 and SYMMETRIC 1 or 2 (half of a scale is a value of T, as biases are),
//            and where both are 2
// Edges      any N; any M; K is a multiple of GS
// Bytes      weights are read once for each TILE_ROWS rows, x once for each 64 columns
// Numbers    exactness `rounding`: products are exact and summed in float. Matrices multiply in the type of the tile,
//            and a weight rounded to half would be outside of the bound. So tiles of half have codes, or codes less
//            half of SYMMETRIC, which are exact; scales, and biases times sums of x, are applied to the sums of each
//            group in float. To 32 x 32 results and 32 values of k, 64 matrix products, 1024 multiply-adds of each lane,
//            that adds 32 or 64 if GS is 32, 8 or 16 if it is 128. Tiles of float would take twice the threadgroup
//            memory and loads. Row-invariant for all M, but sums are not made in the order of affine_qmv
// Geometry   threadgroups of 128 lanes; threadgroup (i, j) makes rows [i, i + 1) * TILE_ROWS of columns [j, j + 1) * 64
// Threadgroup memory   32 of T for each row and column of a tile; a float for a row and two for a column

#include "tiles_simdgroup.h"

// Places of a group are values of k.
struct InOrder {
  static METAL_FUNC int k_of(int place) {
    return place;
  }
};

// The words with a lane's 16 codes of a step: one, of which it has the lower or the upper half, or two. w: the column's
// words from the step's first one on. For one bit a word has the codes of two lanes: the lower 16 of the SIMD group
// fetch `shared`, that of column `lane`.
template <int BITS, typename W>
METAL_FUNC void fetch_codes(thread uint* words, W w, W shared, int half_of_step, int lane) {
  if (BITS == 1) {
    words[0] = 0;
    if (lane < 16) {
      words[0] = shared[0];
    }
    words[0] = simd_shuffle(words[0], ushort(lane / 2)) >> (half_of_step * 16);
  } else {
#pragma unroll
    for (int i = 0; i < (BITS == 4 ? 2 : 1); i++) {
      words[i] = w[half_of_step * (BITS / 2) + i];
    }
  }
}

// Code j of these. It need not be shifted down before it is a number.
template <int BITS>
METAL_FUNC float code_of(thread const uint* words, int j) {
  const int shift = j * BITS % 32;
  return float(words[j * BITS / 32] & (((1u << BITS) - 1u) << shift)) * (1.0f / float(1u << shift));
}

template <typename T, typename O, int BITS, int GS, int TILE_ROWS, int SYMMETRIC, bool HAS_BIAS, bool WHOLE,
          typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void affine_qmm_simd(XP x, WP w, SP scales, SP biases, BP bias, device O* y, threadgroup vec<T, 4>* xs,
                                threadgroup vec<T, 4>* ws, threadgroup float* totals, threadgroup float2* factors,
                                int m_end, int n_end, int k_end, int m_begin, int n_begin, int simd_group, int lane) {
  typedef TileX<TILE_ROWS> Row;
  typedef TileSums<TILE_ROWS> Sums;
  constexpr int STEPS = GS / TILE_DEEP, WORDS = TILE_DEEP * BITS / 32;
  // Codes less half of SYMMETRIC have no more bits than codes have; what is farther off goes the way of biases.
  constexpr bool CENTRED = SYMMETRIC > 0 && SYMMETRIC <= (2 << BITS), OFFSETS = !WHOLE && !CENTRED;
  constexpr float MIDDLE = CENTRED ? 0.5f * float(SYMMETRIC) : 0.0f;
  const int thread_index = simd_group * 32 + lane, groups = k_end / GS, words = k_end / 32 * BITS;
  // 16 values of x, and 16 codes of a column. Beyond the ends it is the last one again, which is not stored.
  long rows[Row::COUNT];
  tile_rows<TILE_ROWS>(rows, m_begin, m_end, k_end, thread_index);
  const int own = thread_index / 2, half_of_step = thread_index % 2, column = min(n_begin + own, n_end - 1);
  const WP column_words = w + long(column) * words;
  const WP pair_words = w + long(min(n_begin + simd_group * 16 + lane % 16, n_end - 1)) * words;
  simdgroup_matrix<float, 8, 8> sums[Sums::DOWN][4], dots[Sums::DOWN][4];
  tile_clear<TILE_ROWS>(sums);
  T held[4 * Row::COUNT];
  uint codes[2];
  float total[Row::COUNT];
  float scale = 0.0f, offset = 0.0f;
  for (int step = 0; step < groups * STEPS; step++) {
    const int group = step / STEPS, part = step % STEPS;
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < Row::COUNT; i++) {
        total[i] = 0.0f;
      }
      if (!WHOLE) {
        tile_clear<TILE_ROWS>(dots);
      }
      if (WHOLE || half_of_step == 0) {
        scale = float(scales[long(column) * groups + group]);
        if (SYMMETRIC > 0) {
          offset = scale * (-0.5f * float(SYMMETRIC));
        } else {
          offset = float(biases[long(column) * groups + group]);
        }
      }
    }
    tile_fetch_x<T, TILE_ROWS, InOrder>(held, x + group * GS, rows, part * TILE_DEEP, thread_index);
    fetch_codes<BITS>(codes, column_words + step * WORDS, pair_words + step * WORDS, half_of_step, lane);
    // Until all have multiplied the last step.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_put_x<T, TILE_ROWS>(xs, held, thread_index);
#pragma unroll
    for (int v = 0; v < 16; v += 4) {
      T values[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float code = code_of<BITS>(codes, v + j) - MIDDLE;
        values[j] = T(!WHOLE ? code : CENTRED ? code * scale : fma(code, scale, offset));
      }
      tile_put<T>(ws + tile_at(own, half_of_step * 16 + v), values);
    }
    if (OFFSETS) {
      tile_add_x<T, TILE_ROWS>(total, held);
    }
    if (!WHOLE && part == STEPS - 1) {
      if (half_of_step == 0) {
        float2 f;
        f.x = scale;
        f.y = offset;
        factors[own] = f;
      }
      if (OFFSETS) {
        tile_put_sums<TILE_ROWS>(totals, total, thread_index);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply<T, TILE_ROWS>(WHOLE ? sums : dots, xs, ws, simd_group);
    if (!WHOLE && part == STEPS - 1) {
      const int first = Sums::column(simd_group) + Sums::column_of_lane(lane);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 left = factors[first + 8 * j], right = factors[first + 8 * j + 1];
#pragma unroll
        for (int i = 0; i < Sums::DOWN; i++) {
          float before = sums[i][j].thread_elements()[0], behind = sums[i][j].thread_elements()[1];
          if (OFFSETS) {
            const float t = totals[Sums::row(simd_group) + 8 * i + Sums::row_of_lane(lane)];
            before = fma(left.y, t, before);
            behind = fma(right.y, t, behind);
          }
          sums[i][j].thread_elements()[0] = fma(left.x, dots[i][j].thread_elements()[0], before);
          sums[i][j].thread_elements()[1] = fma(right.x, dots[i][j].thread_elements()[1], behind);
        }
      }
    }
  }
  tile_store<O, TILE_ROWS, HAS_BIAS>(y, sums, bias, m_begin, m_end, n_begin, n_end, simd_group, lane);
}

// --- kernel affine_qmm_simd ---
threadgroup vec<T, 4> xs[TILE_ROWS * 8];
threadgroup vec<T, 4> ws[TILE_COLUMNS * 8];
threadgroup float totals[TILE_ROWS];
threadgroup float2 factors[TILE_COLUMNS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
affine_qmm_simd<T, O, BITS, GS, TILE_ROWS, SYMMETRIC, HAS_BIAS, WHOLE>(
    x, w, scales, biases, bias, y, xs, ws, totals, factors, m_end, w_shape[0], x_shape[x_ndim - 1],
    threadgroup_position_in_grid.x * TILE_ROWS, threadgroup_position_in_grid.y * TILE_COLUMNS,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
