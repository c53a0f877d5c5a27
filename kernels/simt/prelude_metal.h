// Dialect functions over plain Metal, for Metal itself and for the lab.
//
// Sections begin with "//: words" and are taken into a kernel's text where one of the words occurs in it, since mlx
// copies and hashes the whole text at every call. See docs/simt.md for the dialect.

//: aligned
// True if the address is a multiple of 16 bytes, for `load_words`. Metal's takes elements as they are.
template <typename P>
METAL_FUNC constexpr bool aligned(P) {
  return true;
}

//: bits_of load_words stream_words copy_words
METAL_FUNC uint bits_of(uint v) {
  return v;
}
METAL_FUNC uint bits_of(uchar v) {
  return v;
}
METAL_FUNC uint bits_of(float v) {
  return as_type<uint>(v);
}
METAL_FUNC uint bits_of(half v) {
  return as_type<ushort>(v);
}
METAL_FUNC uint bits_of(bfloat v) {
  return as_type<ushort>(v);
}

//: join_low join_high
// Low (high) halves of two words as one word, that of `a` below.
METAL_FUNC uint join_low(uint a, uint b) {
  return (a & 0xffffu) | (b << 16);
}
METAL_FUNC uint join_high(uint a, uint b) {
  return (a >> 16) | (b & 0xffff0000u);
}

//: join_even_bytes join_odd_bytes
// Bytes 0 and 2 of two words, a's then b's in each half; bytes 1 and 3.
METAL_FUNC uint join_even_bytes(uint a, uint b) {
  return (a & 0x00ff00ffu) | (b & 0x00ff00ffu) << 8;
}
METAL_FUNC uint join_odd_bytes(uint a, uint b) {
  return (a >> 8 & 0x00ff00ffu) | (b & 0xff00ff00u);
}

//: max_halves
// The larger lower halves and the larger upper halves of two words, as numbers without sign.
METAL_FUNC uint max_halves(uint a, uint b) {
  return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}

//: mask_or
METAL_FUNC uint mask_or(uint v, uint mask, uint bits) {
  return (v & mask) | bits;
}

//: mask_select
// Bits of a where the mask has ones, of b where it has zeros.
METAL_FUNC uint mask_select(uint a, uint b, uint mask) {
  return (a & mask) | (b & ~mask);
}

//: bf16_pair_fma
// Two bfloat16 in a word, each times `k` plus `c`. For values where that is exact.
METAL_FUNC uint bf16_pair_fma(uint v, float k, float c) {
  const uint low = as_type<uint>(fma(as_type<float>(v << 16), k, c));
  const uint high = as_type<uint>(fma(as_type<float>(v & 0xffff0000u), k, c));
  return (low >> 16) | (high & 0xffff0000u);
}

//: bf16_pair_mul
// Products of the values in two words, where they are exact.
METAL_FUNC uint bf16_pair_mul(uint v, uint k) {
  const uint low = as_type<uint>(as_type<float>(v << 16) * as_type<float>(k << 16));
  const uint high = as_type<uint>(as_type<float>(v & 0xffff0000u) * as_type<float>(k & 0xffff0000u));
  return (low >> 16) | (high & 0xffff0000u);
}

//: f16_pair_fma f16_pair_mul
// The same for two halves in a word.
METAL_FUNC uint f16_pair_fma(uint v, float k, float c) {
  const half2 h = as_type<half2>(v);
  return as_type<uint>(half2(half(fma(float(h.x), k, c)), half(fma(float(h.y), k, c))));
}
METAL_FUNC uint f16_pair_mul(uint v, uint k) {
  return as_type<uint>(half2(as_type<half2>(v) * as_type<half2>(k)));
}

//: f16_pair_fused
// The halves in `a` times those in `b` plus those in `c`, rounded once where float32 holds the result.
METAL_FUNC uint f16_pair_fused(uint a, uint b, uint c) {
  const half2 u = as_type<half2>(a), v = as_type<half2>(b), w = as_type<half2>(c);
  const float low = fma(float(u.x), float(v.x), float(w.x)), high = fma(float(u.y), float(v.y), float(w.y));
  return as_type<uint>(half2(half(low), half(high)));
}

