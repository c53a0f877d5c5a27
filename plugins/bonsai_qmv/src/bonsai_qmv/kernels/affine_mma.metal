// Products of 1 to 8 rows with affine weights by matrix instructions: weights of 16 columns are one operand, rows of x
// the other, so that the time hardly depends on the number of rows.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / GS] * code[n, k] + biases[n, k / GS])  (+ bias[n])
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K * BITS / 32) uint; scales, biases (N, K / GS) of S; bias (N) of
//            B: as in affine_qmv.metal, biases unread if SYMMETRIC, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   BITS 1, 2, 4, and 8 with T half; GS 32, 64 or 128; ROWS 1, 2, 4 or 8, rows of x at a time; WHOLE if K / GS
//            is a multiple of 4; ROOM quads of groups have room in threadgroup memory, at least K / GS / 4 rounded up;
//            RESIDENT threadgroups shall fit a multiprocessor, which the text does not use
// Edges      any N; any M; K is a multiple of GS; N * K / GS is less than 2^31
// Bytes      as in affine_qmv.metal, read once for each ROWS rows of x
// Numbers    exactness `rounding`: codes are exact in T, products exact, sums in float32. Row-invariant: the order of
//            sums does not depend on M, ROWS or ROOM. It depends on SIMD_GROUPS, which must follow from the layer alone
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes, as many as the device holds at once. Threadgroup (i, j) of (I, J)
//            makes columns [t, t + 1) * 16 of rows [j, j + 1) * ROWS for t = i, i + I, i + 2 I ... Each SIMD group
//            takes a share of the quads, in their order
// Threadgroup memory   SIMD_GROUPS * 16 * ROWS floats, twice where that is within 12 KiB; and for each quad with room
//            4 * ROWS floats and 4 * ROWS * GS of T
//
// Four groups of a column, a quad, are worked on at once, each by one lane of four: its codes lie in one piece, and a
// SIMD group takes pieces of 64 bytes or more from memory. A matrix instruction sums over the four lanes, so x has
// zeros where lane and group differ: of 8 columns of that operand, 4 c + g is row c of x in group g. Results then are
// apart by groups, each to be multiplied with its scale.
//
// Two codes half a word apart become a pair of T by one mask, without a shift: in half they are denormal numbers, code
// * 2^(shift - 24); in bfloat they are 128 + code * 2^shift, and one exact multiplication and addition makes them code.

// What depends on T: how many bits of codes a mantissa has room for, and what the pair of T in a masked word is.
template <typename T>
struct Pairs {
  static constant constexpr int MANTISSA = 10, ONES = 0x3c003c00;
  static constant constexpr bool SCALED = true;
  // What a pair must be multiplied with to be codes.
  static constant constexpr float UNIT = 16777216.0f;
  // What the bits `mask` of a word are, `shift` bits above the lowest of each half.
  static METAL_FUNC uint of(uint w, uint mask, int) {
    return w & mask;
  }
};
template <>
struct Pairs<bfloat> {
  static constant constexpr int MANTISSA = 7, ONES = 0x3f803f80;
  static constant constexpr bool SCALED = false;
  static constant constexpr float UNIT = 1.0f;
  static METAL_FUNC uint of(uint w, uint mask, int shift) {
    const float unit = 1.0f / float(1 << shift);
    return bf16_pair_fma(mask_or(w, mask, 0x43004300u), unit, -128.0f * unit);
  }
};

// How a lane's group is laid out: WORDS words whose halves hold HALF codes each, of which STEP are taken before the
// word is shifted: a unit. A matrix instruction takes the same code of two such units, so that all its values have one
// factor; there are CLASSES factors.
template <typename T, int BITS, int GS>
struct Layout {
  static constant constexpr int WORDS = GS * BITS / 32;
  static constant constexpr int HALF = 16 / BITS;
  static constant constexpr int FITS = Pairs<T>::MANTISSA / BITS;
  static constant constexpr int STEP = FITS >= 4 && HALF >= 4 ? 4 : FITS >= 2 && HALF >= 2 ? 2 : 1;
  static constant constexpr int PARTS = HALF / STEP;
  static constant constexpr int CLASSES = Pairs<T>::SCALED ? STEP : 1;
  // Sums that are made side by side, because each instruction waits for the last of its sum.
  static constant constexpr int CHAINS = CLASSES == 1 ? 2 : CLASSES;
  // Words that are fetched by one load.
  static constant constexpr int AT_ONCE = WORDS < 4 ? WORDS : 4;
  static_assert(FITS > 0 && PARTS % 2 == 0, "this format does not fit T");
};

