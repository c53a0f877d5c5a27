// Matrix-vector and small-batch products with affine weights, 1 to 8 rows in one pass over the weights.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / GS] * code[n, k] + biases[n, k / GS])  (+ bias[n])
//
// Inputs
//   x       (..., K) of T: float, half or bfloat; rows M are all but the last dimension
//   w       (N, K * BITS / 32) uint. Codes of a row are a little-endian bit stream: code k takes the bits
//           [k * BITS, (k + 1) * BITS), bit b of the row is bit b % 32 of word b / 32
//   scales  (N, K / GS) of S: float, half or bfloat
//   biases  (N, K / GS) of S; never read if SYMMETRIC, where biases = -SYMMETRIC / 2 * scales bit for bit
//   bias    (N) of B; never read unless HAS_BIAS
// Output
//   y       (..., N) of O
//
// Template   BITS 1..6 or 8; GS 32, 64 or 128; ROWS 1..8, rows of x at a time; TILE rows of w a SIMD group works on
// Edges      any N; any M; K is a multiple of GS, and so of 32
// Bytes      a group of GS weights takes GS * BITS / 8 bytes of w and one S of scales, one of biases unless SYMMETRIC;
//            read once for each ROWS rows of x
// Numbers    exactness `rounding`: sums in float32. Row-invariant: what a lane adds, and in which order, does not depend
//            on M, ROWS or TILE
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes; threadgroup (i, j) makes columns [i, i + 1) * SIMD_GROUPS * TILE
//            of rows [j, j + 1) * ROWS. Lane l of a SIMD group takes the weights k with k / 32 % 32 == l
// Threadgroup memory   none

// What one lane works on at a time.
constant constexpr int RUN = 32;

// Code j of the run that begins with words w[0], w[1], ...
template <int BITS>
METAL_FUNC uint code_of(thread const uint* w, int j) {
  const int bit = j * BITS, word = bit / 32, shift = bit % 32;
  uint v = w[word] >> shift;
  if (shift + BITS > 32) {
    v |= w[word + 1] << (32 - shift);
  }
  return v & ((1u << BITS) - 1u);
}

// One row of x: x[j] is scaled such that a code need not be shifted down within a half word, where codes do not straddle
// words; products are those of unscaled values, since factors are powers of two.
template <int BITS>
METAL_FUNC constexpr bool in_place() {
  return BITS == 1 || BITS == 2 || BITS == 4 || BITS == 8;
}

template <int BITS, int TILE>
METAL_FUNC void dot_one(thread float* dot, thread const uint (*w)[BITS], thread float* x) {
  if (in_place<BITS>()) {
#pragma unroll
    for (int j = 0; j < RUN; j++) {
      x[j] *= 1.0f / float(1u << (j * BITS % 16));
    }
#pragma unroll
    for (int t = 0; t < TILE; t++) {
#pragma unroll
      for (int j = 0; j < RUN; j++) {
        const uint half_word = (w[t][j * BITS / 32] >> (j * BITS / 16 % 2 * 16)) & 0xffffu;
        dot[t] = fma(x[j], float(half_word & (((1u << BITS) - 1u) << (j * BITS % 16))), dot[t]);
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < TILE; t++) {
#pragma unroll
      for (int j = 0; j < RUN; j++) {
        dot[t] = fma(x[j], float(code_of<BITS>(w[t], j)), dot[t]);
      }
    }
  }
}

template <typename O, int BITS, int GS, int ROWS, int TILE, int SYMMETRIC, bool HAS_BIAS, typename X, typename W,
          typename S, typename B>
METAL_FUNC void affine_qmv(X x, W w, S scales, S biases, B bias, device O* y, int m_end, int n_end, int k_end,
                           int m_begin, int n_begin, ushort lane) {
  const int groups = k_end / GS, words = k_end / 32 * BITS;
  float sums[TILE][ROWS];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      sums[t][m] = 0.0f;
    }
  }
  // Rows beyond the end are the last one again; they are computed and not stored.
  long from[TILE], row[ROWS];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    from[t] = min(n_begin + t, n_end - 1);
  }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    row[m] = long(min(m_begin + m, m_end - 1)) * k_end;
  }
  for (int k = lane * RUN; k < k_end; k += 32 * RUN) {
    uint packed[TILE][BITS];
    float scale[TILE], offset[TILE];
#pragma unroll
    for (int t = 0; t < TILE; t++) {
#pragma unroll
      for (int i = 0; i < BITS; i++) {
        packed[t][i] = w[from[t] * words + k / 32 * BITS + i];
      }
      scale[t] = float(scales[from[t] * groups + k / GS]);
      if (SYMMETRIC > 0) {
        offset[t] = scale[t] * (-0.5f * float(SYMMETRIC));
      } else {
        offset[t] = float(biases[from[t] * groups + k / GS]);
      }
    }
    float dots[TILE][ROWS], total[ROWS];
    if (ROWS == 1) {
      float values[RUN];
      total[0] = 0.0f;
#pragma unroll
      for (int j = 0; j < RUN; j++) {
        values[j] = float(x[row[0] + k + j]);
        total[0] += values[j];
      }
      float dot[TILE];
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        dot[t] = 0.0f;
      }
      dot_one<BITS, TILE>(dot, packed, values);
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        dots[t][0] = dot[t];
      }
    } else {
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        total[m] = 0.0f;
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          dots[t][m] = 0.0f;
        }
      }
      // Eight codes at a time, decoded once for all rows.
#pragma unroll
      for (int j = 0; j < RUN; j += 8) {
        float codes[TILE][8];
#pragma unroll
        for (int t = 0; t < TILE; t++) {
#pragma unroll
          for (int i = 0; i < 8; i++) {
            codes[t][i] = float(code_of<BITS>(packed[t], j + i));
          }
        }
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float value = float(x[row[m] + k + j + i]);
            total[m] += value;
#pragma unroll
            for (int t = 0; t < TILE; t++) {
              dots[t][m] = fma(value, codes[t][i], dots[t][m]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILE; t++) {
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        sums[t][m] = fma(scale[t], dots[t][m], fma(offset[t], total[m], sums[t][m]));
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILE; t++) {
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      const float sum = simd_sum(sums[t][m]);
      if (lane == 0 && n_begin + t < n_end && m_begin + m < m_end) {
        const int n = n_begin + t;
        y[long(m_begin + m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
      }
    }
  }
}

// --- kernel affine_qmv ---
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
affine_qmv<O, BITS, GS, ROWS, TILE, SYMMETRIC, HAS_BIAS>(
    x, w, scales, biases, bias, y, m_end, w_shape[0], x_shape[x_ndim - 1], threadgroup_position_in_grid.y * ROWS,
    (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * TILE,
    thread_index_in_simdgroup);
