/* AMX tile instructions that compilers know to read or write memory, and the order they come in: what their own
 * intrinsics do not say of loads.
 *
 * A tile is up to 16 rows of up to 64 bytes. Threads configure tiles before they use them, and release them after.
 *
 * Costs      On the processors that were measured a load takes 8 cycles beside everything else, and a product a cycle
 *            for each row of its left tile, 9 at least; its sums can be used after about 50. A store takes 16 cycles in
 *            which nothing else is issued, and keeps what comes behind it waiting if its product is not done: other
 *            products belong between the two.
 * Source     Written for this library; Intel, "64 and IA-32 Architectures Software Developer's Manual", AMX.
 */
#ifndef ACCEL_AMX_H
#define ACCEL_AMX_H

#include <stdint.h>

namespace accel_amx {
namespace {

/* What LDTILECFG reads. Compilers take the intrinsic for a read of eight bytes. */
struct TileConfig {
  alignas(64) uint8_t palette;
  uint8_t start_row, reserved[14];
  uint16_t bytes[16]; /* of a row, by tile */
  uint8_t rows[16];
};
inline void tile_configure(const TileConfig& config) {
  __asm__ volatile("ldtilecfg (%0)" ::"r"(&config), "m"(config) : "memory");
}
inline void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }

/* Rows of the tile are `stride` bytes apart in memory. */
template <int T>
inline __attribute__((always_inline)) void tile_load(const void* from, int64_t stride = 64) {
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

/* TO += A @ B, int32 sums of products of bytes: row r of A holds 64 of them, row q of B numbers 4 q ... 4 q + 3 of every
 * column. Both signed, or those of A signed and those of B unsigned. */
template <int TO, int A, int B>
inline __attribute__((always_inline)) void tile_multiply_signed() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}
template <int TO, int A, int B>
inline __attribute__((always_inline)) void tile_multiply_mixed() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}
/* TO += A @ B, float32 sums: row r of A holds 16 pairs of bfloat16 numbers, row q of B pair q of every column. */
template <int TO, int A, int B>
inline __attribute__((always_inline)) void tile_multiply_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}

}  // namespace
}  // namespace accel_amx
#endif
