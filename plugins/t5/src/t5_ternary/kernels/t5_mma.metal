// Products of 1 to 8 rows with t5 weights by matrix instructions: the weights of 16 columns are one operand, rows of x the
// other, so that the time hardly depends on the number of rows.
//
//   y[m, n] = sum_k x[m, k] * scales[n, k / GS] * trit[n, k]  (+ bias[n])        trit in -1, 0, 1
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K / GS * BYTES) uint8; scales (N, K / GS) of T; bias (N) of B:
//            as in t5_qmv.metal, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   GS 64 or 128; ROWS 1, 2, 4 or 8, rows of x at a time; WHOLE if a row of w is a multiple of 16 bytes; ROOM
//            quads of pieces have room in threadgroup memory, at least as many as a row of w has: its bytes over 64,
//            rounded up
// Edges      any N; any M; K is a multiple of GS; N * K / GS is less than 2^31
// Bytes      as in t5_qmv.metal, read once for each ROWS rows of x. Scales are read by every lane that has a part of the
//            group: about three times, from nearby
// Numbers    exactness `rounding`: a weight is plus or minus a scale, exact in T; products exact, sums in float32.
//            Row-invariant: the order of sums does not depend on M, ROWS or ROOM. It depends on SIMD_GROUPS, which must
//            follow from the layer alone
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes, as many as the device holds at once. Threadgroup (i, j) of (I, J)
//            makes columns [t, t + 1) * 16 of rows [j, j + 1) * ROWS for t = i, i + I, i + 2 I ... Each SIMD group takes
//            a share of the quads, in their order
// Threadgroup memory   SIMD_GROUPS * 16 * ROWS floats twice, and for each quad with room 640 * ROWS bytes
//
// A row of w is cut into pieces of 16 bytes, whatever group they are of, and each lane of four has one: no lane waits for
// others, and none reads across. Two neighbouring bytes become two numbers in the halves of a word, and five words with
// a trit of each; times their scales they are operands. x is staged in that order once per threadgroup.

