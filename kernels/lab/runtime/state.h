// Everything that one launch knows. There is one launch at a time in a process.
#pragma once

#include <csetjmp>
#include <csignal>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "../include/lab/abi.h"
#include "fiber.h"
#include "launch_abi.h"
#include "memory.h"
#include "transactions.h"

namespace lab {

enum class State : uint8_t { ready, simd, simd_barrier, group_barrier, done };

constexpr unsigned SIMD = 32;
constexpr unsigned MAX_LANES = 4096;  // far above what Metal allows, so that a launch that is too large still runs
constexpr size_t STACK_BYTES = 256 << 10;
constexpr unsigned MAX_CALLS = 64;
constexpr unsigned MAX_LOOPS = 16;  // around each other, in which lanes wait; further ones are not counted

struct Lane {
    Context context;
    State state = State::done;
    int op = 0;            // of the SIMD operation it waits in
    int flags = 0;         // of the barrier it waits in; the line of an operation over the active lanes
    unsigned bytes = 0;    // of what it shows the others
    uintptr_t pc = 0;      // where it waits
    char* stack = nullptr;
    lab_board* board = nullptr;
    lab_position where{};
    unsigned depth = 0;  // of the calls below
    uintptr_t calls[MAX_CALLS];
    alignas(16) unsigned char shown[64];
    unsigned loops = 0;  // around the place where the lane is, and in which round of each it is
    uint32_t rounds[MAX_LOOPS];

    bool same_round(const Lane& o) const {
        unsigned counted = loops < MAX_LOOPS ? loops : MAX_LOOPS;
        return loops == o.loops && std::memcmp(rounds, o.rounds, counted * sizeof(rounds[0])) == 0;
    }
    uint64_t chain() const {
        uint64_t h = depth;
        for (unsigned i = 0; i < depth && i < MAX_CALLS; i++) h = h * 0x100000001b3u ^ calls[i];
        return h;
    }
};

struct SimdGroup {
    unsigned first = 0, count = 0;  // lanes
    unsigned turn = 0;
    uint32_t epoch[2] = {0, 0};  // barriers that ordered device, threadgroup memory
};

// A `threadgroup` variable. Each lies in a part of the slot of its own (several if it is large), so that an index
// that is wrong does not land in another one, and which one an address belongs to is a division away.
struct ThreadgroupArray {
    std::string name;
    unsigned serial = 0;  // of the declaration in the text
    uintptr_t lo = 0, map_lo = 0, map_hi = 0;
    uint64_t nbytes = 0;
    uint64_t track = 0;  // where its bytes are in the slot's records
    uint64_t read_bytes = 0, written_bytes = 0;
    unsigned align = 1;
    const unsigned char* padding = nullptr;  // per byte of an element whether it is padding; null: none is
    unsigned element = 1;
};

// Boards are static, so that the hooks know their addresses for memory of the shared object.
extern lab_board boards[MAX_LANES / SIMD][2];

struct Launch {
    lab_launch* abi = nullptr;
    Pages pages;  // before the arena: unmapped after it
    Arena arena;  // slot 0 is threadgroup memory, buffer i has slot i + 1
    Transactions transactions;
    std::vector<Lane> lanes;
    std::vector<SimdGroup> simds;
    std::vector<ThreadgroupArray> arrays;
    std::vector<int16_t> owners;  // of the parts of slot 0 in use: which array
    Lane* current = nullptr;
    Context scheduler;
    char* stacks = nullptr;
    size_t stacks_bytes = 0;
    uint32_t group = 0;  // serial number of the running threadgroup
    uint32_t group_epoch[2] = {0, 0};
    uint32_t dims[3] = {0, 0, 0};  // threads of the running group
    std::vector<std::array<uint32_t, 3>> groups;
    uint32_t dispatch[3] = {0, 0, 0}, groups_per_grid[3] = {0, 0, 0};
    uintptr_t module_lo = 0, module_hi = 0;
    bool aborted = false;
    uint64_t ticks = 0;
    double deadline = 0;
    volatile std::sig_atomic_t interrupted = 0;
    uint64_t ticks_seen = 0;  // at the watch's last look
    unsigned still = 0;       // looks in a row at which nothing had happened
    sigjmp_buf crash;

    // The threadgroup variable whose part of slot 0 has this address, the last one behind them; -1 if there is none.
    int array_at(uintptr_t address) const {
        uint64_t part = (address - arena.slots[0].lo) / arena.part();
        return owners.empty() ? -1 : owners[part < owners.size() ? part : owners.size() - 1];
    }
};

extern Launch* L;

// Two writes that race are judged once the second has happened: did it change anything?
struct PendingRace {
    bool waiting = false;
    uintptr_t address = 0;
    unsigned bytes = 0;
    unsigned char before[16];
    lab_fault fault;  // as it will be reported
};
extern PendingRace pending;
void settle_race();

inline double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A threadgroup variable at the start of a group: nobody has written it, but for its padding.
void forget(const ThreadgroupArray& array);

// Leaves the running lane for good and ends the launch.
[[noreturn]] void abort_launch();
void check_time();

// A fault of the running lane, not yet reported; one that is added to the report (nullptr: it was known).
lab_fault new_fault(lab_fault_kind kind, uintptr_t pc, uint64_t other_pc, int space, int buffer, int64_t offset);
lab_fault* add_fault(const lab_fault& fault);
// Both at once.
lab_fault* report(lab_fault_kind kind, uintptr_t pc, uint64_t other_pc, int space, int buffer, int64_t offset);
uint64_t relative(uintptr_t pc);

}  // namespace lab
