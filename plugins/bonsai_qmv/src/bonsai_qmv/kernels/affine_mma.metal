// Products of 1 to 16 rows with affine weights by matrix instructions: the weights of 16 columns are one operand, up to
// 8 or 16 rows of x the other, so that the time hardly depends on the number of rows.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / GS] * code[n, k] + biases[n, k / GS])  (+ bias[n])
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K * BITS / 32) uint; scales, biases (N, K / GS) of S; bias (N) of B:
//            as in affine_qmv.metal, biases unread if SYMMETRIC, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   BITS 1, 2, 4, and 8 with T half; GS 32, 64 or 128; ROWS 1, 8 or 16, rows of x at a time; TILES of 16 columns
//            a SIMD group works on; DEPTH groups of weights that are fetched ahead
// Edges      any N; any M; K is a multiple of GS
// Bytes      as in affine_qmv.metal, read once for each ROWS rows of x
// Numbers    exactness `rounding`: codes are exact in T, products exact, sums in float32. Row-invariant: the order of
//            sums does not depend on M or ROWS. It depends on SIMD_GROUPS, which must follow from the layer alone
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes; threadgroup (i, j) makes columns [i, i + 1) * 16 * TILES of rows
//            [j, j + 1) * ROWS. Each SIMD group takes an equal share of the groups of weights, in their order
// Threadgroup memory   SIMD_GROUPS * TILES * 16 * ROWS floats
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

// The words that hold quarter q of the group that begins at word `from`.
template <typename L, int BITS, typename W>
METAL_FUNC void load_codes(thread uint* to, W from, int q, bool vectors) {
  if (L::CODES * BITS >= 32) {
    load_words<L::WORDS>(to, from + q * L::WORDS, vectors);
  } else {
    to[0] = from[q * (L::CODES * BITS) / 32];
  }
}

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

// The values of x that meet those codes, in the order of the units.
template <typename L, typename X>
METAL_FUNC void load_values(thread uint* to, X from, bool vectors) {
  uint raw[L::CODES / 2];
  load_words<L::CODES / 2>(raw, from, vectors);
#pragma unroll
  for (int v = 0; v < L::WORDS; v++) {
#pragma unroll
    for (int j = 0; j < L::HALF; j++) {
      const uint low = raw[(2 * v * L::HALF + j) / 2], high = raw[(2 * v * L::HALF + L::HALF + j) / 2];
      to[v * L::HALF + j] = j % 2 == 0 ? join_low(low, high) : join_high(low, high);
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
      const uint b0 = b[u * L::STEP + c], b1 = b[(u + 1) * L::STEP + c];
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

// Sums of the values of a group, for the rows of x that this lane has results of.
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
      const uint b0 = b[u * L::STEP + c], b1 = b[(u + 1) * L::STEP + c];
      if (i < 2) {
        mma_16x8x16_first<T>(d[i], ones, ones, ones, ones, b0, b1, lane);
      } else {
        mma_16x8x16<T>(d[i % 2], ones, ones, ones, ones, b0, b1, lane);
      }
    }
  }
  total[0] = d[0][0] + d[1][0];
  total[1] = d[0][1] + d[1][1];
}

// One group of weights of all tiles as a lane fetches it; nothing waits for it before it is used.
template <typename L, typename S, int TILES>
struct Stage {
  uint codes[TILES][2][L::WORDS];
  S scale[TILES][2], offset[TILES][2];
};

// Where a lane finds its weights: offsets from the first column of the threadgroup, for its columns of each tile.
template <int TILES>
struct Places {
  int words[TILES][2], scales[TILES][2];
};

template <typename L, typename S, int BITS, int GS, int TILES, int SYMMETRIC, typename WP, typename SP>
METAL_FUNC void load_stage(thread Stage<L, S, TILES>& to, WP w, SP scales, SP biases, thread const Places<TILES>& at,
                           int group, int q, bool vectors) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      load_codes<L, BITS>(to.codes[t][h], w + (at.words[t][h] + group * (GS / 32 * BITS)), q, vectors);
      to.scale[t][h] = scales[at.scales[t][h] + group];
      if (SYMMETRIC == 0) {
        to.offset[t][h] = biases[at.scales[t][h] + group];
      }
    }
  }
}

