/* AVX2 with FMA and F16C: sixteen floats in two registers. */
#ifndef CIDER_SDPA_ISA_AVX2_H
#define CIDER_SDPA_ISA_AVX2_H

#include <immintrin.h>

#include "problem.h"
#include "unpack.h"

namespace cider {
namespace {

struct Avx2 {
  struct V {
    __m256 lo, hi;
  };
  static constexpr int kRows = 3, kCols = 2, kThinRows = 1, kThinCols = 4, kDotRows = 1, kTreeRows = 1, kTreeCols = 1;
  static constexpr int64_t kTurn = 10;

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }

  static V get(F32, const float* p) { return load(p); }
  static V get(F16, const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
  }
  static V get(BF16, const uint16_t* p) { return {widen(p), widen(p + 8)}; }
  static __m256 widen(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
  /* The first n of 16, zeros after them; nothing beyond is read. */
  template <class T>
  static V get_part(T, const typename T::Element* p, int n) {
    typename T::Element copy[16] = {};
    memcpy(copy, p, (size_t)n * sizeof *p);
    return get(T(), copy);
  }

  static V codes(const uint8_t* p, const Unpacker& u) {
    alignas(16) uint8_t copy[16] = {};
    memcpy(copy, p, (size_t)u.bytes);
    const __m256i raw = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)copy));
    return {code8(raw, u, 0), code8(raw, u, 8)};
  }
  static __m256 code8(__m256i raw, const Unpacker& u, int from) {
    const __m256i x = _mm256_shuffle_epi8(raw, _mm256_load_si256((const __m256i*)(u.control + 4 * from)));
    const __m256i code = _mm256_srlv_epi32(x, _mm256_load_si256((const __m256i*)(u.shift + from)));
    return _mm256_cvtepi32_ps(_mm256_and_si256(code, _mm256_set1_epi32((int)u.mask)));
  }
  static V affine(V scale, V code, V bias) { return fma(scale, code, bias); } /* rounded once */

  static __m256i lanes(int from) {
    return _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
  }
  static V keep_first(V v, int n, float other) {
    const __m256 o = _mm256_set1_ps(other);
    const __m256i end = _mm256_set1_epi32(n);
    return {_mm256_blendv_ps(o, v.lo, _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, lanes(0)))),
            _mm256_blendv_ps(o, v.hi, _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, lanes(8))))};
  }
  static V replace(V v, V m, float other) {
    const __m256 o = _mm256_set1_ps(other), z = _mm256_setzero_ps();
    return {_mm256_blendv_ps(v.lo, o, _mm256_cmp_ps(m.lo, z, _CMP_NEQ_UQ)),
            _mm256_blendv_ps(v.hi, o, _mm256_cmp_ps(m.hi, z, _CMP_NEQ_UQ))};
  }
  static float sum(V v) {
    const __m256 h = _mm256_add_ps(v.lo, v.hi);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static float highest(V v) {
    const __m256 h = _mm256_max_ps(v.lo, v.hi);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
  }

  static V nearest(V x) {
    return {_mm256_round_ps(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static __m256 power(__m256 v, __m256 n, __m256 x, float limit) {
    const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), e));
    return _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ));
  }
  static V times_power(V v, V n, V x, float limit) {
    return {power(v.lo, n.lo, x.lo, limit), power(v.hi, n.hi, x.hi, limit)};
  }

  /* Sums over the lanes of 16 vectors: as for AVX-512. */
  static __m256 two(V a, V b) {
    const __m256 x = _mm256_add_ps(a.lo, a.hi), y = _mm256_add_ps(b.lo, b.hi);
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  static V fold4(V a, V b, V c, V d) { return {two(a, b), two(c, d)}; }
  static __m256 halves(__m256d a, __m256d b) {
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  static __m256 four(__m256 p, __m256 q, __m256 r, __m256 s) {
    const __m256 pq = halves(_mm256_castps_pd(p), _mm256_castps_pd(q));
    const __m256 rs = halves(_mm256_castps_pd(r), _mm256_castps_pd(s));
    return _mm256_add_ps(_mm256_shuffle_ps(pq, rs, 0x88), _mm256_shuffle_ps(pq, rs, 0xdd));
  }
  static V fold16(V p, V q, V r, V s) { return {four(p.lo, q.lo, r.lo, s.lo), four(p.hi, q.hi, r.hi, s.hi)}; }

  static void turn8(const __m256* r, float* out, int64_t stride) {
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
      u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(u[i], u[4 + i], 0x20));
      _mm256_storeu_ps(out + (4 + i) * stride, _mm256_permute2f128_ps(u[i], u[4 + i], 0x31));
    }
  }
  /* out[i * stride + j] = r[j][i] */
  static void transpose(const V* r, float* out, int64_t stride) {
    __m256 part[8];
    for (int j = 0; j < 16; j += 8) {
      for (int i = 0; i < 8; ++i) part[i] = r[j + i].lo;
      turn8(part, out + j, stride);
      for (int i = 0; i < 8; ++i) part[i] = r[j + i].hi;
      turn8(part, out + 8 * stride + j, stride);
    }
  }

  template <class T>
  static void put(T, typename T::Element* p, V v, int n) {
    alignas(32) float f[16];
    store(f, v);
    put_floats(T(), p, f, n);
  }
  static void put_floats(F32, float* p, const float* f, int n) { memcpy(p, f, (size_t)n * sizeof(float)); }
  static void put_floats(F16, uint16_t* p, const float* f, int n) {
    for (int i = 0; i < n; ++i) p[i] = accel_half_from_float(f[i]);
  }
  static void put_floats(BF16, uint16_t* p, const float* f, int n) {
    for (int i = 0; i < n; ++i) p[i] = accel_bfloat_from_float(f[i]);
  }
};

}  // namespace
}  // namespace cider
#endif
