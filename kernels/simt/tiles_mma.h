// Tiles of a product by matrix instructions of 16x8x16, for kernels that unpack weights on the way: what these share.
// For CUDA, and for the lab; a kernel file takes it with #include "tiles_mma.h".
//
// WARPS_M of SIMD_GROUPS SIMD groups share columns; each makes 64 rows of 32 columns. A threadgroup takes 64 values of
// k at a time, which lie in threadgroup memory as 8 chunks of 16 bytes for each row and column. A chunk is what one
// lane has of two matrix instructions, which sum in whatever order the operands have, if it is the same in both. Rows m
// and m + 8 of 16 are a pair: their chunks lie mixed, so that what a lane loads is what an instruction takes, in four
// registers one behind the other.

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

// The first row of a pair, of which there are half as many as rows.
METAL_FUNC int row_of(int pair) {
  return pair / 8 * 16 + pair % 8;
}
// Where words 0 and 1 of both rows' chunk `i` are, or words 2 and 3 if `half` is 1.
METAL_FUNC int pair_slot(int pair, int half_of, int i) {
  return pair * 16 + half_of * 8 + (i ^ turned(pair));
}
METAL_FUNC void store_pair(threadgroup uint4* xt, int pair, int i, thread const uint* first,
                           thread const uint* second) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint4 v;
    v.x = first[2 * h];
    v.y = second[2 * h];
    v.z = first[2 * h + 1];
    v.w = second[2 * h + 1];
    xt[pair_slot(pair, h, i)] = v;
  }
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
    a[i][0] = xt[pair_slot(row0 / 2 + i * 8 + r, 0, at)];
    a[i][1] = xt[pair_slot(row0 / 2 + i * 8 + r, 1, at)];
    b[i] = wt[slot(column0 + i * 8 + r, at)];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (first) {
        mma_16x8x16_first<T>(to[i][j], a[i][0].x, a[i][0].y, a[i][0].z, a[i][0].w, b[j].x, b[j].y, lane);
      } else {
        mma_16x8x16<T>(to[i][j], a[i][0].x, a[i][0].y, a[i][0].z, a[i][0].w, b[j].x, b[j].y, lane);
      }
      mma_16x8x16<T>(to[i][j], a[i][1].x, a[i][1].y, a[i][1].z, a[i][1].w, b[j].z, b[j].w, lane);
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
