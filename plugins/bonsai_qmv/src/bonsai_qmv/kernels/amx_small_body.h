/* y = x @ W.T (+ bias) for 2..16 rows of x by integer tile products: 1, 2, 4 and 8 bits, AMX-INT8.
 *
 * Layout     W as in qmv_body.h; a line is 64 bytes of a row of W, 512 / bits codes.
 * Rows       2..16, any n, any k that is a multiple of the group.
 * Exactness  rounding. x enters as fixed point of 24 bits per row, three planes of signed digits (planes.h). What a
 *            group gives is the exact integer of vnni_body.h, rounded once to float32, and goes into float32 sums in
 *            the same order: the bits are the same, and one row of x takes vnni_body.h, which is faster there.
 * Rows       Independent of each other, whatever other rows, outputs or threads there are.
 * Method     The left tile are the digits of x, three rows for each row of x: five rows of x fill a tile. A product
 *            takes 16 cycles and the store of its sums 16 more of the port that shuffles, however few rows there are.
 *            The right tile are 64 codes of sixteen rows of W: a block of sixteen lines is transposed as words, and
 *            every shift and mask of a register of words makes one row of a tile, four codes of each row of W. Codes
 *            are unpacked once for all rows of x. The sums of a group are collected with sixteen outputs in the lanes:
 *            three vectors for a row of x and a group. Codes of the next lines are unpacked between the groups of this
 *            one, into a buffer of their own, across the ends of rows, and sums leave a tile when the products of the
 *            next group are under way. Codes of 4 and 8 bits lose their center as they are unpacked and become signed
 *            bytes, so that sums need not be corrected.
 * Symmetric  If bias = -ratio * scale holds exactly for the whole layer, biases are not read.
 * Source     Written for this library; tile instructions as in Intel's architecture manuals.
 */
#ifndef BONSAI_QMV_AMX_SMALL_BODY_H
#define BONSAI_QMV_AMX_SMALL_BODY_H

#include "amx_body.h"
#include "amx_lines.h"

namespace bonsai {
namespace {

/* Bytes of a row of W to fetch ahead into the first-level cache. */
constexpr int64_t kAhead = 192;

/* Pieces of a call for each thread, at most: a piece begins with a block of codes that no product hides. */
constexpr int64_t kMostPieces = 8;

/* Groups whose scales are brought into lanes at a time, and how many sums may wait to be collected. */
constexpr int kLaneGroups = 16;
constexpr int kWaiting = 4;

/* What the sums of a group of a row of x begin with, and what the offset of the group meets. */
struct Start {
  int32_t first; /* -center * the sum of v, unless codes are without their center */
  float total;   /* sum of v */
};

struct AmxSmallJob {
  const Problem* p;
  const int8_t* x;     /* [stretch of 64][row][plane][64], `rows3` rows of 64 digits a stretch */
  const Start* starts; /* [group][row] */
  const float* unit;   /* per row */
  const int32_t* rows; /* which rows of the call these are; they are `count` */
  int count;
  bool has_offset;
  float center; /* what times the scale comes to the bias */
  int64_t units, pieces, lanes; /* of sixteen outputs; pieces for each of so many threads */
  int64_t far;                  /* bytes from what is read to what is fetched */
  TileConfig tiles; /* 0..2 sums, 3..5 digits, 6 and 7 codes */
};

template <int BITS, int GROUP>
struct AmxSmall {
  /* Lines at a time: a group of 128 codes of 8 bits has two. */
  static constexpr int kLines = BITS == 8 && GROUP == 128 ? 2 : 1, kSteps = 8 / BITS;
  static constexpr int64_t kCodes = kLines * 512 / BITS, kBytes = kLines * 64;
  /* A group's sum of 33 or 34 bits is made of two parts: hi * 256 + mid, and lo; or, where the first of these would be
   * rounded, hi, and mid * 256 + lo. */
  static constexpr bool kWider = BITS == 8 || (BITS == 4 && GROUP > 64);
  static constexpr bool kSigned = BITS == 4 || BITS == 8; /* codes lose their center as they are unpacked */
  static constexpr bool kWide = kWider || (BITS == 4 && GROUP > 32);

  /* Position q of a tile row of x meets code order(q) of a stretch. */
  static __m512i order() {
    alignas(64) uint8_t code[64];
    for (int q = 0; q < 64; ++q) {
      const int row = q / 4, byte = q % 4;
      code[q] = (uint8_t)(row / kSteps * (32 / BITS) + byte * kSteps + row % kSteps);
    }
    return _mm512_load_si512(code);
  }

