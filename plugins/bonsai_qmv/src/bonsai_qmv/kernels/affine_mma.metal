// Products of 1 to 16 rows with affine weights by matrix instructions: the weights of 16 columns are one operand, up to
// 8 or 16 rows of x the other, so that the time hardly depends on the number of rows.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / GS] * code[n, k] + biases[n, k / GS])  (+ bias[n])
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K * BITS / 32) uint; scales, biases (N, K / GS) of S; bias (N) of B:
//            as in affine_qmv.metal, biases unread if SYMMETRIC, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   BITS 1, 2, 4, and 8 with T half; GS 32, 64 or 128; ROWS 1, 2, 4, 8 or 16, rows of x at a time; TILES of 16
//            columns a SIMD group works on; QUAD groups are fetched at once, a divisor of K / GS; DEPTH such quads are
//            on their way; STAGED is K / GS if x is kept in threadgroup memory (ROWS at most 8), 0 if it is not
// Edges      any N; any M; K is a multiple of GS
// Bytes      as in affine_qmv.metal, read once for each ROWS rows of x
// Numbers    exactness `rounding`: codes are exact in T, products exact, sums in float32. Row-invariant: the order of
//            sums does not depend on M, ROWS, TILES, DEPTH or STAGED. It depends on SIMD_GROUPS and QUAD, which must
//            follow from the layer alone
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes, as many as the device holds at once. Threadgroup (i, j) of (I, J)
//            makes columns [t, t + 1) * 16 * TILES of rows [j, j + 1) * ROWS for t = i, i + I, i + 2 I ... Each SIMD
//            group takes an equal share of the quads, in their order
// Threadgroup memory   SIMD_GROUPS * TILES * 16 * ROWS floats, twice where that is within 12 KiB; and STAGED * ROWS
//            floats and STAGED * ROWS * GS of T
//
// Matrix instructions sum over 16 values of k in whatever order the operands have them. Lane l = 4 r + q owns a quarter of
// each group, the codes [q, q + 1) * GS / 4 of rows r and r + 8. Two codes half a word apart become a pair of T by one
// mask, without a shift: in half they are denormal numbers, code * 2^(shift - 24); in bfloat they are 128 + code *
// 2^shift, and one exact multiplication and addition makes them code.


// What depends on T: how many codes of BITS a mantissa has room for, and what the pair of T in a masked word is.
template <typename T>
struct Pairs {
  static constant constexpr int ROOM = 10, ONES = 0x3c003c00;
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
  static constant constexpr int ROOM = 7, ONES = 0x3f803f80;
  static constant constexpr bool SCALED = false;
  static constant constexpr float UNIT = 1.0f;
  static METAL_FUNC uint of(uint w, uint mask, int shift) {
    const float unit = 1.0f / float(1 << shift);
    return bf16_pair_fma(mask_or(w, mask, 0x43004300u), unit, -128.0f * unit);
  }
};

// How a lane's quarter of a group is laid out: WORDS words whose halves hold HALF codes each, of which STEP are taken
// before the word is shifted. A matrix instruction takes the same code of two such units, so that all its values have
// one factor; there are CLASSES factors.
template <typename T, int BITS, int GS>
struct Layout {
  static constant constexpr int CODES = GS / 4;
  static constant constexpr int WORDS = CODES * BITS > 32 ? CODES * BITS / 32 : 1;
  static constant constexpr int HALF = CODES / WORDS / 2;
  static constant constexpr int FITS = Pairs<T>::ROOM / BITS, MOST = FITS >= HALF ? HALF : FITS;
  static constant constexpr int EVEN = WORDS == 1 && MOST >= HALF ? HALF / 2 : MOST;
  static constant constexpr int STEP = EVEN >= 4 ? 4 : EVEN >= 2 ? 2 : 1;
  static constant constexpr int PARTS = HALF / STEP;
  static constant constexpr int UNITS = WORDS * PARTS;
  static constant constexpr int CLASSES = Pairs<T>::SCALED ? STEP : 1;
  static_assert(MOST > 0 && UNITS % 2 == 0, "this format does not fit T");
};