// Two numbers in the halves of a word.
#ifdef __CUDACC__
// 1024 + byte in half, for the lower or the upper two bytes of a word.
METAL_FUNC uint bytes_of(uint w, bool upper) {
  return __byte_perm(w, 0x64u, upper ? 0x4342u : 0x4140u);
}
// 16 bytes at a multiple of 16, which need not stay in a cache.
METAL_FUNC void stream_piece(uint* to, const uchar* from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}
METAL_FUNC uint half_pair_add(uint a, uint b) {
  uint r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
METAL_FUNC uint half_pair_fma(uint a, uint b, uint c) {
  uint r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
template <typename T>
METAL_FUNC uint pair_times(uint a, uint b) {
  uint r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <>
METAL_FUNC uint pair_times<bfloat>(uint a, uint b) {
  uint r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
#else
template <typename P>
METAL_FUNC void stream_piece(thread uint* to, P from) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[i] = from[4 * i] | (uint(from[4 * i + 1]) << 8) | (uint(from[4 * i + 2]) << 16) | (uint(from[4 * i + 3]) << 24);
  }
}
METAL_FUNC uint bytes_of(uint w, bool upper) {
  const uint v = upper ? w >> 16 : w;
  return (v & 0xffu) | ((v & 0xff00u) << 8) | 0x64006400u;
}
METAL_FUNC uint half_pair_fma(uint a, uint b, uint c) {
  const half low = half(fma(low_value<half>(a), low_value<half>(b), low_value<half>(c)));
  const half high = half(fma(high_value<half>(a), high_value<half>(b), high_value<half>(c)));
  return bits_of(low) | (bits_of(high) << 16);
}
METAL_FUNC uint half_pair_add(uint a, uint b) {
  return half_pair_fma(a, 0x3c003c00u, b);
}
template <typename T>
METAL_FUNC uint pair_times(uint a, uint b) {
  const T low = T(low_value<T>(a) * low_value<T>(b)), high = T(high_value<T>(a) * high_value<T>(b));
  return bits_of(low) | (bits_of(high) << 16);
}
#endif

// The bits of 1.875 in half are those of 1 in bfloat: for bfloat all numbers are 1.875 times what they are for half.
template <typename T>
struct Trits {
  static constant constexpr bool STRETCHED = false;
  // 1 / 3, 1, -1536
  static constant constexpr uint THIRD = 0x35553555u, UNIT = 0x3c003c00u, BACK = 0xe600e600u;
};
template <>
struct Trits<bfloat> {
  static constant constexpr bool STRETCHED = true;
  // 1 / 5.625, 1.875, -2880
  static constant constexpr uint THIRD = 0x31b031b0u, UNIT = 0x3f803f80u, BACK = 0xe9a0e9a0u;
};

// Trits of two bytes, the lowest first, as pairs of T times `scale`.
template <typename T>
METAL_FUNC void weights_of(thread uint* weights, uint bytes, uint scale) {
  uint rest = half_pair_add(bytes, 0xe479e479u);  // -1145
  if (Trits<T>::STRETCHED) {
    rest = half_pair_fma(rest, Trits<T>::UNIT, 0x80008000u);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // Adding 1536 leaves no place for a fraction: the integer next to a third.
    uint next = half_pair_fma(rest, Trits<T>::THIRD, 0x66006600u);
    next = Trits<T>::STRETCHED ? half_pair_fma(next, Trits<T>::UNIT, Trits<T>::BACK)
                               : half_pair_add(next, Trits<T>::BACK);
    weights[i] = pair_times<T>(half_pair_fma(next, 0xc200c200u, rest), scale);  // -3
    rest = next;
  }
  weights[4] = pair_times<T>(rest, scale);
}

// What a lane fetches of a quad for one column: its piece, and the scales of the groups that the piece has bytes of.
template <int GS>
struct Piece {
  static constant constexpr int BYTES = GS == 128 ? 26 : 13, GROUPS = GS == 128 ? 2 : 3;
  uint words[4], scales[GROUPS];
};

template <int GS, bool WHOLE, bool VECTORS, typename WP, typename SP>
METAL_FUNC void fetch(thread Piece<GS>& to, WP w, SP scales, int n, int piece, int columns, int groups) {
  const int first = piece * 16, group = first / Piece<GS>::BYTES;
  const auto from = w + (long(n) * columns + first);
  // Beyond the end of K the weights may be any: x is zero there.
  if (VECTORS && WHOLE) {
    if (first < columns) {
      stream_piece(to.words, from);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      to.words[i] = 0;
#pragma unroll
      for (int b = 0; b < 4; b++) {
        to.words[i] |= uint(first + 4 * i + b < columns ? from[4 * i + b] : 0) << (8 * b);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < Piece<GS>::GROUPS; g++) {
    to.scales[g] = bits_of(scales[n * groups + min(group + g, groups - 1)]);
  }
}

// The scales of the two bytes `2 * p` and `2 * p + 1` of a piece, as a pair. `end` is where the first group ends.
template <int GS>
METAL_FUNC uint scales_of(thread const Piece<GS>& piece, int p, int end) {
  if (GS == 128) {
    return (2 * p < end ? piece.scales[0] : piece.scales[1]) * 0x10001u;
  }
  const uint last = piece.scales[Piece<GS>::GROUPS - 1];
  const uint low = 2 * p < end ? piece.scales[0] : 2 * p < end + 13 ? piece.scales[1] : last;
  const uint high = 2 * p + 1 < end ? piece.scales[0] : 2 * p + 1 < end + 13 ? piece.scales[1] : last;
  return low | (high << 16);
}

// x as the lanes take it: word 5 p + i of a piece is what trits i of its bytes 2 p and 2 p + 1 meet, in vectors of four
// words [quad][vector][row][piece]. What is beyond the ends of groups, K and M is zero.
template <int GS, int ROWS, int SIMD_GROUPS, typename XP>
METAL_FUNC void stage_x(threadgroup uint* values, XP x, int m_begin, int m_end, int k_end, int columns, int quads,
                        int thread_index) {
  constexpr int BYTES = Piece<GS>::BYTES;
  for (int i = thread_index; i < quads * 32 * ROWS; i += 32 * SIMD_GROUPS) {
    const int m = i / (quads * 32), pair = i - m * (quads * 32), row = m_begin + m;
    uint found[2][5];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int byte = 2 * pair + e, group = byte / BYTES, first = (byte - group * BYTES) * 5;
      const bool inside = byte < columns && row < m_end;
      const auto from = x + (inside ? long(row) * k_end + group * GS + first : 0);
#pragma unroll
      for (int j = 0; j < 5; j++) {
        found[e][j] = inside && first + j < GS ? bits_of(from[j]) : 0u;
      }
    }
    const int quad = pair / 32, lane = pair / 8 % 4, word = pair % 8 * 5;
#pragma unroll
    for (int j = 0; j < 5; j++) {
      values[((((quad * 10) + (word + j) / 4) * ROWS + m) * 4 + lane) * 4 + (word + j) % 4] =
          found[0][j] | (found[1][j] << 16);
    }
  }
}

template <typename T, typename O, int GS, int ROWS, int SIMD_GROUPS, bool WHOLE, bool HAS_BIAS, bool VECTORS,
          typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void t5_mma(XP x, WP w, SP scales, BP bias, device O* y, threadgroup uint4* values, threadgroup float* part,
                       int m_end, int n_end, int k_end, int m_begin, int tile, int tile_step, ushort simd_group,
                       ushort lane) {
  constexpr int BYTES = Piece<GS>::BYTES;
  const int r = lane / 4, q = lane % 4, groups = k_end / GS, columns = groups * BYTES;
  const int quads = (columns + 63) / 64, tiles = (n_end + 15) / 16;
  const int share = (quads + SIMD_GROUPS - 1) / SIMD_GROUPS, begin = simd_group * share;
  const int mine = max(min(quads - begin, share), 0);
  Piece<GS> have[2], next[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      have[h].words[i] = next[h].words[i] = 0;
    }
  }
  if (tile < tiles && mine > 0) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // Columns beyond the end are the last one again; they are computed and not stored.
      const int n = min(tile * 16 + h * 8 + r, n_end - 1);
      fetch<GS, WHOLE, VECTORS>(have[h], w, scales, n, begin * 4 + q, columns, groups);
    }
  }
  stage_x<GS, ROWS, SIMD_GROUPS>((threadgroup uint*)values, x, m_begin, m_end, k_end, columns, quads,
                                 simd_group * 32 + lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int turn = 0; tile < tiles; tile += tile_step, turn++) {
    // Two sums side by side, because each instruction waits for the last of its sum.
    float d[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      d[0][i] = d[1][i] = 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < mine; i++) {
      const int quad = begin + i, piece = quad * 4 + q;
      const bool last = i + 1 == mine;
      const int then = last ? tile + tile_step : tile;
      if (then < tiles) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int n = min(then * 16 + h * 8 + r, n_end - 1);
          fetch<GS, WHOLE, VECTORS>(next[h], w, scales, n, (last ? begin : quad + 1) * 4 + q, columns, groups);
        }
      }
      const int end = (piece * 16 / BYTES + 1) * BYTES - piece * 16;
      // Four bytes at a time are ten words of operands: five instructions.
#pragma unroll
      for (int p = 0; p < 8; p += 4) {
        uint a[2][20];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const uint bytes = bytes_of(have[h].words[(p + j) / 2], (p + j) % 2 == 1);
            weights_of<T>(a[h] + 5 * j, bytes, scales_of<GS>(have[h], p + j, end));
          }
        }
