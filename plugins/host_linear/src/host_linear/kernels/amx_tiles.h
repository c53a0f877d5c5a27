/* AMX tile instructions, with what compilers know of them: that they read or write memory, and the order they come in.
 *
 * Costs      Measured: a product takes a cycle for each row of its left tile, and about 50 until its sums can be used;
 *            a load takes 8 cycles beside everything else; a store takes 16 and waits for the product.
 * Source     Intel, "64 and IA-32 Architectures Software Developer's Manual", AMX instructions.
 */
#ifndef HOST_LINEAR_AMX_TILES_H
#define HOST_LINEAR_AMX_TILES_H

#include <stdint.h>

namespace linear {
namespace {

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16]; /* of a row, by tile */
  uint8_t rows[16];
};

inline void tile_configure(const TileConfig* config) { __asm__ volatile("ldtilecfg (%0)" ::"r"(config) : "memory"); }
inline void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }

/* Rows of the tile are `stride` bytes apart in memory. */
template <int T>
inline __attribute__((always_inline)) void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_store(void* to) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)64), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
/* TO += A @ B: row r of A holds 16 pairs of bfloat16 numbers, row q of B pair q of every column. */
template <int TO, int A, int B>
inline __attribute__((always_inline)) void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}

}  // namespace
}  // namespace linear
#endif