// A quarter that is less than a word, spread to the halves of one.
template <typename L, int BITS>
METAL_FUNC void spread_codes(thread uint* words, int q) {
  if (L::CODES * BITS < 32) {
    const int bits = L::CODES * BITS % 32;
    const uint v = words[0] >> (q * bits % 32);
    const uint mask = (1u << (bits / 2)) - 1u;
    words[0] = (v & mask) | ((v << (16 - bits / 2)) & (mask << 16));
  }
}

// The values of x that meet those codes: those of code c of unit u are word c * UNITS + u, so that the two units of a
// matrix instruction are neighbours.
template <typename L, bool VECTORS, typename X>
METAL_FUNC void load_values(thread uint* to, X from) {
  uint raw[L::CODES / 2];
  load_words<L::CODES / 2, VECTORS>(raw, from);
#pragma unroll
  for (int v = 0; v < L::WORDS; v++) {
#pragma unroll
    for (int j = 0; j < L::HALF; j++) {
      const uint low = raw[(2 * v * L::HALF + j) / 2], high = raw[(2 * v * L::HALF + L::HALF + j) / 2];
      const int place = j % L::STEP * L::UNITS + v * L::PARTS + j / L::STEP;
      to[place] = j % 2 == 0 ? join_low(low, high) : join_high(low, high);
    }
  }
}

// Pair number `c` of unit `u` of a lane's words.
template <typename T, typename L, int BITS>
METAL_FUNC uint pair_of(thread const uint* words, int u, int c) {
  const uint mask = ((1u << BITS) - 1u) * 0x00010001u;
  const uint w = words[u / L::PARTS] >> (u % L::PARTS * L::STEP * BITS);
  return Pairs<T>::of(w, mask << (c * BITS), c * BITS);
}

// One group: what the codes of 16 columns (a) give with the rows of x (b), over Pairs<T>::UNIT.
template <typename T, typename L, int BITS>
METAL_FUNC void multiply(thread float* result, thread const uint (*a)[L::WORDS], thread const uint* b, ushort lane) {
  float d[L::CLASSES][4];
#pragma unroll
  for (int c = 0; c < L::STEP; c++) {
    const int into = L::CLASSES == 1 ? 0 : c;
#pragma unroll
    for (int u = 0; u < L::UNITS; u += 2) {
      const uint a0 = pair_of<T, L, BITS>(a[0], u, c), a1 = pair_of<T, L, BITS>(a[1], u, c);
      const uint a2 = pair_of<T, L, BITS>(a[0], u + 1, c), a3 = pair_of<T, L, BITS>(a[1], u + 1, c);
      const uint b0 = b[c * L::UNITS + u], b1 = b[c * L::UNITS + u + 1];
      if (u == 0 && (c == 0 || L::CLASSES > 1)) {
        mma_16x8x16_first<T>(d[into], a0, a1, a2, a3, b0, b1, lane);
      } else {
        mma_16x8x16<T>(d[into], a0, a1, a2, a3, b0, b1, lane);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    result[i] = d[0][i];
#pragma unroll
    for (int c = 1; c < L::CLASSES; c++) {
      result[i] = fma(d[c][i], 1.0f / float(1 << (c * BITS)), result[i]);
    }
  }
}

// Sums of the values of a group, over Pairs<T>::UNIT, for the rows of x that this lane has results of.
template <typename T, typename L>
METAL_FUNC void add_up(thread float* total, thread const uint* b, ushort lane) {
  const uint ones = Pairs<T>::ONES;
  // Pairs of registers as in `multiply`, which spares moves; two chains, because each instruction waits for the last.
  float d[2][4];
#pragma unroll
  for (int c = 0; c < L::STEP; c++) {
#pragma unroll
    for (int u = 0; u < L::UNITS; u += 2) {
      const int i = c * (L::UNITS / 2) + u / 2;
      const uint b0 = b[c * L::UNITS + u], b1 = b[c * L::UNITS + u + 1];
      if (i < 2) {
        mma_16x8x16_first<T>(d[i], ones, ones, ones, ones, b0, b1, lane);
      } else {
        mma_16x8x16<T>(d[i % 2], ones, ones, ones, ones, b0, b1, lane);
      }
    }
  }
  total[0] = (d[0][0] + d[1][0]) * (1.0f / Pairs<T>::UNIT);
  total[1] = (d[0][1] + d[1][1]) * (1.0f / Pairs<T>::UNIT);
}

// A quad of groups of all tiles as a lane fetches it; nothing waits for it before it is used.
template <typename L, typename S, int TILES, int QUAD>
struct Stage {
  static constant constexpr int SCALE_WORDS = (QUAD * int(sizeof(S)) + 3) / 4;
  uint codes[TILES][2][QUAD][L::WORDS];
  uint scales[TILES][2][SCALE_WORDS], offsets[TILES][2][SCALE_WORDS];
};

// QUAD values of S, packed into words as they lie in memory.
template <typename S, int QUAD, bool VECTORS, typename SP>
METAL_FUNC void load_scales(thread uint* to, SP from) {
  if (QUAD * sizeof(S) >= 4) {
    load_words<(QUAD * int(sizeof(S)) + 3) / 4, VECTORS>(to, from);
  } else {
    to[0] = bits_of(from[0]);
  }
}

template <typename S>
METAL_FUNC float scale_at(thread const uint* words, int i) {
  if (sizeof(S) == 4) {
    return as_type<float>(words[i]);
  }
  return i % 2 == 0 ? low_value<S>(words[i / 2]) : high_value<S>(words[i / 2]);
}

// Where a lane's weights of a quad are, for its columns of each tile.
template <int TILES, typename WP, typename SP>
struct Places {
  WP w[TILES][2];
  SP scales[TILES][2], biases[TILES][2];
};

// `w`, `scales` and `biases` are what the lane takes of its first quad of column 0. Columns beyond the end are the last
// one again; they are computed and not stored.
template <int BITS, int GS, int TILES, int QUAD, typename WP, typename SP>
METAL_FUNC void find(thread Places<TILES, WP, SP>& at, WP w, SP scales, SP biases, int tile, int quad, int groups,
                     int n_end, int r) {
  const int first = tile * (TILES * 16);
  const long from = long(first) * groups + quad * QUAD;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = min(t * 16 + h * 8 + r, n_end - 1 - first);
      at.w[t][h] = w + from * (GS / 32 * BITS) + long(column) * (groups * (GS / 32 * BITS));
      at.scales[t][h] = scales + from + long(column) * groups;
      at.biases[t][h] = biases + from + long(column) * groups;
    }
  }
}

