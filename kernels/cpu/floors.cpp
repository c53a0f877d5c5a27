/* What this machine can do at most, for benchmarks: read memory, and multiply-add.
 *
 *   accel_floor_read   inputs: 0 any row-contiguous array, whose bytes are read once by all threads.
 *                      outputs: 0 uint64 (1,), the sum of its 8-byte words modulo 2^64 (a tail of less than 64
 *                      bytes is not read).
 *                      params: 0 how many bytes ahead to prefetch (0: leave it to the hardware), 1 how many streams a
 *                      thread reads at once, 2 bytes of a piece, which one thread reads (a multiple of 64).
 *   accel_floor_fma    inputs: none that is read. outputs: 0 float32 (P,), one value for each of P pieces of work.
 *                      params: 0 rounds of a piece. A round is accel_floor_fma_per_round multiply-adds in float32,
 *                      in as many independent chains as hide the latency of the widest unit.
 *
 * Exact (integer sums; the chains are a <- a * 1 + 1 from 0, exact below 2^24). Any ISA: bodies for AVX2 and
 * AVX-512 are chosen at run time, elsewhere the compiler's vectors serve.
 */
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "accel/kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;          // float32 of the widest register
constexpr int kChains = 12;         // more than latency x units of any core in sight, fewer than registers
constexpr int64_t kPerRound = int64_t(kLanes) * kChains;

/* All bodies: sums the words of `streams` runs of n bytes each that follow each other, reading them in turn.
 * Several open runs are what a memory controller likes best, and what kernels with several rows in flight do. */
uint64_t read_portable(const uint8_t* p, int64_t n, int64_t streams, int64_t ahead) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < n; i += 64) {
    for (int64_t s = 0; s < streams; ++s) {
      const uint8_t* line = p + s * n + i;
      if (ahead) __builtin_prefetch(line + ahead);
      const auto* words = reinterpret_cast<const uint64_t*>(line);
      for (int j = 0; j < 8; ++j) sum[j] += words[j];
    }
  }
  uint64_t all = 0;
  for (uint64_t s : sum) all += s;
  return all;
}

float fma_portable(int64_t rounds) {
  float a[kChains][kLanes] = {};
  float one = 1.0f;
  // Unknown to the compiler, or it would solve the loop.
  __asm__ volatile("" : "+m"(one));
  for (int64_t r = 0; r < rounds; ++r) {
    for (auto& chain : a) {
      for (float& lane : chain) lane = lane * one + one;
    }
  }
  float all = 0;
  for (auto& chain : a) all = std::max(all, chain[0]);
  return all;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) uint64_t read_avx2(const uint8_t* p, int64_t n, int64_t streams, int64_t ahead) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < n; i += 64) {
    for (int64_t s = 0; s < streams; ++s) {
      const uint8_t* line = p + s * n + i;
      if (ahead) _mm_prefetch(reinterpret_cast<const char*>(line + ahead), _MM_HINT_T0);
      const auto* v = reinterpret_cast<const __m256i*>(line);
      a = _mm256_add_epi64(a, _mm256_loadu_si256(v));
      b = _mm256_add_epi64(b, _mm256_loadu_si256(v + 1));
    }
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(a, b));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* p, int64_t n, int64_t streams, int64_t ahead) {
  __m512i a = _mm512_setzero_si512(), b = a;
  int64_t s = 0;
  for (; s + 4 <= streams; s += 4) {
    const uint8_t* q = p + s * n;
    for (int64_t i = 0; i < n; i += 64) {
      if (ahead) {
        for (int j = 0; j < 4; ++j) _mm_prefetch(reinterpret_cast<const char*>(q + j * n + i + ahead), _MM_HINT_T0);
      }
      a = _mm512_add_epi64(a, _mm512_add_epi64(_mm512_loadu_si512(q + i), _mm512_loadu_si512(q + n + i)));
      b = _mm512_add_epi64(b, _mm512_add_epi64(_mm512_loadu_si512(q + 2 * n + i), _mm512_loadu_si512(q + 3 * n + i)));
    }
  }
  for (; s < streams; ++s) {
    const uint8_t* q = p + s * n;
    for (int64_t i = 0; i < n; i += 64) {
      if (ahead) _mm_prefetch(reinterpret_cast<const char*>(q + i + ahead), _MM_HINT_T0);
      a = _mm512_add_epi64(a, _mm512_loadu_si512(q + i));
    }
  }
  return uint64_t(_mm512_reduce_add_epi64(_mm512_add_epi64(a, b)));
}

// Registers are named one by one: as an array, compilers keep them in memory at some optimisation levels.
#define ACCEL_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx2,fma"))) float fma_avx2(int64_t rounds) {
  __m256 one = _mm256_set1_ps(1.0f);
  __asm__ volatile("" : "+x"(one));