//: low_value high_value mma_16x8x16 mma_16x8x16_first
// Values of T, half or bfloat, in the lower and the higher half of a word.
template <typename T>
METAL_FUNC float low_value(uint v) {
  return float(as_type<half2>(v).x);
}
template <>
METAL_FUNC float low_value<bfloat>(uint v) {
  return as_type<float>(v << 16);
}
template <typename T>
METAL_FUNC float high_value(uint v) {
  return float(as_type<half2>(v).y);
}
template <>
METAL_FUNC float high_value<bfloat>(uint v) {
  return as_type<float>(v & 0xffff0000u);
}

//: pair_least_size pair_sum
// Of two pairs of T: the smaller of |a| and b, which is no NaN; and sums, rounded to T.
template <typename T>
METAL_FUNC uint join_values(float low, float high) {
  return bits_of(T(low)) | bits_of(T(high)) << 16;
}
template <typename T>
METAL_FUNC uint pair_least_size(uint a, uint b) {
  return join_values<T>(min(low_value<T>(a & 0x7fff7fffu), low_value<T>(b)),
                        min(high_value<T>(a & 0x7fff7fffu), high_value<T>(b)));
}
template <typename T>
METAL_FUNC uint pair_sum(uint a, uint b) {
  return join_values<T>(low_value<T>(a) + low_value<T>(b), high_value<T>(a) + high_value<T>(b));
}

//: mma_16x8x16
// d (16x8 float32) += a (16x16) b (16x8), T half or bfloat, by all lanes of a SIMD group. Lane l holds, two values in a
// word, lower column or row first, with r = l / 4 and q = l % 4:
//   a0: row r, columns 2q, 2q+1     a1: row r+8, same     a2: row r, columns 2q+8, 2q+9     a3: row r+8, same
//   b0: rows 2q, 2q+1 of column r   b1: rows 2q+8, 2q+9 of column r
//   d0, d1: row r, columns 2q, 2q+1     d2, d3: row r+8, same
template <typename T>
METAL_FUNC void mma_16x8x16(thread float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort lane) {
  const ushort row = lane / 4 * 4, col = lane % 4 * 8;
  for (ushort i = 0; i < 8; i++) {
    const ushort from = i % 4;
    const uint up = simd_shuffle(i < 4 ? a0 : a2, row + from), down = simd_shuffle(i < 4 ? a1 : a3, row + from);
    const uint left = simd_shuffle(i < 4 ? b0 : b1, col + from);
    const uint right = simd_shuffle(i < 4 ? b0 : b1, ushort(col + 4 + from));
    d[0] = fma(low_value<T>(up), low_value<T>(left), fma(high_value<T>(up), high_value<T>(left), d[0]));
    d[1] = fma(low_value<T>(up), low_value<T>(right), fma(high_value<T>(up), high_value<T>(right), d[1]));
    d[2] = fma(low_value<T>(down), low_value<T>(left), fma(high_value<T>(down), high_value<T>(left), d[2]));
    d[3] = fma(low_value<T>(down), low_value<T>(right), fma(high_value<T>(down), high_value<T>(right), d[3]));
  }
}

//: mma_16x8x16_first
// The same with d = a b.
template <typename T>
METAL_FUNC void mma_16x8x16_first(thread float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort lane) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  mma_16x8x16<T>(d, a0, a1, a2, a3, b0, b1, lane);
}

//: mma_bits_first
// d (16x8 int) = start + number of bits that rows of a (16x128 bits) and columns of b (128x8 bits) share, by all lanes
// of a SIMD group. Lane l holds, with r = l / 4 and q = l % 4:
//   a0: row r, bits 32q ... 32q+31   a1: row r+8, same   b: column r, same
//   d0, d1: row r, columns 2q, 2q+1     d2, d3: row r+8, same
METAL_FUNC void mma_bits_first(thread int* d, uint a0, uint a1, uint b, uint start, ushort lane) {
  const ushort row = lane / 4 * 4, col = lane % 4 * 8;
  d[0] = d[1] = d[2] = d[3] = int(start);
  for (ushort i = 0; i < 4; i++) {
    const uint up = simd_shuffle(a0, ushort(row + i)), down = simd_shuffle(a1, ushort(row + i));
    const uint left = simd_shuffle(b, ushort(col + i)), right = simd_shuffle(b, ushort(col + 4 + i));
    d[0] += popcount(up & left);
    d[1] += popcount(up & right);
    d[2] += popcount(down & left);
    d[3] += popcount(down & right);
  }
}