template <typename S, int SYMMETRIC, bool VECTORS, int TILES, int QUAD, typename L, typename WP, typename SP>
METAL_FUNC void fetch_scales(thread Stage<L, S, TILES, QUAD>& to, thread const Places<TILES, WP, SP>& at) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      load_scales<S, QUAD, VECTORS>(to.scales[t][h], at.scales[t][h]);
      if (SYMMETRIC == 0) {
        load_scales<S, QUAD, VECTORS>(to.offsets[t][h], at.biases[t][h]);
      }
    }
  }
}

template <int BITS, int GS, bool VECTORS, typename S, int TILES, int QUAD, typename L, typename WP, typename SP>
METAL_FUNC void fetch_codes(thread Stage<L, S, TILES, QUAD>& to, thread const Places<TILES, WP, SP>& at, int g) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      stream_words<L::WORDS, VECTORS>(to.codes[t][h][g], at.w[t][h] + g * (GS / 32 * BITS));
    }
  }
}

// x as the lanes take it: the words of a group as vectors [i][row][q], and sums of the values of each group and row.
template <typename T, typename L, int GS, int ROWS, int SIMD_GROUPS, bool VECTORS, typename XP>
METAL_FUNC void stage_x(threadgroup uint4* values, threadgroup float* totals, XP x, int m_begin, int m_end, int groups,
                        ushort simd_group, ushort lane) {
  constexpr int AT_ONCE = 8 / ROWS;
  const int r = lane / 4, q = lane % 4;
  const long row = min(m_begin + r % ROWS, m_end - 1) * long(groups) * GS;
  for (int first = simd_group * AT_ONCE; first < groups; first += SIMD_GROUPS * AT_ONCE) {
    const int group = first + r / ROWS;
    uint b[L::CODES / 2];
    float total[2];
    load_values<L, VECTORS>(b, x + (row + min(group, groups - 1) * GS + q * L::CODES));
    add_up<T, L>(total, b, lane);
    if (group < groups) {
#pragma unroll
      for (int i = 0; i < L::CODES / 8; i++) {
        uint4 v;
        v.x = b[4 * i];
        v.y = b[4 * i + 1];
        v.z = b[4 * i + 2];
        v.w = b[4 * i + 3];
        values[((group * (L::CODES / 8) + i) * ROWS + r % ROWS) * 4 + q] = v;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int of = first + (2 * q + e) / ROWS;
      if (r == 0 && of < groups) {
        totals[of * ROWS + (2 * q + e) % ROWS] = total[e];
      }
    }
  }
}

template <typename T, typename S, typename O, int BITS, int GS, int ROWS, int TILES, int SIMD_GROUPS, int QUAD,
          int DEPTH, int STAGED, int SYMMETRIC, bool HAS_BIAS, int BUFFERS, bool VECTORS, typename XP, typename WP, typename SP,
          typename BP>
METAL_FUNC void affine_mma(XP x, WP w, SP scales, SP biases, BP bias, device O* y, threadgroup uint4* values,
                           threadgroup float* totals, threadgroup float* part, int m_end, int n_end, int k_end,
                           int m_begin, int tile, int tile_step, ushort simd_group, ushort lane) {
  typedef Layout<T, BITS, GS> L;
  constexpr int BLOCKS = ROWS > 8 ? ROWS / 8 : 1, FEW = ROWS == 1 ? 2 : 1, COLUMNS = TILES * 16;
  const int r = lane / 4, q = lane % 4, groups = k_end / GS, quads = groups / QUAD;
  const int share = (quads + SIMD_GROUPS - 1) / SIMD_GROUPS, begin = simd_group * share;
  const int tiles = (n_end + COLUMNS - 1) / COLUMNS;
  w += begin * (QUAD * GS / 32 * BITS) + q * L::CODES * BITS / 32;
  scales += begin * QUAD;
  biases += begin * QUAD;
  Stage<L, S, TILES, QUAD> stages[DEPTH];
  Places<TILES, WP, SP> places;
  // The quad to fetch next.
  int to_tile = tile, to_quad = 0;
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    if (to_tile < tiles && begin + to_quad < quads) {
      find<BITS, GS, TILES, QUAD>(places, w, scales, biases, to_tile, to_quad, groups, n_end, r);
#pragma unroll
      for (int g = 0; g < QUAD; g++) {
        fetch_codes<BITS, GS, VECTORS>(stages[d], places, g);
      }
      fetch_scales<S, SYMMETRIC, VECTORS>(stages[d], places);
    }
    to_quad++;
    if (to_quad == share) {
      to_quad = 0;
      to_tile += tile_step;
    }
  }
  if (STAGED > 0) {
    stage_x<T, L, GS, BLOCKS == 1 ? ROWS : 8, SIMD_GROUPS, VECTORS>(values, totals, x, m_begin, m_end, groups,
                                                                    simd_group, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  long row[BLOCKS];
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    row[j] = min(m_begin + (j * 8 + r) % ROWS, m_end - 1) * long(k_end) + q * L::CODES;
  }
  float sums[TILES][BLOCKS][4];
  int quad = 0, turn = 0;
#pragma unroll 1
  while (tile < tiles) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      if (tile < tiles) {
        if (quad == 0) {
#pragma unroll
          for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
#pragma unroll
              for (int i = 0; i < 4; i++) {
                sums[t][j][i] = 0.0f;
              }
            }
          }
        }
        if (begin + quad < quads) {
          const bool more = to_tile < tiles && begin + to_quad < quads;
          if (more) {
            find<BITS, GS, TILES, QUAD>(places, w, scales, biases, to_tile, to_quad, groups, n_end, r);
          }
#pragma unroll
          for (int g = 0; g < QUAD; g++) {
            const int group = (begin + quad) * QUAD + g;
            uint b[BLOCKS][L::CODES / 2];
            float total[BLOCKS][2];
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
              if (STAGED > 0) {
#pragma unroll
                for (int i = 0; i < L::CODES / 8; i++) {
                  const uint4 v = values[((group * (L::CODES / 8) + i) * ROWS + r % ROWS) * 4 + q];
                  b[j][4 * i] = v.x;
                  b[j][4 * i + 1] = v.y;
                  b[j][4 * i + 2] = v.z;
                  b[j][4 * i + 3] = v.w;
                }
                total[j][0] = totals[group * ROWS + 2 * q % ROWS];
                total[j][1] = totals[group * ROWS + (2 * q + 1) % ROWS];
              } else {
                load_values<L, VECTORS>(b[j], x + (row[j] + group * GS));
                add_up<T, L>(total[j], b[j], lane);
              }
            }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
              float scale[2], offset[2];
              uint codes[2][L::WORDS];
#pragma unroll
              for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int i = 0; i < L::WORDS; i++) {
                  codes[h][i] = stages[d].codes[t][h][g][i];
                }
                spread_codes<L, BITS>(codes[h], q);
                scale[h] = scale_at<S>(stages[d].scales[t][h], g);
                offset[h] =
                    SYMMETRIC > 0 ? scale[h] * (-0.5f * float(SYMMETRIC)) : scale_at<S>(stages[d].offsets[t][h], g);
              }
