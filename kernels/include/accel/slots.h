/* accel/slots.h: working memory for the threads of a parallel loop. C++11.
 *
 * A task does not know which thread it runs on. There are as many slots as threads, so that one is free, or about to be;
 * a task takes one, and gives it back before it ends. Memory is that of accel_scratch: the call's, not set.
 */
#ifndef ACCEL_SLOTS_H
#define ACCEL_SLOTS_H

#include <accel/kernel.h>
#include <string.h>

namespace accel_slots {
namespace {

struct Slots {
  float* memory;
  int64_t size; /* floats per slot, a multiple of 16 */
  unsigned char* taken;
  int32_t count;

  /* False if there is no memory; the call has failed then. */
  bool make(const accel_call* call, int64_t floats) {
    count = call->threads < 1 ? 1 : call->threads;
    size = (floats + 15) / 16 * 16;
    memory = (float*)accel_scratch(call, (size_t)(size * count) * sizeof(float) + (size_t)count);
    if (!memory) return false;
    taken = (unsigned char*)(memory + size * count);
    memset(taken, 0, (size_t)count);
    return true;
  }
  int32_t take() const {
    for (int32_t i = 0;; i = i + 1 < count ? i + 1 : 0) {
      if (!__atomic_exchange_n(&taken[i], 1, __ATOMIC_ACQUIRE)) return i;
    }
  }
  void give(int32_t i) const { __atomic_store_n(&taken[i], 0, __ATOMIC_RELEASE); }
  float* of(int32_t i) const { return memory + size * i; }
};

}  // namespace
}  // namespace accel_slots
#endif /* ACCEL_SLOTS_H */
