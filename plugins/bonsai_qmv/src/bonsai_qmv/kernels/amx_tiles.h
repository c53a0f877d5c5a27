/* Tile instructions that compilers know to read or write memory: what their own intrinsics do not say of loads.
 *
 * Costs      On the processors that were measured a load takes 8 cycles beside everything else, and a product a cycle
 *            for each row of its left tile, 9 at least. A store takes 16 cycles in which nothing else is issued, and
 *            keeps what comes behind it waiting if its product is not done: other products belong between the two.
 * Source     Written for this library; tile instructions as in Intel's architecture manuals.
 */
#ifndef BONSAI_QMV_AMX_TILES_H
#define BONSAI_QMV_AMX_TILES_H

#include <stdint.h>

namespace bonsai {
namespace {

/* Rows of tiles are 64 bytes apart in memory. */
template <int T>
inline __attribute__((always_inline)) void tile_load(const void* from) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)64), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_store(void* to) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)64), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
/* TO += A @ B, signed bytes by unsigned bytes. */
template <int TO, int A, int B>
inline __attribute__((always_inline)) void tile_multiply() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}

/* Signed bytes by signed bytes. */
template <int TO, int A, int B>
inline __attribute__((always_inline)) void tile_multiply_signed() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}

}  // namespace
}  // namespace bonsai
#endif
