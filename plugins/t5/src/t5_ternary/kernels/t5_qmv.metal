// Matrix-vector and small-batch products with t5 weights, 1 to 8 rows in one pass over the weights.
//
//   y[m, n] = sum_k x[m, k] * scales[n, k / GS] * trit[n, k]  (+ bias[n])        trit in -1, 0, 1
//
// Inputs
//   x       (..., K) of T: float, half or bfloat; rows M are all but the last dimension
//   w       (N, K / GS * BYTES) uint8, BYTES = 26 for GS 128 and 13 for GS 64. Byte b of a group is
//           121 + sum_i 3^i * trit[5 b + i]; trits beyond the group's end are 0
//   scales  (N, K / GS) of S: float, half or bfloat
//   bias    (N) of B; never read unless HAS_BIAS
// Output
//   y       (..., N) of O
//
// Template   GS 64 or 128; ROWS 1..8, rows of x at a time; TILE rows of w a SIMD group works on
// Edges      any N; any M; K is a multiple of GS
// Bytes      a group of GS weights takes BYTES bytes of w and one S of scales; read once for each ROWS rows of x. There are
//            no biases
// Numbers    exactness `rounding`: sums in float32, weights of zero add nothing. Row-invariant: what a lane adds, and in
//            which order, does not depend on M, ROWS or TILE
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes; threadgroup (i, j) makes columns [i, i + 1) * SIMD_GROUPS * TILE
//            of rows [j, j + 1) * ROWS. Lane l of a SIMD group takes the bytes b of a row with b / (GS / 64) % 32 == l,
//            so that lanes idle in the last turn only
// Threadgroup memory   none

// The integer next to b / 3, for |b| up to 400.
METAL_FUNC float third_of(float b) {
#ifdef __CUDACC__
  // Adding 1.5 * 2^23 leaves no place for a fraction; there are few units that round.
  return fmaf(b, 1.0f / 3.0f, 12582912.0f) - 12582912.0f;
#else
  return rint(b * (1.0f / 3.0f));
#endif
}

// The five trits of a byte, which is 121 more than their number in base 3.
METAL_FUNC void trits_of(thread float* trits, uint byte) {
  float rest = as_type<float>(0x4b000000u | byte) - 8388729.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float next = third_of(rest);
    trits[i] = fma(next, -3.0f, rest);
    rest = next;
  }
  trits[4] = rest;
}

template <typename O, int GS, int ROWS, int TILE, bool HAS_BIAS, typename X, typename W, typename S, typename B>
METAL_FUNC void t5_qmv(X x, W w, S scales, B bias, device O* y, int m_end, int n_end, int k_end, int m_begin,
                       int n_begin, ushort lane) {
  // Bytes of a group, and bytes that a lane takes at a time.
  constexpr int BYTES = GS == 128 ? 26 : 13, RUN = GS / 64;
  const int groups = k_end / GS, columns = groups * BYTES;
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
  for (int at = lane * RUN; at < columns; at += 32 * RUN) {
    const int group = at / BYTES, first = (at - group * BYTES) * 5;
    uint bytes[TILE][RUN];
    float scale[TILE], dots[TILE][ROWS];
#pragma unroll
    for (int t = 0; t < TILE; t++) {
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        bytes[t][i] = w[from[t] * columns + at + i];
      }
      scale[t] = float(scales[from[t] * groups + group]);
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        dots[t][m] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      float values[ROWS][5];
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
#pragma unroll
        for (int j = 0; j < 5; j++) {
          const int k = first + 5 * i + j;
          values[m][j] = k < GS ? float(x[row[m] + group * GS + k]) : 0.0f;
        }
      }
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        float trits[5];
        trits_of(trits, bytes[t][i]);
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
#pragma unroll
          for (int j = 0; j < 5; j++) {
            dots[t][m] = fma(values[m][j], trits[j], dots[t][m]);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILE; t++) {
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        sums[t][m] = fma(scale[t], dots[t][m], sums[t][m]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILE; t++) {
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      const float sum = simd_sum(sums[t][m]);
      const int n = n_begin + t;
      if (lane == 0 && n < n_end && m_begin + m < m_end) {
        y[long(m_begin + m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
      }
    }
  }
}

// --- kernel t5_qmv ---
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
t5_qmv<O, GS, ROWS, TILE, HAS_BIAS>(
    x, w, scales, bias, y, m_end, scales_shape[0], x_shape[x_ndim - 1], threadgroup_position_in_grid.y * ROWS,
    (threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup) * TILE,
    thread_index_in_simdgroup);
