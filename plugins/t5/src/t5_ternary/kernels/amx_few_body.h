/* y = x @ W.T (+ bias) for a few rows of x by integer tile products: AMX-INT8 and VBMI.
 *
 * Layout     W as in product.cpp, read in strips (strips.h).
 * Rows       1..16, any n, any k that is a multiple of the group.
 * Exactness  rounding, in the order of few_rows.h: the bits are those of vnni_body.h.
 * Method     The left tile are the digits of x, three rows for each row of x: five rows of x fill a tile. A product
 *            takes 16 cycles however few they are. The right tile are 64 codes of sixteen rows of W. Codes are
 *            unpacked once for all rows of x. The sums of a group are collected with sixteen outputs in the lanes:
 *            three vectors for a row of x and a group. Codes of the next strip are unpacked between the products of
 *            this one, into a buffer of their own, across the ends of rows, and sums leave a tile when the products of
 *            the next group are under way.
 * Source     Written for this library; tile instructions as in Intel's architecture manuals.
 */
#ifndef T5_AMX_FEW_BODY_H
#define T5_AMX_FEW_BODY_H

#include <accel/amx.h>

#include "few_rows.h"

namespace t5 {
namespace {

using accel_amx::TileConfig;
using accel_amx::tile_configure;
using accel_amx::tile_load;
using accel_amx::tile_multiply_signed;
using accel_amx::tile_release;
using accel_amx::tile_store;
using accel_amx::tile_zero;

/* How many groups' sums may wait to be collected. */
constexpr int kWaiting = 4;

template <int SIZE>
struct AmxFew {
  using M = StripMap<SIZE>;
  static constexpr int kStretches = SIZE / 64; /* of a group */

  /* A quarter of a strip, as the rows of a tile. */
  static inline __attribute__((always_inline)) void unpack(const Strip<SIZE>& strip, int quarter, int8_t* codes) {
    auto put = [&](int q, int j, __m512i row) __attribute__((always_inline)) {
      _mm512_store_si512(codes + (q * (SIZE / 4) + j) * 64, row);
    };
    if (quarter == 0) strip.template rest<1>(put);
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) {
      const int f = 3 * quarter + i;
      strip.template whole<1>(f / M::kWords, f % M::kWords, put);
    }
  }

  /* ODD: which tiles of sums, see sums_of. */
  template <int TILES, int ODD>
  static inline __attribute__((always_inline)) void multiply(const int8_t* x, const int8_t* codes) {
    tile_load<6>(codes);
    tile_load<3>(x);
    tile_multiply_signed<sums_of(TILES, ODD, 0), 3, 6>();
    if constexpr (TILES > 1) {
      tile_load<4>(x + 1024);
      tile_multiply_signed<sums_of(TILES, ODD, 1), 4, 6>();
    }
    if constexpr (TILES > 2) {
      tile_load<5>(x + 2048);
      tile_multiply_signed<sums_of(TILES, ODD, 2), 5, 6>();
    }
  }
  /* Tiles of sums take turns where there are enough: 0 and 1, or 0 and 1 with 2 and 7. */
  static constexpr int sums_of(int tiles, int odd, int i) {
    return tiles == 1 ? odd : tiles == 2 && odd ? (i ? 7 : 2) : i;
  }
  template <int TILES, int ODD>
  static inline __attribute__((always_inline)) void zero() {
    tile_zero<sums_of(TILES, ODD, 0)>();
    if constexpr (TILES > 1) tile_zero<sums_of(TILES, ODD, 1)>();
    if constexpr (TILES > 2) tile_zero<sums_of(TILES, ODD, 2)>();
  }
  template <int TILES, int ODD>
  static inline __attribute__((always_inline)) void store(int32_t (*to)[16]) {
    tile_store<sums_of(TILES, ODD, 0)>(to);
    if constexpr (TILES > 1) tile_store<sums_of(TILES, ODD, 1)>(to + 16);
    if constexpr (TILES > 2) tile_store<sums_of(TILES, ODD, 2)>(to + 32);
  }