//: mma_bytes
// d (16x8 int) += a (16x32 bytes without sign) b (32x8 bytes with sign), by all lanes of a SIMD group. Lane l holds,
// four values in a word, the lowest byte first, with r = l / 4 and q = l % 4:
//   a0: row r, columns 4q ... 4q+3   a1: row r+8, same   a2: row r, columns 4q+16 ...   a3: row r+8, same
//   b0: rows 4q ... 4q+3 of column r   b1: rows 4q+16 ... of column r
//   d0, d1: row r, columns 2q, 2q+1     d2, d3: row r+8, same
// With one word of b a is 16x16, a0 and a1.
METAL_FUNC int dot_bytes(uint a, uint b) {
  int sum = 0;
  for (int i = 0; i < 32; i += 8) {
    sum += int(a >> i & 0xffu) * (int(b << (24 - i)) >> 24);
  }
  return sum;
}
METAL_FUNC void mma_bytes(thread int* d, uint a0, uint a1, uint b, ushort lane) {
  const ushort row = lane / 4 * 4, col = lane % 4 * 8;
  for (ushort i = 0; i < 4; i++) {
    const uint up = simd_shuffle(a0, ushort(row + i)), down = simd_shuffle(a1, ushort(row + i));
    const uint left = simd_shuffle(b, ushort(col + i)), right = simd_shuffle(b, ushort(col + 4 + i));
    d[0] += dot_bytes(up, left);
    d[1] += dot_bytes(up, right);
    d[2] += dot_bytes(down, left);
    d[3] += dot_bytes(down, right);
  }
}
METAL_FUNC void mma_bytes(thread int* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort lane) {
  mma_bytes(d, a0, a1, b0, lane);
  mma_bytes(d, a2, a3, b1, lane);
}

//: even_bytes bytes_as_halves
// Bytes 0 and 2 of a, then of b. The lower or upper two bytes of a word as halves 1280 + byte.
METAL_FUNC uint even_bytes(uint a, uint b) {
  return (a & 0xffu) | (a >> 8 & 0xff00u) | (b & 0xffu) << 16 | (b << 8 & 0xff000000u);
}
METAL_FUNC uint bytes_as_halves(uint w, bool upper) {
  const uint v = upper ? w >> 16 : w;
  return (v & 0xffu) | (v & 0xff00u) << 8 | 0x65006500u;
}

//: copy_words copies_end copies_wait
// Copies 1, 2 or 4 words to threadgroup memory, between multiples of as many; on CUDA without waiting. Copies up to a
// copies_end are a bundle, and copies_wait<LEFT> waits until all but the last LEFT bundles of this lane are there; a
// barrier then shows them to other lanes.
template <int COUNT, typename P>
METAL_FUNC void copy_words(threadgroup uint* to, P from) {
  constexpr int EACH = 4 / int(sizeof(from[0]));
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    uint word = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      word |= bits_of(from[i * EACH + j]) << (32 / EACH * j % 32);
    }
    to[i] = word;
  }
}
METAL_FUNC void copies_end() {}
template <int LEFT>
METAL_FUNC void copies_wait() {}

//: load_words
// COUNT words from `from`, an address of elements of two or four bytes. VECTORS says that the address is a multiple of
// COUNT words, or of 16 bytes; then CUDA loads up to 16 bytes at once.
template <int COUNT, bool VECTORS, typename P>
METAL_FUNC void load_words(thread uint* to, P from) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    if (sizeof(from[0]) == 2) {
      to[i] = bits_of(from[2 * i]) | (bits_of(from[2 * i + 1]) << 16);
    } else {
      to[i] = bits_of(from[i]);
    }
  }
}

//: load_words_first
// load_words of one word or a multiple of four, that starts before what comes after it.
template <int COUNT, bool VECTORS, typename P>
METAL_FUNC void load_words_first(thread uint* to, P from) {
  load_words<COUNT, VECTORS>(to, from);
}

//: stream_words
// The same for words that are read once, which need not stay in a cache: elements of four bytes only.
template <int COUNT, bool VECTORS, typename P>
METAL_FUNC void stream_words(thread uint* to, P from) {
  static_assert(sizeof(from[0]) == 4, "stream_words takes elements of four bytes");
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    to[i] = bits_of(from[i]);
  }
}
