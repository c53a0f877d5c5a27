// Rows of x as operands of t5_mma.metal, in threadgroup memory: integers in three bytes for each word of weights.
//
// Inputs     x (..., K) of T: half or bfloat, from device memory or from a copy of it
// Output     fours and fifths: for each word that has bytes of a group, what its quotients by 1, 3, 9, 27 and by 81
//            meet, [row][octet][byte of the integers][slot]; facts, [row][group]: unit of a group and sum of its
//            integers; lefts, [row][group]: how much of |x| is left if its largest meet weights of zero
//
// Numbers    as in t5_mma.metal. Integers v of 22 bits are the lower bits of a float32 sum; what quotient j of a byte
//            meets is v_j - 3 v_(j-1), in digits of base 256 from -128 to 127
// Memory     for each row and octet 60 * SLOTS bytes, SLOTS 60 or with GS 64 68; gaps; 12 bytes for a group

template <int GS>
struct Format {
  // Bytes of a group, and groups of an octet.
  static constant constexpr int BYTES = GS == 128 ? 26 : 13, GROUPS = 1024 / GS;
  // Words that have bytes of a group, and one slot for each in an octet, and one of zeros; four more than a multiple of
  // eight, so that lanes that take neighbouring slots of two bytes of the integers find them in different banks.
  static constant constexpr int WORDS = GS == 128 ? 7 : 4, USED = GROUPS * WORDS, SLOTS = USED + 4;
  // Vectors of an octet's bytes of 16 columns, and of its scales of one.
  static constant constexpr int VECTORS = 208, SCALES = GROUPS / 8;
};

// What is known of a group of a row of x: its unit, and the sum of its integers.
struct Group {
  float unit;
  int sum;
};

// The slot of the word that lane q of four takes in step i, for group g of the octet.
template <int GS>
METAL_FUNC int slot_of(int i, int g, int q) {
  typedef Format<GS> F;
  const int first = g * F::BYTES / 4 - 4 * i, last = ((g + 1) * F::BYTES - 1) / 4 - 4 * i;
  return (first <= 0 || q >= first) && (last >= 3 || q <= last) ? g * F::WORDS - first + q : F::USED;
}

// Words between the fifths of rows of x, whose sizes then leave 16 or 8 of 32 banks: lanes of several rows and bytes
// find theirs in different ones.
constexpr METAL_FUNC int gap_of(int rows, int size) {
  return rows == 1 ? 0 : ((rows == 2 ? 48 : 40) - size % 32) % 32;
}

// The words of a group that lanes make something of together, a lane each, and one more lane with groups of 128: which
// word, group and row turn `i` of a lane is about, and where its twenty numbers of x begin.
template <int GS, int ROWS>
struct Turn {
  static constant constexpr int LANES = GS == 128 ? 8 : 4;
  int word, row, group, first;
  // From here on, GS of the twenty belong to the group.
  int begin;
};
template <int GS, int ROWS>
METAL_FUNC Turn<GS, ROWS> turn_of(int i, int groups) {
  typedef Format<GS> F;
  Turn<GS, ROWS> t;
  t.word = i % Turn<GS, ROWS>::LANES;
  t.row = i / Turn<GS, ROWS>::LANES % ROWS;
  t.group = i / (Turn<GS, ROWS>::LANES * ROWS);
  const int begin = (t.group % F::GROUPS * F::BYTES % 4 - t.word * 4) * 5;
  t.first = t.group * GS - begin;
  // None beyond the end of K.
  t.begin = t.group < groups ? begin : GS;
  return t;
}

// These numbers as pairs, zeros instead of those of other groups: from a copy of x, [row][k].
template <int GS, int ROWS>
METAL_FUNC void take_x(thread uint* raw, threadgroup const uint* xs, int i, int groups, int k_end) {
  const Turn<GS, ROWS> t = turn_of<GS, ROWS>(i, groups);
  const int at = t.row * k_end + t.first;
#pragma unroll
  for (int j = 0; j < 10; j++) {
    const bool low = uint(2 * j - t.begin) < uint(GS), high = uint(2 * j + 1 - t.begin) < uint(GS);
    if (GS == 128) {
      // Groups begin and end between pairs.
      raw[j] = low ? xs[at / 2 + j] : 0u;
    } else {
      threadgroup const ushort* halves = (threadgroup const ushort*)xs + at;
      raw[j] = (low ? uint(halves[2 * j]) : 0u) | (high ? uint(halves[2 * j + 1]) << 16 : 0u);
    }
  }
}