// Pair number `c` of unit `u` of a lane's words.
template <typename T, typename L, int BITS>
METAL_FUNC uint pair_of(thread const uint* words, int u, int c) {
  const uint mask = ((1u << BITS) - 1u) * 0x00010001u;
  const uint w = words[u / L::PARTS] >> (u % L::PARTS * L::STEP * BITS);
  return Pairs<T>::of(w, mask << (c * BITS), c * BITS);
}

// What a lane fetches of a quad: codes of its group, scales and biases of the two groups that it has results of.
// Nothing waits for it before it is used.
template <typename L, typename S>
struct Stage {
  static constant constexpr int SCALE_WORDS = int(sizeof(S)) / 2;
  uint codes[2][L::WORDS];
  uint scales[2][SCALE_WORDS], offsets[2][SCALE_WORDS];
};

// Where that is: groups counted from the first of column 0.
struct Place {
  int codes[2], scales[2];
  // False where the second of the two groups, or both, are beyond the end of K.
  bool first, second;
};

// Columns beyond the end are the last one again; they are computed and not stored. Groups beyond the end likewise, with
// x and scales of zero.
template <bool WHOLE>
METAL_FUNC Place find(int tile, int quad, int groups, int n_end, int r, int q) {
  Place at;
  const int code = quad * 4 + q, scale = quad * 4 + q % 2 * 2;
  at.first = WHOLE || scale < groups;
  at.second = WHOLE || scale + 1 < groups;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int from = min(tile * 16 + h * 8 + r, n_end - 1) * groups;
    at.codes[h] = from + (WHOLE ? code : min(code, groups - 1));
    at.scales[h] = from + scale;
  }
  return at;
}

// Two neighbours of S, as they lie in memory.
template <typename S, bool WHOLE, bool VECTORS, typename SP>
METAL_FUNC void load_scales(thread uint* to, SP from, bool first, bool second) {
  if (WHOLE) {
    load_words<int(sizeof(S)) / 2, VECTORS>(to, from);
  } else {
    const uint low = first ? bits_of(from[0]) : 0u, high = second ? bits_of(from[1]) : 0u;
    if (sizeof(S) == 2) {
      to[0] = low | high << 16;
    } else {
      to[0] = low;
      to[sizeof(S) / 2 - 1] = high;
    }
  }
}

template <typename S>
METAL_FUNC float scale_at(thread const uint* words, int i) {
  if (sizeof(S) == 4) {
    return as_type<float>(words[i % (sizeof(S) / 2)]);
  }
  return i == 0 ? low_value<S>(words[0]) : high_value<S>(words[0]);
}

template <bool VECTORS, typename L, typename S, typename WP>
METAL_FUNC void fetch_codes(thread Stage<L, S>& to, thread const Place& at, WP w, int first) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    stream_words<L::AT_ONCE, VECTORS>(to.codes[h] + first, w + (long(at.codes[h]) * L::WORDS + first));
  }
}

template <int SYMMETRIC, bool WHOLE, bool VECTORS, typename L, typename S, typename SP>
METAL_FUNC void fetch_scales(thread Stage<L, S>& to, thread const Place& at, SP scales, SP biases) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    load_scales<S, WHOLE, VECTORS>(to.scales[h], scales + at.scales[h], at.first, at.second);
    if (SYMMETRIC == 0) {
      load_scales<S, WHOLE, VECTORS>(to.offsets[h], biases + at.scales[h], at.first, at.second);
    }
  }
}

