/* AVX2 with FMA and F16C: sixteen floats in two registers, and codes to weights.
 *
 * Eight codes of up to 4 bits lie in one 32-bit word, copied to all lanes and shifted by each lane's own count;
 * wider codes come four to a word. Every load of codes stays inside the chunk of 32 weights (4 * bits bytes): near
 * its end the word is taken from further front and shifted further.
 */
#ifndef BONSAI_QMV_ISA_AVX2_H
#define BONSAI_QMV_ISA_AVX2_H

#include <immintrin.h>

#include "problem.h"

namespace bonsai {
namespace {

/* Where codes first ... first + count - 1 of a chunk lie: offset of a 32-bit word, and the first code's bit. */
template <int BITS>
constexpr int word_offset(int first) {
  return BITS * first / 8 < 4 * BITS - 4 ? BITS * first / 8 : 4 * BITS - 4;
}
template <int BITS>
constexpr int word_shift(int first) {
  return BITS * first - 8 * word_offset<BITS>(first);
}

struct Avx2 {
  struct V {
    __m256 lo, hi;
  };
  static constexpr int kNarrowRows = 4;
  static constexpr int kAccumulators = 4;
  static constexpr int kMaxTile = 4;

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }

  /* out[i] = sum of the 16 lanes of i, for 8 values of i, each by the same tree of halvings. */
  static void sum8(const float (*lanes)[16], float* out) {
    for (int i = 0; i < 8; ++i) {
      const __m256 h = _mm256_add_ps(_mm256_load_ps(lanes[i]), _mm256_load_ps(lanes[i] + 8));
      const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
      const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
      out[i] = _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
    }
  }

  static constexpr bool permutes(int) { return false; }
  static void permute_chunk(float*) {}

  /* n contiguous half-precision numbers to floats. */
  static void widen(const uint16_t* p, int32_t dtype, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i h = _mm_loadu_si128((const __m128i*)(p + i));
      _mm256_storeu_ps(out + i, dtype == ACCEL_FLOAT16
                                    ? _mm256_cvtph_ps(h)
                                    : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
    }
    for (; i < n; ++i) out[i] = accel_load_float(p, i, dtype);
  }

  template <int BITS>
  struct Group {
    __m256 scale, bias;
    Group() = default;
    Group(float s, float b) : scale(_mm256_set1_ps(s)), bias(_mm256_set1_ps(b)) {}

    static __m128i word(const uint8_t* p) {
      int32_t w;
      memcpy(&w, p, 4);
      return _mm_set1_epi32(w);
    }

    template <int FIRST>
    __m256 eight(const uint8_t* chunk) const {
      __m256i q;
      if constexpr (BITS == 8) {
        q = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(chunk + FIRST)));
      } else {
        constexpr int a = word_shift<BITS>(FIRST), b = BITS <= 4 ? a + 4 * BITS : word_shift<BITS>(FIRST + 4);
        const __m256i shift = _mm256_setr_epi32(a, a + BITS, a + 2 * BITS, a + 3 * BITS, b, b + BITS, b + 2 * BITS,
                                                b + 3 * BITS);
        const __m128i first = word(chunk + word_offset<BITS>(FIRST));
        const __m128i second = BITS <= 4 ? first : word(chunk + word_offset<BITS>(FIRST + 4));
        q = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set_m128i(second, first), shift),
                             _mm256_set1_epi32((1 << BITS) - 1));
      }
      return _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), scale, bias);
    }

    template <int STEP>
    V weights(const uint8_t* chunk) const {
      return {eight<16 * STEP>(chunk), eight<16 * STEP + 8>(chunk)};
    }
  };

  struct Wide {
    using F = __m256;
    using I = __m256i;
    static constexpr int kLanes = 8, kVectors = 2, kMaxPanel = 6;
    static F zero() { return _mm256_setzero_ps(); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F set1(float v) { return _mm256_set1_ps(v); }
    static I load_words(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    template <int S>
    static I right(I v) { return _mm256_srli_epi32(v, S); }
    template <int S>
    static I left(I v) { return _mm256_slli_epi32(v, S); }
    static I either(I a, I b) { return _mm256_or_si256(a, b); }
    static I mask(I v, uint32_t m) { return _mm256_and_si256(v, _mm256_set1_epi32((int)m)); }
    static F decode(F scale, I q, F bias) { return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(q), bias); }
  };
};

}  // namespace
}  // namespace bonsai
#endif
