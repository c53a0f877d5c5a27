// Fences. They order accesses around atomics, which is beyond what the lab follows: a value that is handed over from
// one threadgroup to another by an atomic flag is reported as a race, with a fence or without.
#pragma once

#include "atomic.h"
#include "simd.h"

namespace metal {

LAB_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

}  // namespace metal