// What a lane makes vectors of x of, in turn `i`: its share of a group of one row. Zeros beyond the end of K.
template <typename L, int GS, int ROWS, bool VECTORS, typename XP>
METAL_FUNC void load_x(thread uint* raw, XP x, int i, int m_begin, int m_end, int groups, ushort lane) {
  constexpr int BLOCKS = ROWS > 2 ? ROWS / 2 : 1, COUNT = L::WORDS / L::AT_ONCE * L::HALF;
  const int r = lane / 4, q = lane % 4, m = i % BLOCKS * 2 + r / 4, group = i / BLOCKS * 4 + r % 4;
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    raw[j] = 0;
  }
  if (group < groups && m < ROWS && q < L::AT_ONCE) {
    load_words_first<COUNT, VECTORS>(
        raw, x + (long(min(m_begin + m, m_end - 1)) * groups + group) * GS + q * (COUNT * 2));
  }
}

// x as lanes take it: the values that meet code c of units u and u + 1 are words 2 s and 2 s + 1, s = u / 2 * STEP + c,
// of a group, in vectors [quad][i][row][group]; and the sums of each group over Pairs<T>::UNIT, [quad][row][group]. `raw`
// is load_x of the first turn.
template <typename T, typename L, int GS, int ROWS, int SIMD_GROUPS, bool VECTORS, typename XP>
METAL_FUNC void stage_x(threadgroup uint4* values, threadgroup float* totals, thread uint* raw, XP x, int m_begin, int m_end, int groups,
                        ushort simd_group, ushort lane) {
  constexpr int BLOCKS = ROWS > 2 ? ROWS / 2 : 1;
  constexpr bool AHEAD = ROWS <= 2;
  // Lanes that share a group, and words of its values for each.
  constexpr int LANES = L::AT_ONCE, WORDS = L::WORDS / LANES, COUNT = WORDS * L::HALF;
  const int r = lane / 4, q = lane % 4, quads = (groups + 3) / 4;
  for (int i = simd_group; i < quads * BLOCKS; i += SIMD_GROUPS) {
    const int quad = i / BLOCKS, m = i % BLOCKS * 2 + r / 4, group = quad * 4 + r % 4;
    uint b[COUNT];
    if (!AHEAD && i >= SIMD_GROUPS) {
      load_x<L, GS, ROWS, VECTORS>(raw, x, i, m_begin, m_end, groups, lane);
    }
#pragma unroll
    for (int v = 0; v < WORDS; v++) {
#pragma unroll
      for (int j = 0; j < L::HALF; j++) {
        const uint low = raw[v * L::HALF + j / 2], high = raw[v * L::HALF + (L::HALF + j) / 2];
        const int u = v * L::PARTS + j / L::STEP, place = (u / 2 * L::STEP + j % L::STEP) * 2 + u % 2;
        b[place] = j % 2 == 0 ? join_low(low, high) : join_high(low, high);
      }
    }
    // The next turn's arrive meanwhile, where registers hold them.
    if (AHEAD && i + SIMD_GROUPS < quads * BLOCKS) {
      load_x<L, GS, ROWS, VECTORS>(raw, x, i + SIMD_GROUPS, m_begin, m_end, groups, lane);
    }
    if (m < ROWS && q < LANES) {
#pragma unroll
      for (int j = 0; j < COUNT / 4; j++) {
        uint4 v;
        v.x = b[4 * j];
        v.y = b[4 * j + 1];
        v.z = b[4 * j + 2];
        v.w = b[4 * j + 3];
        values[((quad * (GS / 8) + q * (COUNT / 4) + j) * ROWS + m) * 4 + r % 4] = v;
      }
    }
    const uint ones = Pairs<T>::ONES;
    float d[2][4];
#pragma unroll
    for (int j = 0; j < COUNT / 2; j++) {
      if (j < 2) {
        mma_16x8x16_first<T>(d[j], ones, ones, ones, ones, b[2 * j], b[2 * j + 1], lane);
      } else {
        mma_16x8x16<T>(d[j % 2], ones, ones, ones, ones, b[2 * j], b[2 * j + 1], lane);
      }
    }
    const int row = i % BLOCKS * 2 + q / 2;
    if (r == 0 && row < ROWS) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        totals[(quad * ROWS + row) * 4 + q % 2 * 2 + e] = (d[0][e] + d[1][e]) * (1.0f / Pairs<T>::UNIT);
      }
    }
  }
}