  /* TILES: of digits. */
  template <int TILES>
  static void run(void* arg, int64_t begin, int64_t end) {
    const FewJob& job = *(const FewJob*)arg;
    const Problem& p = *job.p;
    const int count = job.x->count;
    const int64_t n_groups = p.k / SIZE, stretch = count * kStretchBytes;
    const int8_t* const digits = job.x->digits;
    /* Stores of tiles take long to be seen by loads, and wait for products: one group later, if there are tiles. */
    constexpr bool kLate = TILES < 3;
    constexpr int kDelay = kLate ? 3 : 2;
    /* Codes of this strip and the next; sums that wait; scales of these sixteen groups and the last. */
    alignas(64) int8_t codes[2][kStripWeights * 16];
    alignas(64) int32_t sums[kWaiting][TILES * 16][16];
    alignas(64) float scale[2 * kLaneGroups][16];
    alignas(64) float acc[4 * kSmallRows][16]; /* [group % 4][row] */
    tile_configure(*(const TileConfig*)job.more);
    Walk<SIZE> walk(job, begin, end);
    {
      Strip<SIZE> strip;
      walk.next(strip);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) unpack(strip, q, codes[0]);
    }
    int now = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      for (int i = 0; i < 4 * count; ++i) _mm512_store_ps(acc[i], _mm512_setzero_ps());
      auto collect = [&](int64_t g) __attribute__((always_inline)) {
        const __m512 s = _mm512_load_ps(scale[g % (2 * kLaneGroups)]);
        const int32_t(*sum)[16] = sums[g % kWaiting];
        float(*to)[16] = acc + g % 4 * count;
        for (int m = 0; m < count; ++m, sum += 3, ++to) {
          _mm512_store_ps(*to, collected(_mm512_load_si512(sum[0]), _mm512_load_si512(sum[1]),
                                         _mm512_load_si512(sum[2]), s, _mm512_load_ps(*to)));
        }
      };
      auto group = [&]<int ODD>(int64_t g, const int8_t* c) __attribute__((always_inline)) {
        constexpr int odd = kLate ? ODD : 0;
        if (g % kLaneGroups == 0) {
          scales_to_lanes(p, unit * kOutputs, g, least(kLaneGroups, n_groups - g), scale + g % (2 * kLaneGroups));
        }
        const int8_t* x = digits + g * kStretches * stretch;
        zero<TILES, odd>();
        multiply<TILES, odd>(x, c);
        if constexpr (kStretches == 2) multiply<TILES, odd>(x + stretch, c + 1024);
        if (g >= kDelay) collect(g - kDelay);
        if constexpr (kLate) {
          if (g >= 1) store<TILES, 1 - odd>(sums[(g - 1) % kWaiting]);
        } else {
          store<TILES, 0>(sums[g % kWaiting]);
        }
      };
      for (int64_t g0 = 0; g0 < n_groups; g0 += M::kGroups) {
        const int8_t* c = codes[now];
        now ^= 1;
        Strip<SIZE> strip;
        walk.next(strip);
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          if (q % kStretches == 0) {
            const int64_t g = g0 + q / kStretches;
            if (g < n_groups) {
              if (q / kStretches % 2) group.template operator()<1>(g, c + q * 1024);
              else group.template operator()<0>(g, c + q * 1024);
            }
          }
          unpack(strip, q, codes[now]);
        }
      }
      if constexpr (kLate) {
        if (n_groups % 2) store<TILES, 0>(sums[(n_groups - 1) % kWaiting]);
        else store<TILES, 1>(sums[(n_groups - 1) % kWaiting]);
      }
      for (int64_t g = n_groups >= kDelay ? n_groups - kDelay : 0; g < n_groups; ++g) collect(g);
      finish(job, unit * kOutputs, acc);
    }
    tile_release();
  }

  static void small(const Problem& p) {
    Rows x;
    if (!fit_rows<SIZE>(p, x)) return;
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    const int tiles = (3 * x.count + 15) / 16;
    auto set = [&](int t, int rows) {
      config.rows[t] = (uint8_t)rows;
      config.bytes[t] = 64;
    };
    for (int i = 0; i < tiles; ++i) {
      const int rows = (int)least(16, 3 * x.count - 16 * i);
      set(sums_of(tiles, 0, i), rows);
      if (tiles < 3) set(sums_of(tiles, 1, i), rows);
      set(3 + i, rows);
    }
    set(6, 16);
    run_few(p, x, tiles == 1 ? run<1> : tiles == 2 ? run<2> : run<3>, &config);
  }
};

inline void amx_small_rows(const Problem& p) {
  if (!(p.spread < INFINITY)) {
    small_rows<Avx512>(p);
  } else if (p.group == 64) {
    AmxFew<64>::small(p);
  } else {
    AmxFew<128>::small(p);
  }
}

}  // namespace
}  // namespace t5
#endif