// The same from x itself.
template <int GS, int ROWS, bool VECTORS, typename XP>
METAL_FUNC void load_x(thread uint* raw, XP x, int i, int groups, int m_begin, int m_end, int k_end) {
  const Turn<GS, ROWS> t = turn_of<GS, ROWS>(i, groups);
  const auto from = x + (long(min(m_begin + t.row, m_end - 1)) * k_end + t.first);
#pragma unroll
  for (int j = 0; j < 10; j++) {
    raw[j] = 0;
    const bool low = uint(2 * j - t.begin) < uint(GS), high = uint(2 * j + 1 - t.begin) < uint(GS);
    if (GS == 128 && VECTORS) {
      if (low) {
        load_words_first<1, true>(raw + j, from + 2 * j);
      }
    } else {
      raw[j] = (low ? uint(bits_of(from[2 * j])) : 0u) | (high ? uint(bits_of(from[2 * j + 1])) << 16 : 0u);
    }
  }
}

// What the quotients of a word of bytes of one group meet, for its slot: fours (quotients 0 ... 3) and fifths, as
// [row][octet][byte of the integers][slot]; and groups' facts, [row][group]. `raw` is x of the first AHEAD turns; it is
// `xs` if COPIED.
template <typename T, int GS, int ROWS, int SIMD_GROUPS, int ZEROS, int AHEAD, bool COPIED, bool VECTORS, typename XP>
METAL_FUNC void stage_x(threadgroup uint4* fours, threadgroup uint* fifths, threadgroup Group* facts,
                        threadgroup float* lefts, thread uint* raw, threadgroup const uint* xs, XP x, int octets,
                        int m_begin, int m_end, int k_end, int thread_index) {
  typedef Format<GS> F;
  // 1.5 * 2^23 and a bit less, as bits: minus twice them end in 0x808080.
  constexpr uint MAGIC = 0x4b3fbfc0u;
  constexpr int LANES = Turn<GS, ROWS>::LANES;
  const int count = octets * F::GROUPS * LANES * ROWS, groups = k_end / GS;
  if (GS == 64) {
    // Slots of zeros.
    for (int i = thread_index; i < octets * ROWS * 3; i += 32 * SIMD_GROUPS) {
      const uint4 zeros = {0, 0, 0, 0};
      fours[i * F::SLOTS + F::USED] = zeros;
      fifths[i * F::SLOTS + F::USED + i / (octets * 3) * gap_of(ROWS, octets * 3 * F::SLOTS)] = 0;
    }
  }
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 32 * SIMD_GROUPS) {
    const int i = begin + thread_index;
    uint most = 0;
#pragma unroll
    for (int j = 0; j < 10; j++) {
      most = max_halves(most, raw[j] & 0x7fff7fffu);
    }
    most = max(most & 0xffffu, most >> 16);
#pragma unroll
    for (int j = 1; j < LANES; j *= 2) {
      most = max(most, simd_shuffle_xor(most, j));
    }
    const float largest = low_value<T>(most);
    const uint cap = bits_of(T(largest * 0.03125f)) * 0x00010001u;
    const uint exponent = min(max(as_type<uint>(largest * 1.0078125f) >> 23, 24u), 253u);
    const float unit = as_type<float>((exponent - 20u) << 23), inverse = as_type<float>((274u - exponent) << 23);
    uint lefts_of = 0;
#pragma unroll
    for (int j = 0; j < 10; j++) {
      lefts_of = pair_sum<T>(lefts_of, pair_least_size<T>(raw[j], cap));
    }
    // Sums in T are not exact.
    float left = 0.95f * (low_value<T>(lefts_of) + high_value<T>(lefts_of));
    uint v[5][4], sum = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      uint before = MAGIC;
#pragma unroll
      for (int j = 0; j < 5; j++) {
        const uint pair = raw[(b * 5 + j) / 2];
        const float value = (b * 5 + j) % 2 == 0 ? low_value<T>(pair) : high_value<T>(pair);
        // MAGIC + v, and v - 3 times the one before + 0x808080.
        const uint now = as_type<uint>(fma(value, inverse, as_type<float>(MAGIC)));
        sum += now;
        v[j][b] = now - 3u * before;
        before = now;
      }
    }
    sum -= 20u * MAGIC;