template <typename T, typename S, typename O, int BITS, int GS, int ROWS, int SIMD_GROUPS, bool WHOLE, int SYMMETRIC,
          bool HAS_BIAS, int BUFFERS, bool VECTORS, typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void affine_mma(XP x, WP w, SP scales, SP biases, BP bias, device O* y, threadgroup uint4* values,
                           threadgroup float* totals, threadgroup float* part, int m_end, int n_end, int k_end,
                           int m_begin, int tile, int tile_step, ushort simd_group, ushort lane) {
  typedef Layout<T, BITS, GS> L;
  // Blocks of 8 columns, two rows of x each; so many share the masked codes.
  constexpr int BLOCKS = ROWS > 2 ? ROWS / 2 : 1, SHARING = BLOCKS < 2 ? 1 : 2;
  const int r = lane / 4, q = lane % 4, groups = k_end / GS, quads = (groups + 3) / 4;
  const int share = (quads + SIMD_GROUPS - 1) / SIMD_GROUPS, begin = simd_group * share;
  const int mine = max(min(quads - begin, share), 0), tiles = (n_end + 15) / 16;
  // Vectors of x, which stay zero in lanes that have another group.
  constexpr int TAKEN = 2;
  const bool own = r % 4 == q;
  uint4 taken[TAKEN][SHARING];
#pragma unroll
  for (int v = 0; v < TAKEN; v++) {
#pragma unroll
    for (int j = 0; j < SHARING; j++) {
      taken[v][j].x = taken[v][j].y = taken[v][j].z = taken[v][j].w = 0;
    }
  }
  // x first: weights that all threadgroups fetch together keep memory busy for some time.
  uint raw[L::WORDS / L::AT_ONCE * L::HALF];
  load_x<L, GS, ROWS, VECTORS>(raw, x, simd_group, m_begin, m_end, groups, lane);
  simdgroup_barrier(mem_flags::mem_device);
  Stage<L, S> stage;
  if (tile < tiles && mine > 0) {
    const Place at = find<WHOLE>(tile, begin, groups, n_end, r, q);
#pragma unroll
    for (int i = 0; i < L::WORDS; i += L::AT_ONCE) {
      fetch_codes<VECTORS>(stage, at, w, i);
    }
    fetch_scales<SYMMETRIC, WHOLE, VECTORS>(stage, at, scales, biases);
  }
  stage_x<T, L, GS, ROWS, SIMD_GROUPS, VECTORS>(values, totals, raw, x, m_begin, m_end, groups, simd_group,
                                                lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int turn = 0; tile < tiles; tile += tile_step, turn++) {
    float sums[BLOCKS][2];
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      sums[j][0] = sums[j][1] = 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < mine; i++) {
      const int quad = begin + i;
      // What is fetched as soon as its place is free.
      const bool last = i + 1 == mine;
      const int next = last ? tile + tile_step : tile;
      const bool more = next < tiles;
      const Place at = find<WHOLE>(next, last ? begin : quad + 1, groups, n_end, r, q);
#pragma unroll 1
      for (int block = 0; block < BLOCKS; block += SHARING) {
        float d[SHARING][L::CHAINS][4];
#pragma unroll
        for (int v = 0; v < GS / 8; v++) {
          thread uint4* b = taken[v % TAKEN];
#pragma unroll
          for (int j = 0; j < SHARING; j++) {
            if (own) {
              const int m = ((block + j) * 2 + r / 4) % ROWS;
              b[j] = values[((quad * (GS / 8) + v) * ROWS + m) * 4 + q];
            }
          }
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int s = v * 2 + e, u = s / L::STEP * 2, c = s % L::STEP, into = L::CLASSES == 1 ? s % 2 : c;
            const uint a0 = pair_of<T, L, BITS>(stage.codes[0], u, c);
            const uint a1 = pair_of<T, L, BITS>(stage.codes[1], u, c);
            const uint a2 = pair_of<T, L, BITS>(stage.codes[0], u + 1, c);
            const uint a3 = pair_of<T, L, BITS>(stage.codes[1], u + 1, c);
#pragma unroll
            for (int j = 0; j < SHARING; j++) {
              const uint b0 = e == 0 ? b[j].x : b[j].z, b1 = e == 0 ? b[j].y : b[j].w;
              if (s < L::CHAINS) {
                mma_16x8x16_first<T>(d[j][into], a0, a1, a2, a3, b0, b1, lane);
              } else {
                mma_16x8x16<T>(d[j][into], a0, a1, a2, a3, b0, b1, lane);
              }
            }
          }
          // Words of codes that are done with.
          const int done = (v + 1) * 4 / L::HALF;
          if ((v + 1) * 4 % L::HALF == 0 && done % L::AT_ONCE == 0) {
            if (more && block + SHARING == BLOCKS) {
              fetch_codes<VECTORS>(stage, at, w, done - L::AT_ONCE);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < SHARING; j++) {
          const int m = ((block + j) * 2 + q / 2) % ROWS;
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float total = totals[(quad * ROWS + m) * 4 + q % 2 * 2 + e];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float scale = scale_at<S>(stage.scales[h], e);
              const float offset =
                  SYMMETRIC > 0 ? scale * (-0.5f * float(SYMMETRIC)) : scale_at<S>(stage.offsets[h], e);
              float product = d[j][0][h * 2 + e];
#pragma unroll
              for (int c = 1; c < L::CHAINS; c++) {
                product = fma(d[j][c][h * 2 + e], L::CLASSES == 1 ? 1.0f : 1.0f / float(1 << (c * BITS)), product);
              }
              sums[j][h] = fma(scale, product, fma(offset, total, sums[j][h]));
            }
          }
        }
        // The sums of the next blocks come first: an index that is not constant would put them into memory.
        if (BLOCKS > SHARING) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float first[SHARING];
#pragma unroll
            for (int j = 0; j < SHARING; j++) {
              first[j] = sums[j][h];
            }
#pragma unroll
            for (int j = SHARING; j < BLOCKS; j++) {
              sums[j - SHARING][h] = sums[j][h];
            }
#pragma unroll
            for (int j = 0; j < SHARING; j++) {
              sums[BLOCKS - SHARING + j][h] = first[j];
            }
          }
        }
      }
      if (more) {
        fetch_scales<SYMMETRIC, WHOLE, VECTORS>(stage, at, scales, biases);
      }
    }
    threadgroup float* to = part + (BUFFERS == 2 ? turn % 2 : 0) * (SIMD_GROUPS * 16 * ROWS);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      // Two lanes have two groups each of the same rows and columns: each adds up one column.
      const bool odd = q % 2 == 1;
      const float other = simd_shuffle_xor(odd ? sums[j][0] : sums[j][1], 1);
      const int m = j * 2 + q / 2;
      if (m < ROWS) {
        to[(simd_group * 16 + r + q % 2 * 8) * ROWS + m] = (odd ? sums[j][1] : sums[j][0]) + other;
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
      sum *= Pairs<T>::UNIT;
      if (n < n_end && m < m_end) {
        y[long(m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
      }
    }
    if (BUFFERS == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// --- kernel affine_mma ---
constexpr int PART = SIMD_GROUPS * 16 * ROWS, BUFFERS = PART <= 1536 ? 2 : 1;
threadgroup uint4 values[ROOM * ROWS * GS / 2];
threadgroup float totals[ROOM * ROWS * 4];
threadgroup float part[PART * BUFFERS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
// Arrays that begin between multiples of 16 bytes are views, and rare.
if (aligned(x) && aligned(w) && aligned(scales) && aligned(biases)) {
  affine_mma<T, S, O, BITS, GS, ROWS, SIMD_GROUPS, WHOLE, SYMMETRIC, HAS_BIAS, BUFFERS, true>(
      x, w, scales, biases, bias, y, values, totals, part, m_end, w_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
} else {
  affine_mma<T, S, O, BITS, GS, ROWS, SIMD_GROUPS, WHOLE, SYMMETRIC, HAS_BIAS, BUFFERS, false>(
      x, w, scales, biases, bias, y, values, totals, part, m_end, w_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