template <typename T, typename S, typename O, int BITS, int GS, int ROWS, int TILES, int SIMD_GROUPS, int DEPTH,
          int SYMMETRIC, bool HAS_BIAS, typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void affine_mma(XP x, WP w, SP scales, SP biases, BP bias, device O* y, threadgroup float* part, int m_end,
                           int n_end, int k_end, int m_begin, int n_begin, ushort simd_group, ushort lane) {
  typedef Layout<T, BITS, GS> L;
  constexpr int BLOCKS = ROWS > 8 ? ROWS / 8 : 1, FEW = ROWS == 1 ? 2 : 1;
  const int r = lane / 4, q = lane % 4, groups = k_end / GS, words = k_end / 32 * BITS;
  const bool x_vectors = aligned(x), w_vectors = aligned(w);
  // Columns and rows beyond the end are the last one again; they are computed and not stored.
  Places<TILES> places;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = min(t * 16 + r + h * 8, n_end - 1 - n_begin);
      places.words[t][h] = column * words;
      places.scales[t][h] = column * groups;
    }
  }
  const WP w_begin = w + long(n_begin) * words;
  const SP scales_begin = scales + long(n_begin) * groups, biases_begin = biases + long(n_begin) * groups;
  long row[BLOCKS];
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    row[j] = min(m_begin + j * 8 + r, m_end - 1) * long(k_end) + q * L::CODES;
  }
  float sums[TILES][BLOCKS][4];
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
  const int share = (groups + SIMD_GROUPS - 1) / SIMD_GROUPS;
  const int begin = simd_group * share, end = min(begin + share, groups);
  Stage<L, S, TILES> stages[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    if (begin + d < end) {
      load_stage<L, S, BITS, GS, TILES, SYMMETRIC>(stages[d], w_begin, scales_begin, biases_begin, places, begin + d, q,
                                                   w_vectors);
    }
  }
#pragma unroll 1
  for (int first = begin; first < end; first += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int group = first + d;
      if (group < end) {
        uint b[BLOCKS][L::CODES / 2];
        float total[BLOCKS][2];
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          load_values<L>(b[j], x + (row[j] + group * GS), x_vectors);
          add_up<T, L>(total[j], b[j], lane);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          float scale[2], offset[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            spread_codes<L, BITS>(stages[d].codes[t][h], q);
            scale[h] = float(stages[d].scale[t][h]);
            offset[h] = SYMMETRIC > 0 ? scale[h] * (-0.5f * float(SYMMETRIC)) : float(stages[d].offset[t][h]);
            scale[h] *= Pairs<T>::UNIT;
          }
#pragma unroll
          for (int j = 0; j < BLOCKS; j++) {
            float product[4];
            multiply<T, L, BITS>(product, stages[d].codes[t], b[j], lane);
#pragma unroll
            for (int i = 0; i < 4; i += FEW) {
              sums[t][j][i] = fma(scale[i / 2], product[i], fma(offset[i / 2], total[j][i % 2], sums[t][j][i]));
            }
          }
        }
        if (group + DEPTH < end) {
          load_stage<L, S, BITS, GS, TILES, SYMMETRIC>(stages[d], w_begin, scales_begin, biases_begin, places,
                                                       group + DEPTH, q, w_vectors);
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
#pragma unroll
      for (int i = 0; i < 4; i += FEW) {
        if (ROWS > 1 || q == 0) {
          const int at = simd_group * TILES * 16 + t * 16 + r + i / 2 * 8;
          part[at * ROWS + (ROWS > 1 ? j * 8 + 2 * q + i % 2 : 0)] = sums[t][j][i];
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = simd_group * 32 + lane; i < TILES * 16 * ROWS; i += 32 * SIMD_GROUPS) {
    const int n = n_begin + i % (TILES * 16), m = m_begin + i / (TILES * 16);
    float sum = 0.0f;
    for (int s = 0; s < SIMD_GROUPS; s++) {
      sum += part[(s * TILES * 16 + i % (TILES * 16)) * ROWS + i / (TILES * 16)];
    }
    if (n < n_end && m < m_end) {
      y[long(m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
    }
  }
}

// --- kernel affine_mma ---
threadgroup float part[SIMD_GROUPS * TILES * 16 * ROWS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
affine_mma<T, S, O, BITS, GS, ROWS, TILES, SIMD_GROUPS, DEPTH, SYMMETRIC, HAS_BIAS>(
    x, w, scales, biases, bias, y, part, m_end, w_shape[0], x_shape[x_ndim - 1],
    threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x * (16 * TILES),
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
