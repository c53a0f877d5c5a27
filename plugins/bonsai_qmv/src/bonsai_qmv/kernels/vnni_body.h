/* y = x @ W.T (+ bias) for 1..16 rows of x by integer dot products: 1, 2, 4 and 8 bits, AVX-512 VNNI.
 *
 * Layout     W as in qmv_body.h: code j of a row at bits [j * bits, (j + 1) * bits), LSB first. A line is 64 bytes of a
 *            row of W, 512 / bits codes, sixteen words in the lanes of a register; a group of 32, 64 or 128 codes is a
 *            number of whole words (1 ... 32), a quad four words.
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. x enters as fixed point of 24 bits (planes.h), v * unit. For each group g of a row of W
 *
 *              T = sum of (code - center) * v, U = sum of v       exact integers, each rounded once to float32
 *              sum[g % 4] = fma(U, bias + center * scale, fma(T, scale, sum[g % 4]))
 *
 *            in the order of the groups, and y = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * unit (+ bias). With the
 *            center in the middle of the codes both parts are as small as the weights are, so that nothing cancels that
 *            the weights do not cancel. This order is that of amx_small_body.h too: both give the same bits
 *            (tests/test_order.py has it in numpy).
 * Integers   |v| <= 8323200 and |code - center| <= 1, 2, 8, 128. T of a quad is below 2^31 for 1, 2 and 4 bits, and so
 *            is that of a group but for 4 bits with groups of 64 and 128: there the sums of quads are split at 16 bits,
 *            both parts added up, and put together in float32, where each is exact and their sum is rounded once.
 *            8 bits have two sums, of hi * 256 + mid (below 2^30 in a group) and of lo (below 2^22), which are split
 *            likewise. What overflows on the way does so modulo 2^32 and does no harm.
 * Rows       Independent of each other, whatever other rows, outputs or threads there are.
 * Method     One shift and one mask (or, with GFNI, one instruction) turn a register of packed codes into 64 bytes, and
 *            one vpdpbusd a plane multiplies and adds 64 codes. Four rows of W share every load of x; their words are
 *            added up in a tree that ends with a chunk, four groups of four rows in one register, so that rounding,
 *            scales and biases cost a sixteenth of an instruction a group. With several rows of x, codes are unpacked
 *            once for all.
 * Streams    With one row of x, on AMD's processors, the four rows of W are not neighbours but lie a quarter of a
 *            piece apart, and the next four follow them: each is the continuation of a long run of memory, which the
 *            processor's prefetcher follows. (Zen 4, two threads, 4096x4096: 267 -> 221 us with 2 bits, 396 -> 317
 *            with 4. With more rows of x, whose time is arithmetic, it is 3 % slower.)
 * Pairs      Rows of W that end in the middle of a line follow each other without a gap: two of them are a row of whole
 *            lines, whose x is x twice.
 * Symmetric  If bias = -ratio * scale holds exactly for the whole layer, biases are not read.
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_VNNI_BODY_H
#define BONSAI_QMV_VNNI_BODY_H

#include <accel/processor.h>
#include <math.h>

#include "planes.h"

namespace bonsai {
namespace {

/* Chunks of four groups whose scales are converted at a time. */
constexpr int kChunkBlock = 64;

/* Bytes to fetch ahead: far enough for memory to answer, by the second-level cache, which has room for more requests
 * than the first, and from there in time. */
constexpr int64_t kFar = 16384, kNear = 2048;
/* The same for streams, to the second-level cache alone, and rows of W whose scales are fetched ahead. */
constexpr int64_t kStreamFar = 2048, kScalesAhead = 4;

/* Four streams of W at a time: four rows, or four pairs of neighbouring rows. */
constexpr int kStreams = 4;

/* WORDS: of a group. */
template <int BITS, int WORDS>
struct Vnni {
  using L = Line<BITS>;
  static constexpr int kSteps = L::kSteps;
  static constexpr bool kParts = BITS == 8;                       /* sums of hi * 256 + mid and of lo stay apart */
  static constexpr bool kWide = kParts || (BITS == 4 && WORDS > 4); /* a group's sum needs more than 32 bits */
  static constexpr bool kLate = WORDS > 4 && (kParts || !kWide);  /* centers count for groups, not for quads */
  static constexpr int kLines = WORDS > 4 ? WORDS / 4 : 1;        /* of a step */
  static constexpr int kChunks = WORDS < 4 ? 4 / WORDS : 1;       /* of four groups, of a step */

