// Where the buffers lie, and what is remembered of every byte of them.
//
// Each buffer gets a slot of 64 GiB of address space to itself, of which only the buffer and a guard zone on
// either side are mapped. So an index that is wrong by any 32-bit amount cannot land in another buffer, the
// slot of an address is a shift away, and a buffer may be larger than the machine's memory as long as few
// pages of it are touched.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "launch_abi.h"

namespace lab {

// The last access to one byte. Every field but the first is meaningless while `flags` is 0.
struct Cell {
    uint32_t group;        // serial number of the threadgroup
    uint32_t group_epoch;  // barriers of the group so far that ordered this kind of memory
    uint32_t simd_epoch;   // the same of the SIMD group
    uint32_t pc;
    uint16_t lane;  // in the threadgroup
    uint16_t flags;
};
enum : uint16_t { CELL_VALID = 1, CELL_MANY_SIMD = 4, CELL_MANY_GROUP = 8, CELL_MANY_GRID = 16 };

// A bit per byte of a buffer.
struct Bits {
    uint8_t* words = nullptr;

    static uint32_t mask(uint64_t offset, unsigned n) { return ((1u << n) - 1) << (offset & 7); }
    void set(uint64_t offset, unsigned n) {  // n <= 16
        uint32_t w;
        std::memcpy(&w, words + (offset >> 3), 4);
        w |= mask(offset, n);
        std::memcpy(words + (offset >> 3), &w, 4);
    }
    bool all(uint64_t offset, unsigned n) const {
        uint32_t w;
        std::memcpy(&w, words + (offset >> 3), 4);
        return (~w & mask(offset, n)) == 0;
    }
    uint64_t count(uint64_t first, uint64_t end) const {
        uint64_t total = 0, w = 0, i = first;
        for (; i < end && (i & 63); i++) total += words[i >> 3] >> (i & 7) & 1;
        for (; i + 64 <= end; i += 64) {
            std::memcpy(&w, words + (i >> 3), 8);
            total += static_cast<uint64_t>(__builtin_popcountll(w));
        }
        for (; i < end; i++) total += words[i >> 3] >> (i & 7) & 1;
        return total;
    }
    int64_t first_clear(uint64_t nbytes) const {
        for (uint64_t i = 0; i < nbytes; i++) {
            if ((i & 7) == 0 && i + 8 <= nbytes && words[i >> 3] == 0xff) {
                i += 7;
                continue;
            }
            if (!(words[i >> 3] >> (i & 7) & 1)) return static_cast<int64_t>(i);
        }
        return -1;
    }
};

// Zeroed pages that exist once they are touched.
class Pages {
public:
    void* take(uint64_t bytes) {
        bytes = (bytes + 4095) & ~uint64_t{4095};
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return nullptr;
        taken_.push_back({p, bytes});
        return p;
    }
    ~Pages() {
        for (auto& t : taken_) munmap(t.first, t.second);
    }

private:
    std::vector<std::pair<void*, uint64_t>> taken_;
};

struct Slot {
    uintptr_t lo = 0, hi = 0;          // the buffer
    uintptr_t map_lo = 0, map_hi = 0;  // with its guard zones
    bool read_only = false, initialised = true, used = false, padded = false;
    unsigned skew = 0;
    uint64_t touched_lo = ~uint64_t{0}, touched_hi = 0;  // offsets
    lab_buffer* info = nullptr;
    Bits written, read;
    uint64_t tracked = 0;  // bytes that have the records below
    Cell* readers = nullptr;
    Cell* writers = nullptr;
    Cell* atomic_readers = nullptr;  // from the first atomic access on
    Cell* atomic_writers = nullptr;

    bool track(Pages& pages, uint64_t nbytes) {
        tracked = nbytes;
        readers = static_cast<Cell*>(pages.take((nbytes + 16) * sizeof(Cell)));
        writers = static_cast<Cell*>(pages.take((nbytes + 16) * sizeof(Cell)));
        return readers && writers;
    }
    bool track_atomics(Pages& pages) {
        if (atomic_writers) return true;
        atomic_readers = static_cast<Cell*>(pages.take((tracked + 16) * sizeof(Cell)));
        atomic_writers = static_cast<Cell*>(pages.take((tracked + 16) * sizeof(Cell)));
        return atomic_readers && atomic_writers;
    }
};

constexpr unsigned MAX_SLOTS = 64;
constexpr unsigned PARTS = 256;
constexpr uint64_t GUARD = uint64_t{1} << 18;

class Arena {
public:
    bool reserve() {
        // Where address space is short, slots are smaller.
        for (shift_ = 36; shift_ >= 24; shift_ -= 2) {
            bytes_ = uint64_t{MAX_SLOTS} << shift_;
            void* p = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) continue;
            base_ = reinterpret_cast<uintptr_t>(p);
            return true;
        }
        return false;
    }
    ~Arena() {
        if (base_) munmap(reinterpret_cast<void*>(base_), bytes_);
    }
    // Maps memory for a buffer in the middle of slot i, `skew` bytes behind the start of a page.
    bool map(unsigned i, uint64_t nbytes, unsigned skew) {
        uint64_t inner = ((nbytes + skew + 4095) & ~uint64_t{4095}) + 2 * GUARD;
        if (i >= MAX_SLOTS || inner > uint64_t{1} << shift_) return false;
        Slot& s = slots[i];
        s.map_lo = base_ + (uint64_t{i} << shift_) + (((uint64_t{1} << shift_) - inner) / 2 & ~uint64_t{4095});
        s.map_hi = s.map_lo + inner;
        s.lo = s.map_lo + GUARD + skew;
        s.skew = skew;
        s.hi = s.lo + nbytes;
        s.used = mprotect(reinterpret_cast<void*>(s.map_lo), inner, PROT_READ | PROT_WRITE) == 0;
        return s.used;
    }
    // Slot 0 is threadgroup memory: it is divided into parts, which are mapped one by one.
    void divide_first() {
        Slot& s = slots[0];
        s.lo = base_;
        s.hi = base_ + (uint64_t{1} << shift_);
        s.used = true;
    }
    uint64_t part() const { return (uint64_t{1} << shift_) / PARTS; }
    Slot* find(uintptr_t address) {
        uint64_t off = address - base_;
        if (off >= bytes_) return nullptr;
        Slot& s = slots[off >> shift_];
        return s.used ? &s : nullptr;
    }

    Slot slots[MAX_SLOTS];

private:
    uintptr_t base_ = 0;
    uint64_t bytes_ = 0;
    unsigned shift_ = 36;
};

}  // namespace lab