#define ACCEL_DECLARE(i) __m256 a##i = _mm256_setzero_ps();
#define ACCEL_STEP(i) a##i = _mm256_fmadd_ps(a##i, one, one);
#define ACCEL_FOLD(i) all = _mm256_max_ps(all, a##i);
  ACCEL_EACH(ACCEL_DECLARE)
  for (int64_t r = 0; r < 2 * rounds; ++r) { // half as wide, twice as often
    ACCEL_EACH(ACCEL_STEP)
  }
  __m256 all = _mm256_setzero_ps();
  ACCEL_EACH(ACCEL_FOLD)
  return _mm256_cvtss_f32(all) / 2;
#undef ACCEL_DECLARE
#undef ACCEL_STEP
#undef ACCEL_FOLD
}

__attribute__((target("avx512f"))) float fma_avx512(int64_t rounds) {
  __m512 one = _mm512_set1_ps(1.0f);
  __asm__ volatile("" : "+v"(one));
#define ACCEL_DECLARE(i) __m512 a##i = _mm512_setzero_ps();
#define ACCEL_STEP(i) a##i = _mm512_fmadd_ps(a##i, one, one);
#define ACCEL_FOLD(i) all = _mm512_max_ps(all, a##i);
  ACCEL_EACH(ACCEL_DECLARE)
  for (int64_t r = 0; r < rounds; ++r) {
    ACCEL_EACH(ACCEL_STEP)
  }
  __m512 all = _mm512_setzero_ps();
  ACCEL_EACH(ACCEL_FOLD)
  return _mm512_cvtss_f32(all);
#undef ACCEL_DECLARE
#undef ACCEL_STEP
#undef ACCEL_FOLD
}
#endif

using Read = uint64_t (*)(const uint8_t*, int64_t, int64_t, int64_t);
using Fma = float (*)(int64_t);

Read read_body(const accel_call* call) {
#if defined(__x86_64__)
  if (accel_has(call, ACCEL_ISA_AVX512)) return read_avx512;
  if (accel_has(call, ACCEL_ISA_AVX2)) return read_avx2;
#endif
  return read_portable;
}

Fma fma_body(const accel_call* call) {
#if defined(__x86_64__)
  if (accel_has(call, ACCEL_ISA_AVX512)) return fma_avx512;
  if (accel_has(call, ACCEL_ISA_AVX2)) return fma_avx2;
#endif
  return fma_portable;
}

struct Reading {
  Read body;
  const uint8_t* data;
  int64_t bytes, piece, streams, ahead;
  std::atomic<uint64_t> sum{0};
};

struct Adding {
  Fma body;
  int64_t rounds;
  float* out;
};

} // namespace

ACCEL_KERNEL void accel_floor_read(const accel_call* call) {
  const accel_array& in = *call->inputs[0];
  accel_array& out = *call->outputs[0];
  if (!accel_is_row_contiguous(&in) || out.dtype != ACCEL_UINT64 || out.size != 1 || call->n_params != 3 ||
      call->params[1].i < 1 || call->params[2].i < 64 || call->params[2].i % 64) {
    return accel_fail(call, "floor_read takes a row-contiguous array and three parameters, and writes one uint64");
  }
  Reading r;
  r.body = read_body(call);
  r.data = static_cast<const uint8_t*>(in.data);
  r.bytes = in.size * int64_t(accel_itemsize(in.dtype)) / 64 * 64;
  r.ahead = call->params[0].i;
  r.streams = call->params[1].i;
  r.piece = call->params[2].i;
  accel_parallel_for(
      call, (r.bytes + r.piece - 1) / r.piece, 1,
      [](void* arg, int64_t begin, int64_t end) {
        auto& r = *static_cast<Reading*>(arg);
        const int64_t from = begin * r.piece, bytes = std::min(end * r.piece, r.bytes) - from;
        // Streams of whole cache lines; what is left over follows as one.
        const int64_t each = bytes / r.streams / 64 * 64, rest = bytes - each * r.streams;
        uint64_t sum = r.body(r.data + from, each, r.streams, r.ahead);
        sum += r.body(r.data + from + bytes - rest, rest, 1, 0);
        r.sum.fetch_add(sum, std::memory_order_relaxed);
      },
      &r);
  *static_cast<uint64_t*>(out.data) = r.sum.load();
}

ACCEL_KERNEL void accel_floor_fma(const accel_call* call) {
  accel_array& out = *call->outputs[0];
  if (out.dtype != ACCEL_FLOAT32 || call->n_params != 1 || call->params[0].i < 0) {
    return accel_fail(call, "floor_fma takes one parameter, a number of rounds, and writes float32");
  }
  Adding a{fma_body(call), call->params[0].i, static_cast<float*>(out.data)};
  accel_parallel_for(
      call, out.size, 1,
      [](void* arg, int64_t begin, int64_t end) {
        auto& a = *static_cast<Adding*>(arg);
        for (int64_t i = begin; i < end; ++i) a.out[i] = a.body(a.rounds);
      },
      &a);
}

/* Multiply-adds of one round of one piece. */
ACCEL_KERNEL int64_t accel_floor_fma_per_round(void) { return kPerRound; }