  struct Job {
    const Problem* p;
    const L* lines; /* of x: [line][row] */
    const float* totals; /* [row][group], rows `total_stride` apart */
    int64_t total_stride;
    const float* unit; /* per row */
    const int32_t* rows; /* which rows of the call these are; they are `count` */
    int count;
    bool pairs;                   /* rows of W are taken in pairs, as one of twice the length */
    int64_t grain, pieces, lanes; /* units per piece; how many pieces, and threads that take them in turns */
    int64_t far, near;            /* bytes from what is read to what is fetched to the second and first level */
    bool streams;                 /* the four rows (or pairs) at a time lie apart */
  };

  /* The codes of step i of a line; AFFINE: with GFNI, where there is GFNI. */
  template <bool AFFINE = true>
  static inline __attribute__((always_inline)) __m512i unpack(__m512i packed, int i) {
    if constexpr (BITS == 8) return packed;
    const __m512i mask = _mm512_set1_epi8((char)((1u << BITS) - 1));
#ifdef BONSAI_GFNI
    if (AFFINE && i > 0) {
      /* Bit b of a byte of the result is bit b + i * BITS of the byte. */
      uint64_t rows = 0;
      for (int b = 0; b < BITS; ++b) rows |= (uint64_t)1 << (b + i * BITS + 8 * (7 - b));
      return _mm512_gf2p8affine_epi64_epi8(packed, _mm512_set1_epi64((long long)rows), 0);
    }
#endif
    return _mm512_and_si512(i ? _mm512_srli_epi32(packed, (unsigned)(i * BITS)) : packed, mask);
  }

  /* Sums of the words of a line of four streams: one per stream, or two where parts stay apart. */
  static inline __attribute__((always_inline)) void dots(const __m512i (&packed)[kStreams], const L& x,
                                                         __m512i (&sum)[kStreams], __m512i (&low)[kStreams]) {
    if constexpr (BITS == 8) {
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) {
        sum[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), packed[r], x.plane[0][0]);
        low[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), packed[r], x.plane[2][0]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) {
        sum[r] = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum[r], 8), packed[r], x.plane[1][0]);
      }
    } else if constexpr (BITS <= 2) {
      __m512i part[kStreams][3];
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) part[r][0] = part[r][1] = part[r][2] = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < kSteps; ++i) {
        const __m512i d0 = x.plane[0][i], d1 = x.plane[1][i], d2 = x.plane[2][i];
#pragma GCC unroll 4
        for (int r = 0; r < kStreams; ++r) {
          const __m512i codes = unpack<BITS != 2>(packed[r], i); /* 2 bits: no gain */
          part[r][0] = _mm512_dpbusd_epi32(part[r][0], codes, d0);
          part[r][1] = _mm512_dpbusd_epi32(part[r][1], codes, d1);
          part[r][2] = _mm512_dpbusd_epi32(part[r][2], codes, d2);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) {
        const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(part[r][0], 8), part[r][1]);
        sum[r] = _mm512_add_epi32(_mm512_slli_epi32(high, 8), part[r][2]);
      }
    } else {
      __m512i codes[kStreams][kSteps], lo[kStreams];
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) {
        sum[r] = lo[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < kSteps; ++i) codes[r][i] = unpack(packed[r], i);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kSteps; ++i) {
        const __m512i d0 = x.plane[0][i], d2 = x.plane[2][i];
#pragma GCC unroll 4
        for (int r = 0; r < kStreams; ++r) sum[r] = _mm512_dpbusd_epi32(sum[r], codes[r][i], d0);
#pragma GCC unroll 4
        for (int r = 0; r < kStreams; ++r) lo[r] = _mm512_dpbusd_epi32(lo[r], codes[r][i], d2);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) sum[r] = _mm512_slli_epi32(sum[r], 8);
