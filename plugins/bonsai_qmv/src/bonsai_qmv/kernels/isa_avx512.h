/* AVX-512 (F, BW, DQ, VL): sixteen floats, and codes to weights.
 *
 * Up to 5 bits a weight is looked up: a register holds scale * q + bias for every code q of the group, and one
 * permute replaces mask, conversion and multiplication. The permute reads only the low bits of its index, so
 * whatever lies above the code in the lane does no harm, and for fewer than 4 bits the table is repeated.
 *
 * Every load of codes stays inside the chunk of 32 weights (4 * bits bytes).
 */
#ifndef BONSAI_QMV_ISA_AVX512_H
#define BONSAI_QMV_ISA_AVX512_H

#include <immintrin.h>

#include "problem.h"

namespace bonsai {
namespace {

/* Where each of 16 codes lies when a window of 8 or 16 bytes is repeated over the register: bytes to move into
 * 32-bit lane i, and the shift that brings code 16 * step + i to bit 0. */
template <int BITS, int STEP>
struct Gather16 {
  static constexpr int kWindow = BITS <= 4 ? 8 : 16;
  static constexpr int kOffset = 2 * BITS * STEP < 4 * BITS - kWindow ? 2 * BITS * STEP : 4 * BITS - kWindow;
  alignas(64) uint8_t bytes[64];
  alignas(64) uint32_t shift[16];
  constexpr Gather16() : bytes(), shift() {
    for (int i = 0; i < 16; ++i) {
      const int bit = BITS * (16 * STEP + i) - 8 * kOffset, at = bit / 8;
      bytes[4 * i] = (uint8_t)at;
      bytes[4 * i + 1] = at + 1 < kWindow ? (uint8_t)(at + 1) : 0x80;
      bytes[4 * i + 2] = bytes[4 * i + 3] = 0x80;
      shift[i] = (uint32_t)(bit % 8);
    }
  }
};
template <int BITS, int STEP>
constexpr Gather16<BITS, STEP> kGather16{};

/* Shifts for codes that need no byte moves: lane i of a register filled with copies of `dwords` words. */
template <int BITS, int STEP>
struct Shift16 {
  alignas(64) uint32_t shift[16];
  constexpr Shift16() : shift() {
    for (int i = 0; i < 16; ++i) {
      shift[i] = BITS == 4 ? (uint32_t)(4 * (2 * (i / 4) + STEP)) : (uint32_t)(BITS == 1 ? 16 * STEP + i : 2 * i);
    }
  }
};
template <int BITS, int STEP>
constexpr Shift16<BITS, STEP> kShift16{};

struct Avx512 {
  using V = __m512;
  static constexpr int kNarrowRows = 8; /* output rows that share one x row */
  static constexpr int kAccumulators = 24; /* in flight with several rows of x */
  static constexpr int kMaxTile = 8;       /* rows of x per tile */

  static V zero() { return _mm512_setzero_ps(); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }

