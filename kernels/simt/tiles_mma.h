// Tiles of a product by matrix instructions of 16x8x16, for kernels that unpack weights on the way: what these share.
// For CUDA, and for the lab; a kernel file takes it with #include "tiles_mma.h".
//
// WARPS_M of SIMD_GROUPS SIMD groups share columns; each makes 64 rows of 32 columns. A threadgroup takes 64 values of
// k at a time, which lie in threadgroup memory as 8 chunks of 16 bytes for each row and column. A chunk is what one
// lane has of two matrix instructions, which sum in whatever order the operands have, if it is the same in both.

constant constexpr int DEEP = 64;

// Rows alternate in the order of their chunks, so that neighbours meet different banks: lanes that load two rows' four
// chunks, and lanes that store a chunk or a word of it for each of eight rows.
METAL_FUNC int turned(int row) {
  return (row % 2 * 5) ^ (row / 2 % 4);
}
// Where chunk `i` of a row is.
METAL_FUNC int slot(int row, int i) {
  return row * 8 + (i ^ turned(row));
}

METAL_FUNC void mma_clear(thread float (*sums)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        sums[i][j][e] = 0.0f;
      }
    }
  }
}

// Adds the products of 32 values of k, `chunk` and the three next, of 64 rows from row0 and 32 columns from column0 on;
// the first of them if `first`, which replace what was there.
template <typename T>
METAL_FUNC void mma_tile(thread float (*to)[4][4], threadgroup const uint4* xt, threadgroup const uint4* wt, int row0,
                         int column0, int chunk, bool first, ushort lane) {
  const int r = lane / 4, at = chunk + lane % 4;
  uint4 a[4][2], b[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[i][0] = xt[slot(row0 + i * 16 + r, at)];
    a[i][1] = xt[slot(row0 + i * 16 + 8 + r, at)];
    b[i] = wt[slot(column0 + i * 8 + r, at)];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (first) {
        mma_16x8x16_first<T>(to[i][j], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[j].x, b[j].y, lane);
      } else {
        mma_16x8x16<T>(to[i][j], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[j].x, b[j].y, lane);
      }
      mma_16x8x16<T>(to[i][j], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b[j].z, b[j].w, lane);
    }
  }
}

// y = sums * unit (+ bias), inside of M and N; m0 and n0 are the SIMD group's first row and column.
template <typename O, bool HAS_BIAS, typename B>
METAL_FUNC void mma_store(device O* y, thread float (*sums)[4][4], B bias, float unit, int m0, int m_end, int n0,
                          int n_end, ushort lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int m = m0 + i * 16 + e / 2 * 8 + lane / 4, n = n0 + j * 8 + 2 * (lane % 4) + e % 2;
        if (m < m_end && n < n_end) {
          const float sum = sums[i][j][e] * unit;
          y[long(m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
        }
      }
    }
  }
}