#pragma GCC unroll 4
      for (int i = 0; i < kSteps; ++i) {
        const __m512i d1 = x.plane[1][i];
#pragma GCC unroll 4
        for (int r = 0; r < kStreams; ++r) sum[r] = _mm512_dpbusd_epi32(sum[r], codes[r][i], d1);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kStreams; ++r) sum[r] = _mm512_add_epi32(_mm512_slli_epi32(sum[r], 8), lo[r]);
    }
  }

  /* Sixteen words of four streams -> sums of quads of words, [stream][quad]. */
  static inline __attribute__((always_inline)) __m512i quads(const __m512i (&s)[kStreams]) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]), _mm512_unpackhi_epi32(s[0], s[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]), _mm512_unpackhi_epi32(s[2], s[3]));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 16, 20, 24, 28, 17, 21, 25, 29);
    const __m512i second = _mm512_setr_epi32(2, 6, 10, 14, 3, 7, 11, 15, 18, 22, 26, 30, 19, 23, 27, 31);
    return _mm512_add_epi32(_mm512_permutex2var_epi32(a, first, b), _mm512_permutex2var_epi32(a, second, b));
  }
  /* Neighbours of a, then of b, added within each stream. */
  static inline __attribute__((always_inline)) __m512i halves(__m512i a, __m512i b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
  }
  static inline __attribute__((always_inline)) __m512i tree(const __m512i* q) {
    if constexpr (kLines == 1) return q[0];
    else if constexpr (kLines == 2) return halves(q[0], q[1]);
    else if constexpr (kLines == 4) return halves(halves(q[0], q[1]), halves(q[2], q[3]));
    else return halves(halves(halves(q[0], q[1]), halves(q[2], q[3])), halves(halves(q[4], q[5]), halves(q[6], q[7])));
  }
  static inline __attribute__((always_inline)) __m512i four(const int32_t* from) {
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)from));
  }

  /* The sums of the groups of a step, rounded to float32: [chunk], each [stream][group].
   *   high, low  what of_line made
   *   x          the first line of the step */
  static inline __attribute__((always_inline)) void groups(const __m512i* high, const __m512i* low, const L& x,
                                                           __m512* t) {
    if constexpr (kLate && !kWide && kCenter<BITS> != 0) {
      t[0] = _mm512_cvtepi32_ps(_mm512_add_epi32(tree(high), four(x.start[0])));
    } else if constexpr (!kWide) {
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) t[c] = _mm512_cvtepi32_ps(kChunks > 1 ? high[c] : tree(high));
    } else if constexpr (kParts) {
      const __m512i h = _mm512_add_epi32(tree(high), four(x.start[0]));
      const __m512i l = _mm512_add_epi32(tree(low), four(x.start[1]));
      const __m512i rest = _mm512_and_si512(_mm512_slli_epi32(h, 8), _mm512_set1_epi32(0xffff));
      t[0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(h, 8)), _mm512_set1_ps(65536.0f),
                             _mm512_cvtepi32_ps(_mm512_add_epi32(rest, l)));
    } else {
      t[0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(tree(high)), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(tree(low)));
    }
  }

  /* A line as quads, minus their centers unless groups get these later (with halves of 16 bits apart, where a group
   * needs that), or, where groups are smaller than quads, as chunks. */
  static inline __attribute__((always_inline)) void of_line(const __m512i (&packed)[kStreams], const L& x,
                                                            __m512i* high, __m512i* low) {
    __m512i s[kStreams], l[kStreams];
    dots(packed, x, s, l);
    if constexpr (WORDS == 1) {
      const __m512i a = _mm512_shuffle_i32x4(s[0], s[1], 0x44), b = _mm512_shuffle_i32x4(s[2], s[3], 0x44);
      const __m512i c = _mm512_shuffle_i32x4(s[0], s[1], 0xee), d = _mm512_shuffle_i32x4(s[2], s[3], 0xee);
      high[0] = _mm512_shuffle_i32x4(a, b, 0x88);
      high[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
      high[2] = _mm512_shuffle_i32x4(c, d, 0x88);
      high[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
    } else if constexpr (WORDS == 2) {
      const __m512i a = halves(s[0], s[1]), b = halves(s[2], s[3]);
      const __m512i first = _mm512_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7, 16, 17, 20, 21, 18, 19, 22, 23);
      const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
      high[0] = _mm512_permutex2var_epi32(a, first, b);
      high[1] = _mm512_permutex2var_epi32(a, second, b);
      if constexpr (kCenter<BITS> != 0) {
        high[0] = _mm512_add_epi32(high[0], four(x.start[0]));
        high[1] = _mm512_add_epi32(high[1], four(x.start[0] + 4));
      }
    } else {
      *high = quads(s);
      if constexpr (kCenter<BITS> != 0 && !kLate) *high = _mm512_add_epi32(*high, four(x.start[0]));
      if constexpr (kParts) {
        *low = quads(l);
      } else if constexpr (kWide) {
        *low = _mm512_and_si512(*high, _mm512_set1_epi32(0xffff));
        *high = _mm512_srai_epi32(*high, 16);
      }
    }
  }

  struct Scales {
    alignas(64) float scale[kChunkBlock + 4][16], offset[kChunkBlock + 4][16];
  };

  /* Scales of chunks c0 ... c0 + chunks of four streams, and bias + center * scale: [chunk][stream][group], zeros for
   * groups that are not there. */
  static inline void prepare(const Job& job, int64_t n0, int64_t stride, int64_t n_groups, int64_t c0, int64_t chunks,
                             bool has_offset, Scales& to) {
    const Problem& p = *job.p;
    const bool biased = !p.symmetric;
    const __m512 center = _mm512_set1_ps((float)kCenter<BITS> - p.ratio);
    const int64_t g0 = c0 * 4, n = min64(chunks * 4, n_groups - g0);
    collect(p.scales, p.s_dtype, p.s_stride, n0, stride, g0, n, to.scale);
    if (has_offset) {
      if (biased) collect(p.biases, p.b_dtype, p.b_stride, n0, stride, g0, n, to.offset);
      for (int64_t c = 0; c < chunks; ++c) {
        const __m512 b = biased ? _mm512_load_ps(to.offset[c]) : _mm512_setzero_ps();
        _mm512_store_ps(to.offset[c], _mm512_fmadd_ps(center, _mm512_load_ps(to.scale[c]), b));
      }
    }
    /* A step may have more chunks than there are. */
    for (int64_t c = chunks; kChunks > 1 && c < ceil_div(chunks, kChunks) * kChunks; ++c) {
      _mm512_store_ps(to.scale[c], _mm512_setzero_ps());
      _mm512_store_ps(to.offset[c], _mm512_setzero_ps());
    }
  }

  static inline void collect(const void* from, int32_t dtype, const int64_t* strides, int64_t n0, int64_t stride,
                             int64_t g0, int64_t n, float (*to)[16]) {
    const int64_t whole = n / 4, rest = n % 4;
    int64_t at[kStreams];
    for (int r = 0; r < kStreams; ++r) at[r] = (n0 + r * stride) * strides[0] + g0 * strides[1];
    if (strides[1] != 1) {
      for (int64_t g = 0; g < (n + 3) / 4 * 4; ++g) {
        for (int r = 0; r < kStreams; ++r) {
          to[g / 4][r * 4 + g % 4] = g < n ? accel_load_float(from, at[r] + g * strides[1], dtype) : 0;
        }
      }
      return;
    }
    if (dtype == ACCEL_FLOAT32) {
      const float* f = (const float*)from;
      for (int r = 0; r < kStreams; ++r) {
        for (int64_t c = 0; c < whole; ++c) _mm_store_ps(to[c] + r * 4, _mm_loadu_ps(f + at[r] + c * 4));
        if (rest) {
          _mm_store_ps(to[whole] + r * 4, _mm_maskz_loadu_ps((__mmask8)((1 << rest) - 1), f + at[r] + whole * 4));
        }
      }
      return;
    }
    const uint16_t *h0 = (const uint16_t*)from + at[0], *h1 = (const uint16_t*)from + at[1];
    const uint16_t *h2 = (const uint16_t*)from + at[2], *h3 = (const uint16_t*)from + at[3];
    auto put = [&](__m128i a, __m128i b, float* out) __attribute__((always_inline)) {
      const __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
      _mm512_store_ps(out, dtype == ACCEL_FLOAT16
                               ? _mm512_cvtph_ps(v)
                               : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)));
    };
    auto two = [](const uint16_t* a, const uint16_t* b) __attribute__((always_inline)) {
      return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd((const double*)a), (const double*)b));
    };
    for (int64_t c = 0; c < whole; ++c) {
      put(two(h0 + c * 4, h1 + c * 4), two(h2 + c * 4, h3 + c * 4), to[c]);
    }
    if (rest) {
      const __mmask8 have = (__mmask8)((1 << rest) - 1);
      auto some = [&](const uint16_t* a, const uint16_t* b) __attribute__((always_inline)) {
        return _mm_unpacklo_epi64(_mm_maskz_loadu_epi16(have, a + whole * 4),
                                  _mm_maskz_loadu_epi16(have, b + whole * 4));
      };
      put(some(h0, h1), some(h2, h3), to[whole]);
    }
  }

  /* Fetches the scales of rows n ... n + count, and the biases if they are read. */
  static inline void fetch_scales(const Problem& p, int64_t n, int64_t count) {
    auto lines = [&](const void* from, int32_t dtype, int64_t stride) __attribute__((always_inline)) {
      const int64_t size = (int64_t)accel_itemsize(dtype), bytes = p.k / p.group * size;
      for (int64_t r = n; r < n + count; ++r) {
        const char* row = (const char*)from + r * stride * size;
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
      }
    };
    lines(p.scales, p.s_dtype, p.s_stride[0]);
    if (!p.symmetric) lines(p.biases, p.b_dtype, p.b_stride[0]);
  }

  /* Continues the sums of four streams over some chunks: acc[m], lanes [stream][group % 4]. With pairs, acc[0] is that
   * of the first row of each and acc[1] of the second, which begins in the middle of a line, after `middle` chunks.
   * STREAMS: they are long. */
  template <bool ONE, bool PAIRS, bool STREAMS = false>
  static inline __attribute__((always_inline)) void outputs(const Job& job, const uint8_t* w, int64_t stride,
                                                            int64_t byte, int64_t end, int64_t c0, int64_t middle,
                                                            bool has_offset, const Scales& scales, __m512* acc) {
    /* Addresses that differ by a register's once, twice and three times take few registers. */
    const uint8_t *far = w + byte + job.far, *near = w + byte + job.near;
    const int64_t stride3 = 3 * stride;
    w += byte;
    end -= byte;
    const int64_t first_byte = byte;
    byte = 0;
    auto at = [&](const uint8_t* from, int r) __attribute__((always_inline)) {
      return from + (r == 3 ? stride3 : r * stride);
    };
    const int count = ONE ? 1 : job.count;
    const L* x = job.lines + first_byte / 64 * count;
    const float* totals = job.totals + c0 * 4;
    const __m512 *scale = (const __m512*)scales.scale, *offset = (const __m512*)scales.offset;
    __m512 sum = acc[0];
    auto add = [&](__m512 t, __m512 s, __m512 o, const float* total, __m512 to) __attribute__((always_inline)) {
      to = _mm512_fmadd_ps(t, s, to);
      if (has_offset) to = _mm512_fmadd_ps(o, _mm512_broadcast_f32x4(_mm_loadu_ps(total)), to);
      return to;
    };
    auto step = [&](bool full, bool split) __attribute__((always_inline)) {
      __m512i high[ONE ? 1 : kSmallRows][kLines > kChunks ? kLines : kChunks];
      __m512i low[ONE ? 1 : kSmallRows][kLines];
      const L* first = x;
#pragma GCC unroll 8
      for (int i = 0; i < kLines; ++i, byte += 64) {
        __m512i packed[kStreams];
        const int64_t left = end - byte;
        if (!full && left <= 0) { /* there is no such line */
          for (int m = 0; m < count; ++m) high[m][i] = low[m][i] = _mm512_setzero_si512();
          continue;
        }
        const __mmask16 have = full || left >= 64 ? (__mmask16)0xffff : (__mmask16)((1u << (left / 4)) - 1);
#pragma GCC unroll 4
        for (int r = 0; r < kStreams; ++r) {
          packed[r] = full ? _mm512_loadu_si512(at(w, r)) : _mm512_maskz_loadu_epi32(have, at(w, r));
          __builtin_prefetch(at(far, r), 0, 2);
          if (!STREAMS) __builtin_prefetch(at(near, r));
        }
        w += 64;
        far += 64;
        near += 64;
        for (int m = 0; m < count; ++m) of_line(packed, x[m], high[m] + i, low[m] + i);
        x += count;
      }
      for (int m = 0; m < count; ++m) {
        __m512 t[kChunks];
        groups(high[m], low[m], first[m], t);
        if constexpr (!ONE) sum = acc[m];
        if (split) {
          const __m512 zero = _mm512_setzero_ps();
          const __mmask16 first = 0x3333, second = 0xcccc;
          acc[0] = _mm512_mask_mov_ps(sum, first, add(t[0], *scale, *offset, totals, sum));
          sum = _mm512_maskz_mov_ps(second, add(t[0], *scale, *offset, totals, zero));
        } else {
#pragma GCC unroll 4
          for (int c = 0; c < kChunks; ++c) {
            sum = add(t[c], scale[c], offset[c], totals + m * job.total_stride + c * 4, sum);
          }
        }
        if constexpr (!ONE) acc[m] = sum;
      }
      scale += kChunks;
      offset += kChunks;
      totals += 4 * kChunks;
    };
    if constexpr (PAIRS) {
      for (int64_t i = 0; i < middle; ++i) step(true, false);
      step(true, true);
    }
    while (byte + 64 * kLines <= end) step(true, false);
    if (!PAIRS && byte < end) step(false, false);
    if constexpr (ONE) acc[PAIRS ? 1 : 0] = sum;
  }

  /* Sums over the groups of four streams. */
  static inline __m128 sums(__m512 v) {
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    const __m512i at = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(at, v));
  }

  /* Threads that take pieces in turns would each read every other piece of W, and what is fetched ahead at the end of
   * a piece would be for somebody else: so that piece i is part i / lanes of stretch i % lanes, and a thread that takes
   * every lanes-th piece reads on where it was. */
  static void piece(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    (void)end;
    const int64_t i = begin / job.grain, length = job.pieces / job.lanes, longer = job.pieces % job.lanes;
    const int64_t lane = i % job.lanes, first = lane * length + min64(lane, longer) + i / job.lanes;
    run(arg, first * job.grain, (first + 1) * job.grain);
  }

  /* Units of eight outputs. */
  static void run(void* arg, int64_t begin, int64_t end) {
    const Job& job = *(const Job*)arg;
    const Problem& p = *job.p;
    const bool has_offset = !p.symmetric || (float)kCenter<BITS> != p.ratio;
    const int64_t stop = min64(end * kUnit, p.n), n_groups = p.k / p.group, row_bytes = p.k * BITS / 8;
    const int64_t chunks = ceil_div(n_groups, 4);
    Scales scales;
    if (job.streams && (stop - begin * kUnit) % kUnit == 0) {
      const int64_t apart = (stop - begin * kUnit) / kStreams;
      for (int64_t n = begin * kUnit; n < begin * kUnit + apart; n += job.pairs ? 2 : 1) {
        stream(job, n, apart, begin * kUnit + apart, has_offset, scales);
      }
      return;
    }
    for (int64_t n0 = begin * kUnit; n0 < stop; n0 += kUnit) {
      if constexpr (WORDS == 4) {
        if (job.pairs && n0 + kUnit <= p.n) {
          prepare(job, n0, 2, 2 * n_groups, 0, n_groups / 2, has_offset, scales);
          __m512 acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
          outputs<true, true>(job, p.w + n0 * p.w_stride, 2 * p.w_stride, 0, 2 * row_bytes, 0, n_groups / 4, has_offset,
                              scales, acc);
          const __m128 first = sums(acc[0]), second = sums(acc[1]);
          store(job, 0, n0, 0, 4, _mm_unpacklo_ps(first, second));
          store(job, 0, n0 + 4, 0, 4, _mm_unpackhi_ps(first, second));
          continue;
        }
      }
      for (int64_t at = n0; at < min64(n0 + kUnit, stop); at += p.n < kStreams ? 1 : kStreams) {
        /* Four rows that exist: those at the end overlap with the ones before. Fewer go one by one. */
        const int64_t first = p.n < kStreams ? at : min64(at, p.n - kStreams), stride = p.n < kStreams ? 0 : 1;
        alignas(64) __m512 acc[kSmallRows];
        for (int m = 0; m < job.count; ++m) acc[m] = _mm512_setzero_ps();
        for (int64_t c = 0; c < chunks; c += kChunkBlock) {
          const int64_t some = min64(kChunkBlock, chunks - c), begin = c * 4 * WORDS * 4;
          const int64_t end = min64((c + some) * 4 * WORDS * 4, row_bytes);
          prepare(job, first, stride, n_groups, c, some, has_offset, scales);
          if (job.count == 1) {
            outputs<true, false>(job, p.w + first * p.w_stride, stride * p.w_stride, begin, end, c, 0, has_offset,
                                 scales, acc);
          } else {
            outputs<false, false>(job, p.w + first * p.w_stride, stride * p.w_stride, begin, end, c, 0, has_offset,
                                  scales, acc);
          }
        }
        for (int m = 0; m < job.count; ++m) {
          store(job, m, first, (int)(at - first), p.n < kStreams ? 1 : kStreams, sums(acc[m]));
        }
      }
    }
  }

  /* Outputs n, n + apart, n + 2 * apart and n + 3 * apart of one row of x, with pairs also the ones behind them.
   *   end   where the first stream ends */
  static void stream(const Job& job, int64_t n, int64_t apart, int64_t end, bool has_offset, Scales& scales) {
    const Problem& p = *job.p;
    const int64_t n_groups = p.k / p.group, row_bytes = p.k * BITS / 8, per = job.pairs ? 2 : 1;
    for (int64_t r = 0; r < kStreams && n + kScalesAhead * per < end; ++r) {
      fetch_scales(p, n + r * apart + kScalesAhead * per, per);
    }
    const uint8_t* w = p.w + n * p.w_stride;
    const int64_t stride = apart * p.w_stride;
    __m512 acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if constexpr (WORDS == 4) {
      if (job.pairs) {
        prepare(job, n, apart, 2 * n_groups, 0, n_groups / 2, has_offset, scales);
        outputs<true, true, true>(job, w, stride, 0, 2 * row_bytes, 0, n_groups / 4, has_offset, scales, acc);
        store_apart(job, n, apart, sums(acc[0]));
        store_apart(job, n + 1, apart, sums(acc[1]));
        return;
      }
    }
    prepare(job, n, apart, n_groups, 0, ceil_div(n_groups, 4), has_offset, scales);
    outputs<true, false, true>(job, w, stride, 0, row_bytes, 0, 0, has_offset, scales, acc);
    store_apart(job, n, apart, sums(acc[0]));
  }

  static inline void store_apart(const Job& job, int64_t n, int64_t apart, __m128 sum) {
    alignas(16) float four[4];
    _mm_store_ps(four, sum);
    for (int r = 0; r < kStreams; ++r) store(job, 0, n + r * apart, 0, 1, _mm_set_ss(four[r]));
  }

  /* Outputs n0 + from ... n0 + to - 1 of row m, from four sums. */
  static inline void store(const Job& job, int m, int64_t n0, int from, int to, __m128 sum) {
    const Problem& p = *job.p;
    alignas(16) float y[4];
    _mm_store_ps(y, _mm_mul_ps(sum, _mm_set1_ps(job.unit[m])));
    for (int r = from; p.bias && r < to; ++r) {
      y[r] += accel_load_float(p.bias->data, (n0 + r) * p.bias->strides[0], p.bias->dtype);
    }
    const __mmask8 have = (__mmask8)(((1 << to) - 1) & ~((1 << from) - 1));
    const int64_t at = job.rows[m] * p.n + n0;
    if (p.y_dtype == ACCEL_FLOAT32) {
      _mm_mask_storeu_ps((float*)p.y + at, have, _mm_load_ps(y));
    } else if (p.y_dtype == ACCEL_FLOAT16) {
      _mm_mask_storeu_epi16((uint16_t*)p.y + at, have, _mm_cvtps_ph(_mm_load_ps(y), _MM_FROUND_TO_NEAREST_INT));
    } else {
      for (int r = from; r < to; ++r) ((uint16_t*)p.y)[at + r] = accel_bfloat_from_float(y[r]);
    }
  }

  /* Of `n_lines` lines, `rows` apart: in the first of each step, what counts for its four groups. */
  static void centers_of_groups(L* lines, int64_t n_lines, int64_t rows) {
    constexpr int kQuads = WORDS / 4;
    for (int64_t i = 0; i < n_lines; i += kLines) {
      for (int part = 0; part < (kParts ? 2 : 1); ++part) {
        int32_t sum[4] = {0};
        for (int64_t q = 0; q < 4 * min64(kLines, n_lines - i); ++q) {
          sum[q / kQuads] += lines[(i + q / 4) * rows].start[part][q % 4];
        }
        memcpy(lines[i * rows].start[part], sum, sizeof sum);
      }
    }
  }

  /* Lines of a row that is followed by itself, of which the first `n_lines`, without what follows, are there. */
  static void double_lines(L* lines, int64_t n_lines) {
    const int64_t middle = n_lines - 1; /* half full */
    for (int64_t i = middle; i < 2 * n_lines - 1; ++i) {
      const L *a = i == middle ? &lines[middle] : &lines[i - n_lines], *b = &lines[i == middle ? 0 : i - n_lines + 1];
      L to;
      for (int q = 0; q < 3; ++q) {
        for (int s = 0; s < kSteps; ++s) {
          const __m512i from = i == middle ? _mm512_shuffle_i32x4(a->plane[q][s], b->plane[q][s], 0x44)
                                           : _mm512_shuffle_i32x4(a->plane[q][s], b->plane[q][s], 0x4e);
          to.plane[q][s] = from;
        }
      }
      for (int g = 0; g < 2; ++g) {
        to.start[0][g] = a->start[0][i == middle ? g : g + 2];
        to.start[0][g + 2] = b->start[0][g];
      }
      lines[i] = to;
    }
  }

  static void small(const Problem& p) {
    const int64_t n_lines = ceil_div(p.k, L::kWeights), padded = n_lines * L::kWeights, n_groups = p.k / p.group;
    /* Rows of W that end in the middle of a line. */
    const bool pairs = WORDS == 4 && p.rows == 1 && n_groups % 4 == 2 && n_groups * 2 <= 4 * kChunkBlock &&
                       p.w_stride == p.k * BITS / 8 && p.s_stride[1] == 1 && p.s_stride[0] == n_groups &&
                       (p.symmetric || (p.b_stride[1] == 1 && p.b_stride[0] == n_groups));
    const int64_t all_lines = pairs ? 2 * n_lines - 1 : p.rows * n_lines;
    const int64_t total_stride = ceil_div(pairs ? 2 * n_groups : n_groups, 16) * 16 + 16;
    char* scratch = (char*)accel_scratch(
        p.call, (size_t)all_lines * sizeof(L) + (size_t)(padded + p.rows * total_stride) * sizeof(float));
    if (!scratch) return;
    L* lines = (L*)scratch;
    float *x = (float*)(lines + all_lines), *totals = x + padded;
    memset(x + p.k, 0, (size_t)(padded - p.k) * sizeof(float));
    float unit[kSmallRows];
    int32_t rows[kSmallRows];
    const int fit = fit_rows(p, x, unit, rows, [&](int at) {
      float* t = totals + at * total_stride;
      for (int64_t g = n_groups; g < total_stride; ++g) t[g] = 0;
      make_planes<BITS>(x, p.k, p.group, unit[at], lines + at, p.rows, t);
      if constexpr (kLate && kCenter<BITS> != 0) centers_of_groups(lines + at, n_lines, p.rows);
    });
    if (!fit) return;
    if (fit < p.rows) { /* close the gaps */
      for (int64_t i = 1; i < n_lines; ++i) memmove(lines + i * fit, lines + i * p.rows, (size_t)fit * sizeof(L));
    }
    if (pairs) {
      double_lines(lines, n_lines);
      memcpy(totals + n_groups, totals, (size_t)n_groups * sizeof(float));
    }
    const int64_t units = ceil_div(p.n, kUnit), grain = ceil_div(units, count_pieces(p) < 1 ? 1 : count_pieces(p));
    /* Whole tiles, so that every line is asked for once. */
    const int64_t tile_bytes = kStreams * p.w_stride * (pairs ? 2 : 1);
    const bool streams = accel_fetches_far() && fit == 1 && n_groups <= 4 * kChunkBlock;
    const int64_t far = streams ? kStreamFar : tile_bytes > 0 ? tile_bytes * ceil_div(kFar, tile_bytes) : 0;
    const int64_t near = tile_bytes > 0 ? tile_bytes * ceil_div(kNear, tile_bytes) : 0;
    Job job = {&p,  lines, totals, total_stride,           unit,             rows,  fit, pairs,
               grain, ceil_div(units, grain), p.call->threads, far, near, streams};
    if (job.pieces < 2 || p.call->threads < 2) {
      run(&job, 0, units);
    } else {
      accel_parallel_for(p.call, units, grain, piece, &job);
    }
  }
};

template <int BITS>
inline void vnni_bits(const Problem& p) {
  switch (p.group) {
    case 32: Vnni<BITS, BITS>::small(p); break;
    case 64: Vnni<BITS, 2 * BITS>::small(p); break;
    default: Vnni<BITS, 4 * BITS>::small(p);
  }
}

inline void vnni_small_rows(const Problem& p) {
  if (!(p.spread < INFINITY)) {
    small_rows<Avx512>(p);
    return;
  }
  switch (p.bits) {
    case 1: vnni_bits<1>(p); break;
    case 2: vnni_bits<2>(p); break;
    case 4: vnni_bits<4>(p); break;
    case 8: vnni_bits<8>(p); break;
    default: small_rows<Avx512>(p);
  }
}

}  // namespace
}  // namespace bonsai
#endif