  /* out[i] = sum of the 16 lanes of i, for 8 values of i: halves are added until one lane is left, for all eight
   * at once. The tree is the same for each. */
  static void sum8(const float (*lanes)[16], float* out) {
    __m256 h[8], q[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) h[i] = _mm256_add_ps(_mm256_load_ps(lanes[i]), _mm256_load_ps(lanes[i] + 8));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      q[i] = _mm256_add_ps(_mm256_permute2f128_ps(h[i], h[i + 4], 0x20), _mm256_permute2f128_ps(h[i], h[i + 4], 0x31));
    }
    const __m256d q0 = _mm256_castps_pd(q[0]), q1 = _mm256_castps_pd(q[1]);
    const __m256d q2 = _mm256_castps_pd(q[2]), q3 = _mm256_castps_pd(q[3]);
    const __m256 d0 = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(q0, q1)),
                                    _mm256_castpd_ps(_mm256_unpackhi_pd(q0, q1)));
    const __m256 d1 = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(q2, q3)),
                                    _mm256_castpd_ps(_mm256_unpackhi_pd(q2, q3)));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(d0, d1, 0x88), _mm256_shuffle_ps(d0, d1, 0xdd)));
  }

  /* The order in which weights<0>, weights<1> deliver the 32 weights of a chunk; x is brought into the same
   * order once per call. Natural for all but 4 bits, where lane 4 r + j of step s is weight 8 j + 2 r + s: that
   * is what falls out of four words, repeated four times and shifted by a lane's own count. */
  static constexpr bool permutes(int bits) { return bits == 4; }
  static void permute_chunk(float* x) {
    alignas(64) static constexpr int32_t index[2][16] = {
        {0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30},
        {1, 9, 17, 25, 3, 11, 19, 27, 5, 13, 21, 29, 7, 15, 23, 31}};
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    _mm512_storeu_ps(x, _mm512_permutex2var_ps(a, _mm512_load_si512(index[0]), b));
    _mm512_storeu_ps(x + 16, _mm512_permutex2var_ps(a, _mm512_load_si512(index[1]), b));
  }

  /* n contiguous half-precision numbers to floats; writes up to the next multiple of 16. Full stores, because a
   * masked store cannot be forwarded to the loads that follow soon. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 m = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
      const __m256i h = _mm256_maskz_loadu_epi16(m, p + i);
      const __m512 f = dtype == ACCEL_FLOAT16
                           ? _mm512_cvtph_ps(h)
                           : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
      _mm512_storeu_ps(out + i, f);
    }
  }

  template <int BITS>
  struct Group {
    __m512 a, b; /* up to 4 bits: the table, unused; 5 bits: both halves of the table; more: scale, bias */
    Group() = default;
    Group(float scale, float bias) {
      const __m512 s = _mm512_set1_ps(scale), c = _mm512_set1_ps(bias);
      if constexpr (BITS > 5) {
        a = s;
        b = c;
      } else {
        constexpr int n = BITS < 4 ? 1 << BITS : 16;
        const __m512 q = _mm512_setr_ps(at(0, n), at(1, n), at(2, n), at(3, n), at(4, n), at(5, n), at(6, n),
                                        at(7, n), at(8, n), at(9, n), at(10, n), at(11, n), at(12, n), at(13, n),
                                        at(14, n), at(15, n));
        a = _mm512_fmadd_ps(s, q, c);
        if constexpr (BITS == 5) b = _mm512_fmadd_ps(s, _mm512_add_ps(q, _mm512_set1_ps(16.0f)), c);
      }
    }
    static constexpr float at(int i, int period) { return (float)(i % period); }

    template <int STEP>
    V weights(const uint8_t* chunk) const {
      if constexpr (BITS == 1 || BITS == 2) {
        int32_t word;
        memcpy(&word, chunk + (BITS == 2 ? 4 * STEP : 0), 4);
        const __m512i shift = _mm512_load_si512(kShift16<BITS, STEP>.shift);
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(word), shift), a);
      } else if constexpr (BITS == 4) {
        const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)chunk));
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, _mm512_load_si512(kShift16<4, STEP>.shift)), a);
      } else if constexpr (BITS == 8) {
        const __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(chunk + 16 * STEP)));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), a, b);
      } else {
        using G = Gather16<BITS, STEP>;
        __m512i window;
        if constexpr (G::kWindow == 8) {
          long long word;
          memcpy(&word, chunk + G::kOffset, 8);
          window = _mm512_set1_epi64(word);
        } else {
          window = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(chunk + G::kOffset)));
        }
        const __m512i lanes = _mm512_shuffle_epi8(window, _mm512_load_si512(kGather16<BITS, STEP>.bytes));
        const __m512i q = _mm512_srlv_epi32(lanes, _mm512_load_si512(kGather16<BITS, STEP>.shift));
        if constexpr (BITS == 3) return _mm512_permutexvar_ps(q, a);
        if constexpr (BITS == 5) return _mm512_permutex2var_ps(a, q, b);
        const __m512i code = _mm512_and_si512(q, _mm512_set1_epi32((1 << BITS) - 1));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), a, b);
      }
    }
  };

  /* The blocked product keeps output columns in the lanes. */
  struct Wide {
    using F = __m512;
    using I = __m512i;
    static constexpr int kLanes = 16, kVectors = 2, kMaxPanel = 12;
    static F zero() { return _mm512_setzero_ps(); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F set1(float v) { return _mm512_set1_ps(v); }
    static I load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
    template <int S>
    static I right(I v) { return _mm512_srli_epi32(v, S); }
    template <int S>
    static I left(I v) { return _mm512_slli_epi32(v, S); }
    static I either(I a, I b) { return _mm512_or_si512(a, b); }
    static I mask(I v, uint32_t m) { return _mm512_and_si512(v, _mm512_set1_epi32((int)m)); }
    static F decode(F scale, I q, F bias) { return _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(q), bias); }
  };
};

}  // namespace
}  // namespace bonsai
#endif
