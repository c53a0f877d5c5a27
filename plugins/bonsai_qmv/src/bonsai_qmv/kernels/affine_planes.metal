// Rows of x as operands of affine_bits.metal, in threadgroup memory: 24 planes of bits.
//
// Inputs     x (..., K) of T: half or bfloat
// Output     planes, units, sums and totals as at stage_bits, for the groups of K and zeros up to an octet
//
// Numbers    as in affine_bits.metal. Integers v of 23 bits are the lower bits of a float32 sum; plane p is bit p of
//            v + 2^22, plane 23 all ones
// Memory     for each row and octet 3072 bytes, and 192 for what is known of its groups

// 16 words as two matrices of 16 x 16 bits, their lower and their higher halves, each transposed: bit k of half h of
// word i becomes bit i of half h of word k.
METAL_FUNC void transpose_bits(thread uint* a) {
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const uint low = join_even_bytes(a[k], a[k + 8]);
    a[k + 8] = join_odd_bytes(a[k], a[k + 8]);
    a[k] = low;
  }
  uint mask = 0x0f0f0f0fu;
#pragma unroll
  for (int j = 4; j > 0; j /= 2) {
#pragma unroll
    for (int k = 0; k < 16; k++) {
      if ((k & j) == 0) {
        const uint up = a[k + j] << j, down = a[k] >> j;
        a[k] = mask_select(a[k], up, mask);
        a[k + j] = mask_select(down, a[k + j], mask);
      }
    }
    mask ^= mask << (j / 2);
  }
}

METAL_FUNC uint part_of(uint4 v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Sixteen values of x, an eighth of a group: those of lane `lane` in turn `i`. Zeros beyond the end of K.
template <int ROWS, bool VECTORS, typename XP>
METAL_FUNC void load_x(thread uint* raw, XP x, int i, int m_begin, int m_end, int groups, ushort lane) {
  const int group = (i + lane / 8) / ROWS, m = (i + lane / 8) % ROWS;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    raw[j] = 0;
  }
  if (group < groups) {
    load_words_first<8, VECTORS>(raw, x + (long(min(m_begin + m, m_end - 1)) * groups + group) * 128 + lane % 8 * 16);
  }
}

// x as planes: word q of plane 6 t + 2 j + c of group g at vector [g / 4][row][j][(2 t + c) * 4 + q], element g % 4.
// Units and sums of x over groups as [g / 4][row]; and what sums of x over the codes of a group have too much for each
// t, as [g / 4][row][t]: 1.5 * 2^23 and half the sum of x, of its integer the lower 19 bits with t = 0, where a half
// unit is rounded away, and the others with t = 3.
// Sets `odd`[simd group][row] where numbers are not finite, above 2^120, or all of a group below 2^-50. `raw` is load_x
// of the first AHEAD turns.
template <typename T, int ROWS, int SIMD_GROUPS, int AHEAD, bool VECTORS, typename XP>
METAL_FUNC void stage_bits(threadgroup ushort* planes, threadgroup float* units, threadgroup float* totals,
                           threadgroup float* sums, threadgroup uint* odd, thread uint* raw, XP x, int m_begin,
                           int m_end, int groups, ushort simd_group, ushort lane) {
  const int e = lane % 8, padded = (groups + 7) / 8 * 8;
  uint seen = 0;
#pragma unroll 1
  for (int i = simd_group * 4; i < padded * ROWS; i += SIMD_GROUPS * 4) {
    const int group = (i + lane / 8) / ROWS, m = (i + lane / 8) % ROWS;
    uint most = 0, v[16];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      most = max_halves(most, raw[j] & 0x7fff7fffu);
    }
    most = max(most & 0xffffu, most >> 16);
    most = max(most, simd_shuffle_xor(most, 1));
    most = max(most, simd_shuffle_xor(most, 2));
    most = max(most, simd_shuffle_xor(most, 4));
    const float largest = low_value<T>(most);
    const bool usual = largest == 0.0f || (largest >= 8.8817842e-16f && largest < 1.3292280e36f);
    // The exponent of float32.
    const uint exponent = usual ? max(as_type<uint>(largest) >> 23, 77u) : 127u;
    const float unit = as_type<float>((exponent - 21u) << 23), inverse = as_type<float>((275u - exponent) << 23);
    uint added = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      // 1.5 * 2^23 + v: the lower 23 bits are v + 2^22.
      v[2 * j] = as_type<uint>(fma(low_value<T>(raw[j]), inverse, 12582912.0f));
      v[2 * j + 1] = as_type<uint>(fma(high_value<T>(raw[j]), inverse, 12582912.0f));
      added += v[2 * j] + v[2 * j + 1];
    }
    int sum = usual ? int(added - 16u * 0x4b400000u) : 0;
    // Another turn's values arrive meanwhile.
    if (AHEAD == 2) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        raw[j] = raw[AHEAD * 8 - 8 + j];
      }
    }
    const int later = i + AHEAD * SIMD_GROUPS * 4;
    if (later < padded * ROWS) {
      load_x<ROWS, VECTORS>(raw + (AHEAD * 8 - 8), x, later, m_begin, m_end, groups, lane);
    }
    transpose_bits(v);
    const int at = group / 4 * ROWS + m;
    threadgroup ushort* to = planes + ((at * 96 + e / 2) * 4 + group % 4) * 2 + e % 2;
#pragma unroll
    for (int p = 0; p < 24; p++) {
      const int t = p / 6, column = 2 * t + p % 2;
      to[(p % 6 / 2 * 32 + column * 4) * 8] = p == 23 ? ushort(0xffff) : ushort(p < 16 ? v[p] : v[p - 16] >> 16);
    }
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    sum += simd_shuffle_xor(sum, 4);
    if (e < 4) {
      const float some = e == 0 ? 0.5f * float(sum & 0x7ffff) : e == 3 ? float(sum >> 19) : 0.0f;
      totals[(at * 4 + e) * 4 + group % 4] = unit * (some + 12582912.0f);
    }
    if (e == 0) {
      units[at * 4 + group % 4] = unit;
      sums[at * 4 + group % 4] = float(sum) * unit;
    }
    seen |= usual ? 0u : 1u << m;
  }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    const float any = simd_max((seen >> m & 1u) != 0u ? 1.0f : 0.0f);
    if (lane == 0) {
      odd[simd_group * ROWS + m] = any > 0.0f ? 1u : 0u;
    }
  }
}
