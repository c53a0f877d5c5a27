#include "access.h"

namespace lab {
namespace {

// How the access in `old` relates to one by the running lane now.
bool ordered(const Cell& old, int memory, unsigned lane) {
    if (old.group != L->group) return false;
    bool many = old.flags & (CELL_MANY_SIMD | CELL_MANY_GROUP | CELL_MANY_GRID);
    if (old.flags & CELL_MANY_GRID) return false;
    if (old.group_epoch < L->group_epoch[memory]) return true;
    if (old.lane == lane && !many) return true;
    if (old.flags & CELL_MANY_GROUP) return false;
    return old.lane / SIMD == lane / SIMD && old.simd_epoch < L->simds[lane / SIMD].epoch[memory];
}

void fill_race(lab_fault& f, const Cell& old, Access a, bool other_write, unsigned bytes) {
    f.size = bytes;
    f.write = writes(a);
    f.other_write = other_write;
    const uint32_t* d = L->dispatch;
    const auto& g = L->groups[old.group - 1];
    uint32_t dims[2];  // of the group, which is smaller at the edge of the grid
    for (int i = 0; i < 2; i++) {
        uint32_t left = L->abi->grid[i] - g[i] * d[i];
        dims[i] = left < d[i] ? left : d[i];
    }
    f.other[0] = g[0] * d[0] + old.lane % dims[0];
    f.other[1] = g[1] * d[1] + old.lane / dims[0] % dims[1];
    f.other[2] = g[2] * d[2] + old.lane / dims[0] / dims[1];
}

// `address` is where the running lane's access starts.
void race(const Cell& old, Access a, bool other_write, uintptr_t pc, int space, int buffer, uint64_t offset,
          uintptr_t address, unsigned bytes) {
    if (a == Access::write && other_write) {
        pending.waiting = true;
        pending.address = address;
        pending.bytes = bytes;
        std::memcpy(pending.before, reinterpret_cast<void*>(address), bytes);
        pending.fault = new_fault(FAULT_RACE, pc, old.pc, space, buffer, static_cast<int64_t>(offset));
        fill_race(pending.fault, old, a, other_write, bytes);
        return;
    }
    if (lab_fault* f = report(FAULT_RACE, pc, old.pc, space, buffer, static_cast<int64_t>(offset)))
        fill_race(*f, old, a, other_write, bytes);
}

// One record stands for all accesses of its kind since the last barrier.
void merge(Cell& old, Cell next, bool valid, int memory, unsigned me) {
    if (valid && !ordered(old, memory, me)) {
        if (old.group != L->group) {
            next.flags |= CELL_MANY_GRID;
        } else {
            next.flags |= old.flags & (CELL_MANY_SIMD | CELL_MANY_GROUP | CELL_MANY_GRID);
            next.flags |= old.lane / SIMD == me / SIMD ? CELL_MANY_SIMD : CELL_MANY_GROUP;
        }
    }
    old = next;
}

// Compares with the last accesses to each byte and takes this one down. `memory`: 0 device, 1 threadgroup; `at`: the
// place in the slot's records. Two atomic accesses never race, so theirs have records of their own: an atomic access
// must not stand for the plain one that the same lane made before it.
void order(Slot& slot, uint64_t at, uintptr_t address, unsigned bytes, Access a, uintptr_t pc, int memory, int space,
           int buffer, uint64_t offset) {
    Lane& lane = *L->current;
    unsigned me = lane.where.thread_index_in_threadgroup;
    bool found = false;
    Cell mine{L->group, L->group_epoch[memory], L->simds[me / SIMD].epoch[memory],
              static_cast<uint32_t>(relative(pc)), static_cast<uint16_t>(me), CELL_VALID};
    // Threadgroup memory belongs to one group: what an earlier group left is gone.
    auto valid = [&](const Cell& c) { return (c.flags & CELL_VALID) && (memory == 0 || c.group == L->group); };
    auto check = [&](const Cell& c, bool other_write, unsigned i) {
        if (found || !valid(c) || ordered(c, memory, me)) return;
        race(c, a, other_write, pc, space, buffer, offset + i, address, bytes);
        found = true;
    };
    if (atomic(a) && !slot.track_atomics(L->pages)) return abort_launch();
    for (unsigned i = 0; i < bytes; i++) {
        Cell &r = slot.readers[at + i], &w = slot.writers[at + i];
        check(w, true, i);
        if (writes(a)) check(r, false, i);
        if (slot.atomic_writers && !atomic(a)) {
            check(slot.atomic_writers[at + i], true, i);
            if (writes(a)) check(slot.atomic_readers[at + i], false, i);
        }
        if (atomic(a)) {
            Cell& c = writes(a) ? slot.atomic_writers[at + i] : slot.atomic_readers[at + i];
            merge(c, mine, valid(c), memory, me);
            continue;
        }
        if (writes(a)) w = mine;
        if (reads(a)) merge(r, mine, valid(r), memory, me);
    }
}

}  // namespace

PendingRace pending;

void settle_race() {
    pending.waiting = false;
    bool same = std::memcmp(pending.before, reinterpret_cast<void*>(pending.address), pending.bytes) == 0;
    pending.fault.kind = same ? FAULT_RACE_SAME_VALUE : FAULT_RACE;
    add_fault(pending.fault);
}

void outside(uintptr_t address, uint64_t bytes, Access a, uintptr_t pc, Slot* slot) {
    auto kind = writes(a) ? FAULT_OUT_OF_BOUNDS_WRITE : FAULT_OUT_OF_BOUNDS_READ;
    int space = 2, buffer = -1;
    auto offset = static_cast<int64_t>(address);
    if (slot && slot != L->arena.slots) {
        space = 0;
        buffer = static_cast<int>(slot - L->arena.slots) - 1;
        offset = static_cast<int64_t>(address) - static_cast<int64_t>(slot->lo);
    }
    if (lab_fault* f = report(kind, pc, 0, space, buffer, offset)) {
        f->size = static_cast<uint32_t>(bytes);
        f->write = writes(a);
    }
    bool mapped = slot && address >= slot->map_lo && address + bytes <= slot->map_hi;
    if (!mapped) abort_launch();
}

void inside(Slot& slot, uint64_t offset, unsigned bytes, Access a, uintptr_t pc) {
    int buffer = static_cast<int>(&slot - L->arena.slots) - 1;
    lab_buffer& info = *slot.info;
    uint64_t first = (offset + slot.skew) >> 7, last = (offset + slot.skew + bytes - 1) >> 7;
    if (offset < slot.touched_lo) slot.touched_lo = offset;
    if (offset + bytes > slot.touched_hi) slot.touched_hi = offset + bytes;
    uint64_t occurrence = L->transactions.occurrence(pc);
    auto id = static_cast<unsigned>(buffer);
    unsigned lines = L->transactions.touch(occurrence, first, id);
    if (last != first) lines += L->transactions.touch(occurrence, last, id);
    if (reads(a)) {
        info.read_bytes += bytes;
        info.read_transactions += lines;
        slot.read.set(offset, bytes);
        if (!slot.initialised && !slot.written.all(offset, bytes)) {
            if (lab_fault* f = report(FAULT_UNINITIALISED_READ, pc, 0, 0, buffer, static_cast<int64_t>(offset)))
                f->size = bytes;
        }
    }
    if (writes(a)) {
        info.written_bytes += bytes;
        info.write_transactions += lines;
        if (slot.read_only) {
            if (lab_fault* f = report(FAULT_WRITE_TO_INPUT, pc, 0, 0, buffer, static_cast<int64_t>(offset)))
                f->size = bytes;
            return;
        }
        slot.written.set(offset, bytes);
    }
    if (!slot.read_only) {
        order(slot, offset, slot.lo + offset, bytes, a, pc, 0, 0, buffer, offset);
    }
}

void inside_threadgroup(uintptr_t address, unsigned bytes, Access a, uintptr_t pc) {
    Slot& slot = L->arena.slots[0];
    int i = L->array_at(address);
    if (i < 0) return outside(address, bytes, a, pc, nullptr);
    ThreadgroupArray& array = L->arrays[static_cast<size_t>(i)];
    auto local = static_cast<int64_t>(address - array.lo);  // negative below the array
    if (local < 0 || static_cast<uint64_t>(local) + bytes > array.nbytes) {
        auto kind = writes(a) ? FAULT_OUT_OF_BOUNDS_WRITE : FAULT_OUT_OF_BOUNDS_READ;
        if (lab_fault* f = report(kind, pc, 0, 1, i, local)) {
            f->size = bytes;
            f->write = writes(a);
        }
        if (address < array.map_lo || address + bytes > array.map_hi) abort_launch();
        return;
    }
    uint64_t at = array.track + static_cast<uint64_t>(local);
    if (reads(a)) {
        array.read_bytes += bytes;
        if (!slot.written.all(at, bytes)) {
            if (lab_fault* f = report(FAULT_UNINITIALISED_READ, pc, 0, 1, i, local)) f->size = bytes;
        }
    }
    if (writes(a)) {
        array.written_bytes += bytes;
        slot.written.set(at, bytes);
    }
    order(slot, at, address, bytes, a, pc, 1, 1, i, static_cast<uint64_t>(local));
}

}  // namespace lab