  /* Digits of one row whose unit is known.
   *   x       floats, zeros from k to the end of the last stretch
   *   out     the row's first; `rows` rows from stretch to stretch
   *   starts  of the row's groups, `rows` apart */
  static void digits(const float* x, int64_t k, float unit, int8_t* out, Start* starts, int64_t rows) {
    const __m512 inverse = _mm512_set1_ps(1.0f / unit);
    const __m512i where = order();
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k0 = 0; k0 < k; k0 += 64, out += rows * 192) {
      alignas(64) int8_t digit[3][64];
      for (int j = 0; j < 64; j += 16) {
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k0 + j), inverse));
        split_digits(v, digit[0] + j, digit[1] + j, digit[2] + j);
        sum = _mm512_add_epi32(sum, v);
        if ((k0 + j + 16) % GROUP == 0 && k0 + j < k) {
          Start& s = starts[(k0 + j) / GROUP * rows];
          const int32_t all = _mm512_reduce_add_epi32(sum);
          s.total = (float)all;
          s.first = -kCenter<BITS> * (kSigned ? 0 : all);
          sum = _mm512_setzero_si512();
        }
      }
      for (int q = 0; q < 3; ++q) {
        _mm512_store_si512(out + q * 64, _mm512_permutexvar_epi8(where, _mm512_load_si512(digit[q])));
      }
    }
  }

  /* Codes of a quarter, as rows of tiles. */
  static inline __attribute__((always_inline)) void unpack(const Lines& lines, int quarter, uint8_t* out) {
    __m512i word[4];
    lines.words(quarter, word);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) codes(word[j], out + j * kSteps * 64);
  }
  static inline __attribute__((always_inline)) void codes(__m512i word, uint8_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {
      _mm512_store_si512(out + i * 64, code(word, i));
    }
  }

  /* The codes of step i of a line, minus their center where a byte has a sign for it. */
  static inline __attribute__((always_inline)) __m512i code(__m512i word, int i) {
    if constexpr (!kSigned) return Vnni<BITS, GROUP * BITS / 32>::unpack(word, i);
    if constexpr (BITS == 8) return _mm512_xor_si512(word, _mm512_set1_epi8((char)0x80));
#ifdef BONSAI_GFNI
    /* Bits 0..2 of a byte are those of the code; bits 3..7 what its highest is not. */
    uint64_t rows = 0;
    for (int b = 0; b < 8; ++b) rows |= (uint64_t)1 << ((b < BITS ? b : BITS - 1) + i * BITS + 8 * (7 - b));
    return _mm512_gf2p8affine_epi64_epi8(word, _mm512_set1_epi64((long long)rows), (0xff << (BITS - 1)) & 0xff);
#else
    return _mm512_sub_epi8(Vnni<BITS, GROUP * BITS / 32>::unpack(word, i), _mm512_set1_epi8((char)kCenter<BITS>));
#endif
  }

  /* acc += what a group gives one row of x. */
  static inline __attribute__((always_inline)) __m512 collect(__m512i hi, __m512i mid, __m512i lo, const Start& start,
                                                              __m512 scale, __m512 offset, bool has_offset,
                                                              __m512 acc) {
    __m512 t;
    if constexpr (kWider) {
      __m512i low = _mm512_add_epi32(_mm512_slli_epi32(mid, 8), lo);
      const __m512i high = _mm512_add_epi32(hi, _mm512_srai_epi32(low, 16));
      low = _mm512_and_si512(low, _mm512_set1_epi32(0xffff));
      t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(low));
    } else if constexpr (kWide) {
      const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(hi, 8), mid);
      t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(lo));
    } else {
      __m512i all = _mm512_add_epi32(_mm512_slli_epi32(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), mid), 8), lo);
      if constexpr (kCenter<BITS> != 0 && !kSigned) all = _mm512_add_epi32(all, _mm512_set1_epi32(start.first));
      t = _mm512_cvtepi32_ps(all);
    }
    acc = _mm512_fmadd_ps(t, scale, acc);
    return has_offset ? _mm512_fmadd_ps(offset, _mm512_set1_ps(start.total), acc) : acc;
  }

  /* Scales, and what comes to them, of up to sixteen groups of sixteen rows. */
  static inline void lanes(const AmxSmallJob& job, int64_t n0, int64_t g0, int64_t groups, float (*scale)[16],
                           float (*offset)[16]) {
    const Problem& p = *job.p;
    scales_to_lanes(p.scales, p.s_dtype, p.s_stride, p.n, n0, g0, groups, scale);
    if (!job.has_offset) return;
    const __m512 center = _mm512_set1_ps(job.center);
    if (!p.symmetric) scales_to_lanes(p.biases, p.b_dtype, p.b_stride, p.n, n0, g0, groups, offset);
    for (int64_t g = 0; g < groups; ++g) {
      const __m512 from = p.symmetric ? _mm512_setzero_ps() : _mm512_load_ps(offset[g]);
      _mm512_store_ps(offset[g], _mm512_fmadd_ps(center, _mm512_load_ps(scale[g]), from));
    }
  }

  template <int TO, int A, int B>
  static inline __attribute__((always_inline)) void multiply_tiles() {
    if constexpr (kSigned) tile_multiply_signed<TO, A, B>();
    else tile_multiply_mixed<TO, A, B>();
  }

  /* SUMS: the first tile of sums. */
  template <int TILES, int SUMS>
  static inline __attribute__((always_inline)) void multiply(const int8_t* x, const uint8_t* codes) {
    tile_load<6>(codes);
    tile_load<3>(x);
    multiply_tiles<SUMS, 3, 6>();
    if constexpr (TILES > 1) {
      tile_load<4>(x + 1024);
      multiply_tiles<1, 4, 6>();
    }
    if constexpr (TILES > 2) {
      tile_load<5>(x + 2048);
      multiply_tiles<2, 5, 6>();
    }
  }

  /* Units of sixteen outputs, two rows of x or more; TILES: of digits. */
  template <int TILES>
  static void run(void* arg, int64_t begin, int64_t end) {
    const AmxSmallJob& job = *(const AmxSmallJob*)arg;
    const Problem& p = *job.p;
    const int64_t row_bytes = p.k * BITS / 8, steps = ceil_div(row_bytes, kBytes), n_groups = p.k / GROUP;
    const int64_t stretch = (int64_t)job.count * 192, far = job.far, turn = 16 * p.w_stride - steps * kBytes;
    const int count = job.count;
    const bool has_offset = job.has_offset;
    const int8_t* const digits = job.x;
    const Start* const starts = job.starts;
    constexpr bool two = GROUP == 128, half = GROUP == 32;
    constexpr int kParts = 4 * kLines, kGroups = kCodes / GROUP;
    /* Stores of tiles take long to be seen by loads, and wait for products: one group later, if there are tiles. */
    constexpr bool kLate = TILES == 1 && kGroups % 2 == 0;
    constexpr int kDelay = kLate ? 3 : 2;
    /* Codes of this step and the next; sums that wait; scales of these sixteen groups and the last. */
    alignas(64) uint8_t codes[2][kCodes * 16];
    alignas(64) int32_t sums[kWaiting][TILES * 16][16];
    alignas(64) float scale[2 * kLaneGroups][16], offset[2 * kLaneGroups][16];
    alignas(64) float acc[4 * kSmallRows][16]; /* [group % 4][row] */
    tile_configure(job.tiles);
    const uint8_t* w[16];
    int64_t ahead = begin, byte = 0; /* what is unpacked next */
    auto rows_of = [&](int64_t unit) {
      for (int r = 0; r < 16; ++r) w[r] = p.w + min64(unit * 16 + r, p.n - 1) * p.w_stride;
    };
    /* Scales and biases of the next sixteen outputs are fetched little by little: requests that come all at once keep
     * those for W waiting. */
    const Soon soon_scales(p.scales, p.s_dtype, 16 * p.s_stride[0], steps * kLines);
    const Soon soon_biases(p.biases, p.b_dtype, p.symmetric ? 0 : 16 * p.b_stride[0], steps * kLines);
    int64_t soon = 0;
    auto load_next = [&](Lines& lines) __attribute__((always_inline)) {
      lines.load(w, byte, row_bytes - byte, byte + kAhead + (byte + kAhead < row_bytes ? 0 : turn), byte + far);
      byte += 64;
      if (byte == steps * kBytes) {
        byte = 0;
        ahead = min64(ahead + 1, end - 1);
        rows_of(ahead);
        soon = 0;
      }
    };
    rows_of(begin);
    for (int l = 0; l < kLines; ++l) {
      Lines lines;
      load_next(lines);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) unpack(lines, q, codes[0] + (4 * l + q) * kSteps * 256);
    }
    int now = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n0 = unit * 16;
      for (int i = 0; i < 4 * count; ++i) _mm512_store_ps(acc[i], _mm512_setzero_ps());
      auto collected = [&](int64_t g) __attribute__((always_inline)) {
        const int at = (int)(g % (2 * kLaneGroups));
        const __m512 s = _mm512_load_ps(scale[at]), o = _mm512_load_ps(offset[at]);
        const int32_t(*sum)[16] = sums[g % kWaiting];
        const Start* start = starts + g * count;
        float(*to)[16] = acc + g % 4 * count;
        for (int m = 0; m < count; ++m, sum += 3, ++to) {
          _mm512_store_ps(*to, collect(_mm512_load_si512(sum[0]), _mm512_load_si512(sum[1]), _mm512_load_si512(sum[2]),
                                       start[m], s, o, has_offset, _mm512_load_ps(*to)));
        }
      };
      const uint8_t* c;
      auto group = [&]<int ODD>(int64_t g) __attribute__((always_inline)) {
        constexpr int sum = kLate ? ODD : 0;
        if (g % kLaneGroups == 0) {
          const int at = (int)(g % (2 * kLaneGroups));
          lanes(job, n0, g, min64(kLaneGroups, n_groups - g), scale + at, offset + at);
        }
        const int8_t* x = digits + (half ? g / 2 * stretch + g % 2 * 32 : two ? 2 * g * stretch : g * stretch);
        tile_zero<sum>();
        if constexpr (TILES > 1) tile_zero<1>();
        if constexpr (TILES > 2) tile_zero<2>();
        multiply<TILES, sum>(x, c);
        if (two) multiply<TILES, sum>(x + stretch, c + 1024);
        if (g >= kDelay) collected(g - kDelay);
        if constexpr (kLate) {
          if (g >= 1) tile_store<1 - sum>(sums[(g - 1) % kWaiting]);
        } else {
          int32_t(*to)[16] = sums[g % kWaiting];
          tile_store<0>(to);
          if constexpr (TILES > 1) tile_store<1>(to + 16);
          if constexpr (TILES > 2) tile_store<2>(to + 32);
        }
        c += GROUP * 16;
      };
      int64_t g = 0;
      for (int64_t step = 0; step < steps; ++step) {
        c = codes[now];
        now ^= 1;
        uint8_t* out = codes[now];
#pragma GCC unroll 2
        for (int l = 0; l < kLines; ++l) {
          Lines lines;
          load_next(lines);
          soon_scales.fetch(ahead + 1, soon);
          soon_biases.fetch(ahead + 1, soon);
          ++soon;
#pragma GCC unroll 4
          for (int part = l * 4; part < l * 4 + 4; ++part, out += kSteps * 256) {
#pragma GCC unroll 4
            for (int i = part * kGroups / kParts; i < (part + 1) * kGroups / kParts; ++i) {
              if (g < n_groups) {
                if (i % 2) group.template operator()<1>(g);
                else group.template operator()<0>(g);
              }
              ++g;
            }
            unpack(lines, part % 4, out);
          }
        }
      }
      if (kLate) {
        if (n_groups % 2) tile_store<0>(sums[(n_groups - 1) % kWaiting]);
        else tile_store<1>(sums[(n_groups - 1) % kWaiting]);
      }
      for (g = n_groups >= kDelay ? n_groups - kDelay : 0; g < n_groups; ++g) collected(g);
      finish(job, n0, acc);
    }
    tile_release();
  }

  /* y of sixteen outputs. */
  static inline void finish(const AmxSmallJob& job, int64_t n0, const float (*acc)[16]) {
    const Problem& p = *job.p;
    const int64_t columns = min64(16, p.n - n0);
    const __mmask16 have = (__mmask16)((1u << columns) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (p.bias) bias = some_floats(p.bias->data, p.bias->dtype, n0 * p.bias->strides[0], p.bias->strides[0], columns);
    for (int m = 0; m < job.count; ++m, ++acc) {
      const int n = job.count;
      const __m512 a = _mm512_add_ps(_mm512_load_ps(acc[0]), _mm512_load_ps(acc[n]));
      const __m512 b = _mm512_add_ps(_mm512_load_ps(acc[2 * n]), _mm512_load_ps(acc[3 * n]));
      __m512 v = _mm512_mul_ps(_mm512_add_ps(a, b), _mm512_set1_ps(job.unit[m]));
      if (p.bias) v = _mm512_add_ps(v, bias);
      store16(p.y, p.y_dtype, job.rows[m] * p.n + n0, have, v);
    }
  }

  /* Where piece i of what a thread takes, if all are equally fast, begins. Pieces get smaller towards the end, so that
   * threads end together. */
  static int64_t cut(const AmxSmallJob& job, int64_t lane, int64_t i) {
    const int64_t first = lane * job.units / job.lanes, last = (lane + 1) * job.units / job.lanes;
    const int64_t left = job.pieces - i;
    return last - (last - first) * left * left / (job.pieces * job.pieces);
  }

  /* As Vnni::piece: a thread that takes every lanes-th piece reads on where it was. */
  static void piece(void* arg, int64_t begin, int64_t end) {
    const AmxSmallJob& job = *(const AmxSmallJob*)arg;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = cut(job, i % job.lanes, i / job.lanes), to = cut(job, i % job.lanes, i / job.lanes + 1);
      if (from < to) any(arg, from, to);
    }
  }

  static void any(void* arg, int64_t begin, int64_t end) {
    const AmxSmallJob& job = *(const AmxSmallJob*)arg;
    const int count = job.count;
    (count <= 5 ? run<1> : count <= 10 ? run<2> : run<3>)(arg, begin, end);
  }

  static void small(const Problem& p) {
    const int64_t stretches = ceil_div(p.k, 64), padded = stretches * 64, groups = p.k / GROUP;
    char* scratch = (char*)accel_scratch(
        p.call, (size_t)(p.rows * stretches * 192) + (size_t)padded * sizeof(float) +
                    (size_t)(p.rows * groups) * sizeof(Start));
    if (!scratch) return;
    int8_t* digit = (int8_t*)scratch;
    float* x = (float*)(digit + p.rows * stretches * 192);
    Start* starts = (Start*)(x + padded);
    memset(x + p.k, 0, (size_t)(padded - p.k) * sizeof(float));
    float unit[kSmallRows];
    int32_t rows[kSmallRows];
    const int fit = fit_rows(p, x, unit, rows, [&](int at) {
      digits(x, p.k, unit[at], digit + at * 192, starts + at, p.rows);
    });
    if (!fit) return;
    if (fit < p.rows) { /* close the gaps */
      for (int64_t s = 1; s < stretches; ++s) {
        memmove(digit + s * fit * 192, digit + s * p.rows * 192, (size_t)fit * 192);
      }
      for (int64_t g = 1; g < groups; ++g) {
        memmove(starts + g * fit, starts + g * p.rows, (size_t)fit * sizeof(Start));
      }
    }
    const int64_t units = ceil_div(p.n, 16), unit_bytes = 16 * p.w_stride;
    const int64_t wanted = min64(count_pieces(p), kMostPieces * p.call->threads);
    AmxSmallJob job;
    job.p = &p;
    job.x = digit;
    job.starts = starts;
    job.unit = unit;
    job.rows = rows;
    job.count = fit;
    job.has_offset = !p.symmetric || (float)kCenter<BITS> != p.ratio;
    job.center = (float)kCenter<BITS> - p.ratio;
    job.units = units;
    job.lanes = min64(p.call->threads, wanted);
    job.pieces = wanted < 2 ? 1 : ceil_div(wanted, job.lanes);
    job.far = unit_bytes > 0 ? unit_bytes * ceil_div(kFar, unit_bytes) : 0;
    const int depth = GROUP == 32 ? 32 : 64;
    memset(&job.tiles, 0, sizeof job.tiles);
    job.tiles.palette = 1;
    for (int t = 0; t < 3; ++t) {
      const int have = fit * 3 - t * 16;
      if (have <= 0) continue;
      job.tiles.rows[t] = job.tiles.rows[3 + t] = (uint8_t)(have < 16 ? have : 16);
      job.tiles.bytes[t] = 64;
      job.tiles.bytes[3 + t] = (uint16_t)depth;
    }
    if (fit <= 5) { /* two tiles of sums take turns */
      job.tiles.rows[1] = job.tiles.rows[0];
      job.tiles.bytes[1] = 64;
    }
    job.tiles.rows[6] = (uint8_t)(depth / 4);
    job.tiles.bytes[6] = 64;
    if (wanted < 2 || p.call->threads < 2) {
      any(&job, 0, units);
    } else {
      accel_parallel_for(p.call, job.lanes * job.pieces, 1, piece, &job);
    }
  }
};

template <int BITS>
inline void amx_small_bits(const Problem& p) {
  switch (p.group) {
    case 32: AmxSmall<BITS, 32>::small(p); break;
    case 64: AmxSmall<BITS, 64>::small(p); break;
    default: AmxSmall<BITS, 128>::small(p);
  }
}

inline void amx_small_rows(const Problem& p) {
  if (p.rows == 1 || !(p.spread < INFINITY)) {
    vnni_small_rows(p);
    return;
  }
  switch (p.bits) {
    case 1: amx_small_bits<1>(p); break;
    case 2: amx_small_bits<2>(p); break;
    case 4: amx_small_bits<4>(p); break;
    case 8: amx_small_bits<8>(p); break;
    default: small_rows<Avx512>(p);
  }
}

}  // namespace
}  // namespace bonsai
#endif
