// Tiles of a product by Metal's SIMD-group matrices, for kernels that unpack weights on the way: what these share.
// Metal's alone; a kernel file takes it with #include "tiles_simdgroup.h".
//
// A threadgroup of four SIMD groups makes ROWS, 32 or 64, rows of 64 columns, each SIMD group half of the rows and of
// the columns. It takes 32 values of k at a time: those of x's rows and of the weights' columns lie in threadgroup
// memory in blocks of 8 rows (columns) and 8 values of k, which are 64 values of T in a row. A matrix is one block, so
// that its load is 64 neighbours; what a lane puts there is four.
//
// Matrices of T multiply exactly and are added in float. The place of a matrix's elements in `thread_elements()` is not
// in Metal's specification; it is the same on all of Apple's GPUs since M1:
//   lane l has row (l / 16) * 4 + (l / 2) % 4, columns (l / 8) % 2 * 4 + l % 2 * 2 and the next

constant constexpr int TILE_COLUMNS = 64, TILE_DEEP = 32;

// Where four values [k, k + 4) of a row or column are, in vectors of four.
METAL_FUNC int tile_at(int row, int k) {
  return (row / 8 * (TILE_DEEP / 8) + k / 8) * 16 + row % 8 * 2 + k % 8 / 4;
}

template <typename T>
METAL_FUNC void tile_put(threadgroup vec<T, 4>* to, thread const T* values) {
  vec<T, 4> v;
  v.x = values[0];
  v.y = values[1];
  v.z = values[2];
  v.w = values[3];
  to[0] = v;
}

// The share of x that a lane brings: four places of each of COUNT rows, so that eight lanes have a row's neighbours.
template <int ROWS>
struct TileX {
  static constant constexpr int COUNT = ROWS / 16;
  static METAL_FUNC int row(int thread_index, int i) {
    return i * 16 + thread_index / 8;
  }
  static METAL_FUNC int place(int thread_index) {
    return thread_index % 8 * 4;
  }
};

// Where these rows begin; beyond the end it is the last one again.
template <int ROWS>
METAL_FUNC void tile_rows(thread long* rows, int m_begin, int m_end, int k_end, int thread_index) {
#pragma unroll
  for (int i = 0; i < TileX<ROWS>::COUNT; i++) {
    rows[i] = long(min(m_begin + TileX<ROWS>::row(thread_index, i), m_end - 1)) * k_end;
  }
}

// Fetches the share, before the barrier behind which the tile may be written. x: from the group's first value of k on.
// place: of the step in the group. ORDER::k_of(place) is the value of k in a group that lies at this place of it.
template <typename T, int ROWS, typename ORDER, typename X>
METAL_FUNC void tile_fetch_x(thread T* held, X x, thread const long* rows, int place, int thread_index) {
#pragma unroll
  for (int i = 0; i < TileX<ROWS>::COUNT; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      held[4 * i + j] = T(x[rows[i] + ORDER::k_of(place + TileX<ROWS>::place(thread_index) + j)]);
    }
  }
}

template <typename T, int ROWS>
METAL_FUNC void tile_put_x(threadgroup vec<T, 4>* tile, thread const T* held, int thread_index) {
#pragma unroll
  for (int i = 0; i < TileX<ROWS>::COUNT; i++) {
    tile_put<T>(tile + tile_at(TileX<ROWS>::row(thread_index, i), TileX<ROWS>::place(thread_index)), held + 4 * i);
  }
}

// Sums of rows of x over a group: of the share, and of the whole, which all lanes of a SIMD group make together.
template <typename T, int ROWS>
METAL_FUNC void tile_add_x(thread float* sums, thread const T* held) {
#pragma unroll
  for (int i = 0; i < 4 * TileX<ROWS>::COUNT; i++) {
    sums[i / 4] += float(held[i]);
  }
}
template <int ROWS>
METAL_FUNC void tile_put_sums(threadgroup float* totals, thread const float* sums, int thread_index) {
#pragma unroll
  for (int i = 0; i < TileX<ROWS>::COUNT; i++) {
    float sum = sums[i];
#pragma unroll
    for (int s = 1; s < 8; s *= 2) {
      sum += simd_shuffle_xor(sum, ushort(s));
    }
    if (thread_index % 8 == 0) {
      totals[TileX<ROWS>::row(thread_index, i)] = sum;
    }
  }
}

// What a SIMD group makes: DOWN x 4 matrices. Its first row and column in the tile, and the lane's in a matrix.
template <int ROWS>
struct TileSums {
  static constant constexpr int DOWN = ROWS / 16;
  static METAL_FUNC int row(int simd_group) {
    return simd_group % 2 * (8 * DOWN);
  }
  static METAL_FUNC int column(int simd_group) {
    return simd_group / 2 * (32);
  }
  static METAL_FUNC int row_of_lane(int lane) {
    return lane / 16 * 4 + lane / 2 % 4;
  }
  static METAL_FUNC int column_of_lane(int lane) {
    return lane / 8 % 2 * 4 + lane % 2 * 2;
  }
};

template <int ROWS>
METAL_FUNC void tile_clear(thread simdgroup_matrix<float, 8, 8> (*sums)[4]) {
#pragma unroll
  for (int i = 0; i < TileSums<ROWS>::DOWN; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
}

// Adds the products of a step.
template <typename T, int ROWS>
METAL_FUNC void tile_multiply(thread simdgroup_matrix<float, 8, 8> (*sums)[4], threadgroup const vec<T, 4>* x_tile,
                              threadgroup const vec<T, 4>* w_tile, int simd_group) {
  constexpr int BLOCKS = TILE_DEEP / 8, DOWN = TileSums<ROWS>::DOWN;
  threadgroup const T* xs = (threadgroup const T*)(x_tile + tile_at(TileSums<ROWS>::row(simd_group), 0));
  threadgroup const T* ws = (threadgroup const T*)(w_tile + tile_at(TileSums<ROWS>::column(simd_group), 0));
#pragma unroll
  for (int s = 0; s < BLOCKS; s++) {
    simdgroup_matrix<T, 8, 8> a[DOWN], b[4];
#pragma unroll
    for (int i = 0; i < DOWN; i++) {
      simdgroup_load(a[i], xs + (i * BLOCKS + s) * 64, 8, ulong2(0, 0), false);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      simdgroup_load(b[j], ws + (j * BLOCKS + s) * 64, 8, ulong2(0, 0), true);
    }
#pragma unroll
    for (int i = 0; i < DOWN; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
      }
    }
  }
}

// y = sums (+ bias), inside of M and N.
template <typename O, int ROWS, bool HAS_BIAS, typename B>
METAL_FUNC void tile_store(device O* y, thread simdgroup_matrix<float, 8, 8> (*sums)[4], B bias, int m_begin, int m_end,
                           int n_begin, int n_end, int simd_group, int lane) {
  const int m0 = m_begin + TileSums<ROWS>::row(simd_group) + TileSums<ROWS>::row_of_lane(lane);
  const int n0 = n_begin + TileSums<ROWS>::column(simd_group) + TileSums<ROWS>::column_of_lane(lane);
#pragma unroll
  for (int i = 0; i < TileSums<ROWS>::DOWN; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int m = m0 + 8 * i, n = n0 + 8 * j + e;
        if (m < m_end && n < n_end) {
          const float sum = sums[i][j].thread_elements()[e];
          y[long(m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
        }
      }
    }
  }
}