#pragma unroll
        for (int v = 0; v < 5; v++) {
          uint4 b;
          b.x = b.y = b.z = b.w = 0;
          if (r < ROWS) {
            b = values[((quad * 10 + p / 4 * 5 + v) * ROWS + r) * 4 + q];
          }
          mma_16x8x16<T>(d[0], a[0][4 * v], a[1][4 * v], a[0][4 * v + 1], a[1][4 * v + 1], b.x, b.y, lane);
          mma_16x8x16<T>(d[1], a[0][4 * v + 2], a[1][4 * v + 2], a[0][4 * v + 3], a[1][4 * v + 3], b.z, b.w, lane);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        have[h] = next[h];
      }
    }
    threadgroup float* to = part + turn % 2 * (SIMD_GROUPS * 16 * ROWS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int m = 2 * q + e;
        if (m < ROWS) {
          to[(simd_group * 16 + h * 8 + r) * ROWS + m] = d[0][h * 2 + e] + d[1][h * 2 + e];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Another SIMD group's turn each time.
    for (int i = (simd_group + turn) % SIMD_GROUPS * 32 + lane; i < 16 * ROWS; i += 32 * SIMD_GROUPS) {
      const int n = tile * 16 + i / ROWS, m = m_begin + i % ROWS;
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMD_GROUPS; s++) {
        sum += to[s * (16 * ROWS) + i];
      }
      if (n < n_end && m < m_end) {
        y[long(m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
      }
    }
  }
}

// --- kernel t5_mma ---
threadgroup uint4 values[ROOM * ROWS * 40];
threadgroup float part[SIMD_GROUPS * 32 * ROWS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
// Arrays that begin between multiples of 16 bytes are views, and rare.
if (WHOLE && aligned(w)) {
  t5_mma<T, O, GS, ROWS, SIMD_GROUPS, WHOLE, HAS_BIAS, true>(
      x, w, scales, bias, y, values, part, m_end, scales_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
} else {
  t5_mma<T, O, GS, ROWS, SIMD_GROUPS, WHOLE, HAS_BIAS, false>(
      x, w, scales, bias, y, values, part, m_end, scales_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