#pragma unroll
    for (int j = 1; j < LANES; j *= 2) {
      left += simd_shuffle_xor(left, j);
      sum += simd_shuffle_xor(sum, j);
    }
    const Turn<GS, ROWS> t = turn_of<GS, ROWS>(i, groups);
    if (AHEAD == 2) {
#pragma unroll
      for (int j = 0; j < 10; j++) {
        raw[j] = raw[AHEAD * 10 - 10 + j];
      }
    }
    const int next = i + AHEAD * 32 * SIMD_GROUPS;
    if (COPIED) {
      take_x<GS, ROWS>(raw, xs, next, next < count ? groups : 0, k_end);
    } else {
      load_x<GS, ROWS, VECTORS>(raw + (AHEAD * 10 - 10), x, next, next < count ? groups : 0, m_begin, m_end, k_end);
    }
    if (i < count && t.word == 0) {
      const int to_group = t.row * octets * F::GROUPS + t.group;
      Group g;
      g.unit = unit;
      g.sum = int(sum);
      facts[to_group] = g;
      // NaN and infinity are not finite here either, and compare false later on.
      // Nothing left is not the same as nothing there.
      const float rest = left - low_value<T>(cap) * (float(GS) * float(ZEROS) / 128.0f);
      lefts[to_group] = !(largest < INFINITY) ? largest - largest : rest == 0.0f && largest > 0.0f ? -largest : rest;
    }
    // The last lane of an octet has what the slot of zeros is for.
    const int local = t.group % F::GROUPS;
    if (i < count && (t.word < F::WORDS || local == F::GROUPS - 1)) {
      const int to = (t.row * octets + t.group / F::GROUPS) * 3 * F::SLOTS + local * F::WORDS + t.word;
      uint planes[3][5];
#pragma unroll
      for (int j = 0; j < 5; j++) {
        const uint a = join_even_bytes(v[j][0], v[j][1]), b = join_even_bytes(v[j][2], v[j][3]);
        planes[0][j] = join_low(a, b);
        planes[2][j] = join_high(a, b);
        planes[1][j] = join_low(join_odd_bytes(v[j][0], v[j][1]), join_odd_bytes(v[j][2], v[j][3]));
      }
      // Digits of base 256 in -128 ... 127.
#pragma unroll
      for (int p = 0; p < 3; p++) {
        uint4 four;
        four.x = planes[p][0] ^ 0x80808080u;
        four.y = planes[p][1] ^ 0x80808080u;
        four.z = planes[p][2] ^ 0x80808080u;
        four.w = planes[p][3] ^ 0x80808080u;
        fours[to + p * F::SLOTS] = four;
        fifths[to + p * F::SLOTS + t.row * gap_of(ROWS, octets * 3 * F::SLOTS)] = planes[p][4] ^ 0x80808080u;
      }
    }
  }
}

// Whether integers represent a row of x not well enough; `facts` and `lefts` are the row's.
template <int GS, int RATIO>
METAL_FUNC bool is_unfit(threadgroup const Group* facts, threadgroup const float* lefts, int octets, int k_end,
                         ushort lane) {
  float units = 0.0f, left = 0.0f;
  for (int g = lane; g < octets * (1024 / GS); g += 32) {
    // Not so small that its square is none.
    const float unit = max(facts[g].unit, 2.8e-17f), some = lefts[g];
    // A group of zeros has no part in it.
    units = fma(unit, some != 0.0f ? unit : 0.0f, units);
    left += max(some, 0.0f) + (some - some);
  }
  units = simd_sum(units);
  left = simd_sum(left);
  const float error = 28.3f / 16.0f * float(RATIO) * sqrt(units);
  // Both may be infinite.
  return !(error < INFINITY && error <= 4.0f / 16777216.0f * sqrt(float(k_end)) * left);
}