#pragma unroll
              for (int j = 0; j < BLOCKS; j++) {
                float product[4];
                multiply<T, L, BITS>(product, codes, b[j], lane);
#pragma unroll
                for (int i = 0; i < 4; i += FEW) {
                  sums[t][j][i] = fma(scale[i / 2], product[i], fma(offset[i / 2], total[j][i % 2], sums[t][j][i]));
                }
              }
            }
            if (more) {
              fetch_codes<BITS, GS, VECTORS>(stages[d], places, g);
            }
          }
          if (more) {
            fetch_scales<S, SYMMETRIC, VECTORS>(stages[d], places);
          }
        }
        to_quad++;
        if (to_quad == share) {
          to_quad = 0;
          to_tile += tile_step;
        }
        quad++;
        if (quad == share) {
          quad = 0;
          threadgroup float* to = part + (BUFFERS == 2 ? turn % 2 : 0) * (SIMD_GROUPS * COLUMNS * ROWS);
#pragma unroll
          for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
#pragma unroll
              for (int i = 0; i < 4; i += FEW) {
                const int m = j * 8 + 2 * q + i % 2;
                if (m < ROWS) {
                  to[(simd_group * COLUMNS + t * 16 + r + i / 2 * 8) * ROWS + m] = sums[t][j][i];
                }
              }
            }
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
          // Another SIMD group's turn each time.
          for (int i = (simd_group + turn) % SIMD_GROUPS * 32 + lane; i < COLUMNS * ROWS; i += 32 * SIMD_GROUPS) {
            const int n = tile * COLUMNS + i / ROWS, m = m_begin + i % ROWS;
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SIMD_GROUPS; s++) {
              sum += to[s * (COLUMNS * ROWS) + i];
            }
            sum *= Pairs<T>::UNIT;
            if (n < n_end && m < m_end) {
              y[long(m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
            }
          }
          if (BUFFERS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
          }
          turn++;
          tile += tile_step;
        }
      }
    }
  }
}

// --- kernel affine_mma ---
constexpr int PART = SIMD_GROUPS * TILES * 16 * ROWS, BUFFERS = PART <= 1536 ? 2 : 1;
constexpr int KEPT = STAGED > 0 ? STAGED * ROWS : 1;
threadgroup uint4 values[KEPT * GS / 8];
threadgroup float totals[KEPT];
threadgroup float part[PART * BUFFERS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
// Arrays that begin between multiples of 16 bytes are views, and rare.
if (aligned(x) && aligned(w) && aligned(scales) && aligned(biases)) {
  affine_mma<T, S, O, BITS, GS, ROWS, TILES, SIMD_GROUPS, QUAD, DEPTH, STAGED, SYMMETRIC, HAS_BIAS, BUFFERS, true>(
      x, w, scales, biases, bias, y, values, totals, part, m_end, w_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
} else {
  affine_mma<T, S, O, BITS, GS, ROWS, TILES, SIMD_GROUPS, QUAD, 1, STAGED, SYMMETRIC, HAS_BIAS, BUFFERS, false>(
      x, w, scales, biases, bias, y, values, totals, part, m_end, w_shape[0], x_shape[x_ndim - 1],
      threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x, threadgroups_per_grid.x,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
