// y[m, n] = sum_k x[m, k] * w[n, k]
//
// Inputs     x (..., K) of T: half or bfloat, rows M are all but the last dimension; w (N, K) of T
// Output     y (..., N) of T
// Edges      any M, any N; K is a multiple of 8
// Bytes      each of w once for ROWS rows of x
// Numbers    exactness `rounding`: products are exact, sums in float32. Row-invariant: the order of a row's sum depends
//            on no other row
// Geometry   threadgroups of SIMD_GROUPS SIMD groups, one row of w for each; threadgroup (i, j) makes rows
//            [j, j + 1) * ROWS

template <typename T, int ROWS, bool VECTORS, typename X, typename W>
METAL_FUNC void row_dots(thread float* sums, X x, W w, int rows, int k_end, int lane) {
  for (int m = 0; m < ROWS; m++) {
    sums[m] = 0.0f;
  }
  for (int k = 8 * lane; k < k_end; k += 256) {
    uint words[4];
    load_words<4, VECTORS>(words, w + k);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      if (m < rows) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          sums[m] = fma(low_value<T>(words[i]), float(x[m * k_end + k + 2 * i]), sums[m]);
          sums[m] = fma(high_value<T>(words[i]), float(x[m * k_end + k + 2 * i + 1]), sums[m]);
        }
      }
    }
  }
  for (int m = 0; m < ROWS; m++) {
    sums[m] = simd_sum(sums[m]);
  }
}

// --- kernel dense_qmv ---
const int n_end = w_shape[0], k_end = w_shape[1], lane = thread_index_in_simdgroup;
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
const int n = threadgroup_position_in_grid.x * SIMD_GROUPS + simdgroup_index_in_threadgroup;
const int m = threadgroup_position_in_grid.y * ROWS;
if (n < n_end && m < m_end) {
  const long at_x = long(m) * k_end, at_w = long(n) * k_end;
  float sums[ROWS];
  if (aligned(w)) {
    row_dots<T, ROWS, true>(sums, x + at_x, w + at_w, m_end - m, k_end, lane);
  } else {
    row_dots<T, ROWS, false>(sums, x + at_x, w + at_w, m_end - m, k_end, lane);
  }
  for (int i = 0; i < ROWS; i++) {
    if (lane == 0 && m + i < m_end) {
      y[long(m + i) * n_end + n] = T(sums[i]);
    }
  }
}
