// What happens at every load and store of a kernel: bounds, initialisation, races, counters.
#pragma once

#include "state.h"

namespace lab {

enum class Access : uint8_t { read, write, atomic_read, atomic_write, atomic_modify };
inline bool reads(Access a) { return a == Access::read || a == Access::atomic_read || a == Access::atomic_modify; }
inline bool writes(Access a) { return a == Access::write || a == Access::atomic_write || a == Access::atomic_modify; }
inline bool atomic(Access a) { return a >= Access::atomic_read; }

void outside(uintptr_t address, uint64_t bytes, Access a, uintptr_t pc, Slot* slot);
void inside(Slot& slot, uint64_t offset, unsigned bytes, Access a, uintptr_t pc);
void inside_threadgroup(uintptr_t address, unsigned bytes, Access a, uintptr_t pc);

inline void access(uintptr_t address, uint64_t bytes, Access a, uintptr_t pc) {
    Lane* lane = L ? L->current : nullptr;
    if (pending.waiting) settle_race();
    if (!lane || address - reinterpret_cast<uintptr_t>(lane->stack) < STACK_BYTES) return;
    Slot* slot = L->arena.find(address);
    if (!slot) {
        if (address >= L->module_lo && address < L->module_hi) return;  // constant tables, boards
        return outside(address, bytes, a, pc, nullptr);
    }
    if ((++L->ticks & 0xffff) == 0) check_time();
    while (bytes) {
        auto n = static_cast<unsigned>(bytes < 16 ? bytes : 16);
        if (slot == L->arena.slots) {
            inside_threadgroup(address, n, a, pc);
        } else if (address < slot->lo || address + n > slot->hi) {
            return outside(address, n, a, pc, slot);
        } else {
            inside(*slot, address - slot->lo, n, a, pc);
        }
        address += n;
        bytes -= n;
    }
}

}  // namespace lab
