/* AVX-512 (F, BW, DQ, VL): sixteen floats, and codes to weights. Every load of codes stays inside the chunk.
 *
 * E2M1 is looked up: a register holds scale * value for every code, and one permute replaces sign, table and
 * multiplication. The permute reads the low four bits of its index, so whatever lies above does no harm.
 */
#ifndef HOST_LINEAR_ISA_AVX512_H
#define HOST_LINEAR_ISA_AVX512_H

#include <accel/lines.h>
#include <immintrin.h>

#include "problem.h"

namespace linear {
namespace {

struct Avx512 {
  using V = __m512;
  static constexpr bool kReadsLines = true; /* rows of W that begin within a line of memory are read from there on */
  static constexpr int kMaxTile = 9;
  static constexpr int tile_rows(int mt) { return mt == 1 ? 8 : mt <= 6 ? 4 : mt <= 9 ? 3 : 2; }

  static V zero() { return _mm512_setzero_ps(); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  /* Keeps v in a register: the compiler would rather load it again for each use, which costs the load ports more
   * than the multiplications cost theirs. */
  static V hold(V v) {
    __asm__("" : "+v"(v));
    return v;
  }

  /* Bytes begin ... end of `from`, zeros around them, `size` in all. */
  static void copy_part(uint8_t* to, const uint8_t* from, int64_t begin, int64_t end, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) {
      const auto below = [i](int64_t n) { return n <= i ? 0 : n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1; };
      const __m512i part = _mm512_maskz_loadu_epi8((__mmask64)(below(end) & ~below(begin)), from + i);
      _mm512_mask_storeu_epi8(to + i, (__mmask64)below(size), part);
    }
  }

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

  /* Full stores, because a masked store cannot be forwarded to the loads that follow soon. */
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

  static void narrow(const float* p, int32_t dtype, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 m = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
      const __m512 f = _mm512_maskz_loadu_ps(m, p + i);
      __m256i h;
      if (dtype == ACCEL_FLOAT16) {
        h = _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT);
      } else { /* to nearest, ties to even; NaN keeps its upper bits and becomes quiet */
        const __m512i u = _mm512_castps_si512(f), top = _mm512_srli_epi32(u, 16);
        const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
        const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
        const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
        h = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, quiet));
      }
      _mm256_mask_storeu_epi16(out + i, m, h);
    }
  }

  /* The order in which weights<F, 0> and <F, 1> deliver a chunk; x is brought into the same order. bfloat16: first
   * the even weights, then the odd ones. E2M1: lane 2 r + j of a half is its weight 8 j + r, which is what falls
   * out of its two words, repeated eight times and shifted by each lane's own count. */
  template <Format F>
  static constexpr bool permutes() { return F == kBfloat16 || F == kMxfp4 || F == kNvfp4; }
  template <Format F>
  static void permute_chunk(float* x) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    if constexpr (F == kBfloat16) {
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      _mm512_storeu_ps(x, _mm512_permutex2var_ps(a, even, b));
      _mm512_storeu_ps(x + 16, _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b));
    } else {
      const __m512i at = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
      _mm512_storeu_ps(x, _mm512_permutexvar_ps(at, a));
      _mm512_storeu_ps(x + 16, _mm512_permutexvar_ps(at, b));
    }
  }

  /* E4M3 times 2^-8: as half-precision numbers, whose exponents have one more bit; NaN where all seven are set. */
  static __m512 sixteen_e4m3(const uint8_t* p) {
    const __m256i s = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i sum = _mm256_add_epi16(s, _mm256_set1_epi16(0x80));
    /* Bit 14: s ^ sum, which is the carry out of the seven bits; all others: s. */
    return _mm512_cvtph_ps(_mm256_ternarylogic_epi32(_mm256_set1_epi16((short)0xbfff), s, sum, 0xc6));
  }

  template <Format F, int STEP>
  static V weights(const uint8_t* chunk, const uint8_t* scales) {
    if constexpr (F == kFloat32) {
      return _mm512_loadu_ps((const float*)chunk + 16 * STEP);
    } else if constexpr (F == kFloat16) {
      return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(chunk + 32 * STEP)));
    } else if constexpr (F == kBfloat16) {
      const __m512i pairs = _mm512_loadu_si512(chunk);
      return _mm512_castsi512_ps(STEP ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u))
                                      : _mm512_slli_epi32(pairs, 16));
    } else if constexpr (F == kMxfp8) {
      const __m512 v = _mm512_mul_ps(sixteen_e4m3(chunk + 16 * STEP), _mm512_set1_ps(256.0f));
      return _mm512_mul_ps(v, _mm512_set1_ps(scale_of<F>(scales[0])));
    } else {
      const __m512 scale = _mm512_set1_ps(scale_of<F>(scales[F == kNvfp4 ? STEP : 0]));
      const __m512 table = _mm512_mul_ps(_mm512_load_ps(kE2M1.value), scale);
      long long words;
      memcpy(&words, chunk + 8 * STEP, 8);
      const __m512i shift = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
      return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(words), shift), table);
    }
  }

  struct Wide {
    using F = __m512;
    static constexpr int kLanes = 16, kVectors = 2, kColumns = 12;
    static F zero() { return _mm512_setzero_ps(); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F set1(const float* p) { return hold(_mm512_set1_ps(*p)); }
  };

  /* out[j][i] = in[i][j], 16 by 16. */
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    const float* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = in + i * in_stride;
    __m512i columns[16];
    accel_lines::transpose16(rows, columns);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_stride, columns[i]);
  }
};

}  // namespace
}  // namespace linear
#endif
