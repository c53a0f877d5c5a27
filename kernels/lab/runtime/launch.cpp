// From the launch that Python describes to its results: memory, groups, faults, signals.
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "access.h"

namespace lab {

Launch* L = nullptr;
void run_group(const uint32_t group[3]);

uint64_t relative(uintptr_t pc) { return pc >= L->module_lo && pc < L->module_hi ? pc - L->module_lo : 0; }

lab_fault new_fault(lab_fault_kind kind, uintptr_t pc, uint64_t other_pc, int space, int buffer, int64_t offset) {
    lab_fault f = {};
    f.kind = kind;
    f.pc = relative(pc);
    f.other_pc = other_pc;
    f.space = space;
    f.buffer = buffer;
    f.offset = offset;
    f.count = 1;
    if (Lane* l = L->current) {
        std::memcpy(f.thread, l->where.thread_position_in_grid, sizeof(f.thread));
        unsigned depth = l->depth < MAX_CALLS ? l->depth : MAX_CALLS;
        for (unsigned i = 0; i < 8 && i < depth; i++) f.stack[i] = relative(l->calls[depth - 1 - i]);
    }
    return f;
}

// Faults of one kind at one place are counted, and there is an end to their number.
lab_fault* add_fault(const lab_fault& fault) {
    lab_launch& abi = *L->abi;
    for (int i = 0; i < abi.fault_count; i++) {
        lab_fault& f = abi.faults[i];
        if (f.kind == fault.kind && f.pc == fault.pc && f.other_pc == fault.other_pc && f.space == fault.space &&
            f.buffer == fault.buffer) {
            f.count++;
            return nullptr;
        }
    }
    if (abi.fault_count >= abi.fault_capacity) return nullptr;
    abi.faults[abi.fault_count] = fault;
    return &abi.faults[abi.fault_count++];
}

lab_fault* report(lab_fault_kind kind, uintptr_t pc, uint64_t other_pc, int space, int buffer, int64_t offset) {
    return add_fault(new_fault(kind, pc, other_pc, space, buffer, offset));
}

void forget(const ThreadgroupArray& array) {
    std::memset(reinterpret_cast<void*>(array.lo), 0xff, array.nbytes);  // nobody may rely on what it was
    Bits& written = L->arena.slots[0].written;
    std::memset(written.words + array.track / 8, 0, (array.nbytes + 7) / 8);
    for (uint64_t i = 0; array.padding && i < array.nbytes; i++)
        if (array.padding[i % array.element]) written.set(array.track + i, 1);
}

void abort_launch() {
    Lane* me = L->current;
    L->aborted = true;
    switch_to(me->context, L->scheduler);
    __builtin_unreachable();
}

void check_time() {
    if (L->aborted || (!L->interrupted && now() < L->deadline)) return;
    if (!L->interrupted) report(FAULT_TIMEOUT, 0, 0, 2, -1, 0);
    L->aborted = true;
    if (L->current) abort_launch();
}

namespace {

struct sigaction old_actions[NSIG];
constexpr int CAUGHT[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

// The last resort: an access that the checks did not see. Other threads keep what was installed before.
void on_crash(int number, siginfo_t* info, void*) {
    if (!L || !L->current) {
        sigaction(number, &old_actions[number], nullptr);
        return;
    }
    if (lab_fault* f = report(FAULT_CRASH, 0, 0, 2, -1, 0)) {
        f->value = static_cast<uint64_t>(number);
        f->offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(info->si_addr));
    }
    L->aborted = true;
    siglongjmp(L->crash, 1);
}

// Python notices Ctrl-C after the launch only, so the launch ends for it.
void on_interrupt(int number, siginfo_t* info, void* context) {
    if (L) L->interrupted = 1;
    struct sigaction& old = old_actions[number];
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(number, info, context);
    } else {
        old.sa_handler(number);
    }
}

// A lane that computes without reaching any memory is seen by nothing else. Where nothing has happened for two
// looks the lane is not inside of the runtime, and may be left where it is.
void on_watch(int, siginfo_t*, void*) {
    if (!L || !L->current) return;
    bool moves = L->ticks != L->ticks_seen;
    L->ticks_seen = L->ticks;
    L->still = moves ? 0 : L->still + 1;
    if (L->still < 2 || L->aborted || (!L->interrupted && now() < L->deadline)) return;
    if (!L->interrupted) report(FAULT_TIMEOUT, 0, 0, 2, -1, 0);
    L->aborted = true;
    siglongjmp(L->crash, 1);
}

class Watch {
public:
    Watch() {
        struct sigaction a {};
        a.sa_sigaction = on_watch;
        a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
        sigaction(number_, &a, &old_actions[number_]);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = number_;
        event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
        armed_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
        itimerspec often{{0, 50'000'000}, {0, 50'000'000}};
        if (armed_) timer_settime(timer_, 0, &often, nullptr);
        sigaction(SIGINT, nullptr, &old_actions[SIGINT]);
        struct sigaction& old = old_actions[SIGINT];
        chained_ = (old.sa_flags & SA_SIGINFO) || (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN);
        if (!chained_) return;
        a.sa_sigaction = on_interrupt;
        sigaction(SIGINT, &a, nullptr);
    }
    ~Watch() {
        if (armed_) timer_delete(timer_);
        // A signal of the timer may still be on its way: then nobody must be killed by it.
        signal(number_, SIG_IGN);
        sigaction(number_, &old_actions[number_], nullptr);
        if (chained_) sigaction(SIGINT, &old_actions[SIGINT], nullptr);
    }

private:
    int number_ = SIGRTMAX - 3;
    timer_t timer_{};
    bool armed_ = false, chained_ = false;
};

class Signals {
public:
    Signals() : stack_(64 << 10) {
        stack_t s{};
        s.ss_sp = stack_.data();
        s.ss_size = stack_.size();
        sigaltstack(&s, &old_stack_);
        struct sigaction a {};
        a.sa_sigaction = on_crash;
        a.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int n : CAUGHT) sigaction(n, &a, &old_actions[n]);
    }
    ~Signals() {
        for (int n : CAUGHT) sigaction(n, &old_actions[n], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }

private:
    std::vector<char> stack_;
    stack_t old_stack_{};
};

int find_module(dl_phdr_info* info, size_t, void*) {
    auto here = reinterpret_cast<uintptr_t>(&find_module);
    uintptr_t lo = ~uintptr_t{0}, hi = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
        uintptr_t a = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (a < lo) lo = a;
        if (a + info->dlpi_phdr[i].p_memsz > hi) hi = a + info->dlpi_phdr[i].p_memsz;
    }
    if (here < lo || here >= hi) return 0;
    L->module_lo = info->dlpi_addr;
    L->module_hi = hi;
    return 1;
}

constexpr uint64_t THREADGROUP_ARENA = 4 << 20;

bool set_up_slot(unsigned i, uint64_t nbytes, bool tracked, unsigned skew = 0) {
    Slot& s = L->arena.slots[i];
    if (i == 0) {
        L->arena.divide_first();
    } else if (!L->arena.map(i, nbytes, skew)) {
        return false;
    }
    s.written.words = static_cast<uint8_t*>(L->pages.take(nbytes / 8 + 16));
    s.read.words = static_cast<uint8_t*>(L->pages.take(nbytes / 8 + 16));
    if (!s.written.words || !s.read.words) return false;
    return !tracked || s.track(L->pages, nbytes);
}

bool set_up(lab_launch& abi) {
    if (!L->arena.reserve()) return false;
    if (!set_up_slot(0, THREADGROUP_ARENA, true)) return false;
    for (int i = 0; i < abi.buffer_count; i++) {
        lab_buffer& b = abi.buffers[i];
        auto id = static_cast<unsigned>(i) + 1;
        if (!set_up_slot(id, b.nbytes, !b.read_only, b.skew)) return false;
        Slot& s = L->arena.slots[id];
        s.info = &b;
        s.read_only = b.read_only;
        s.initialised = b.initialised;
        // Padding of what the kernel says the buffer holds counts as written.
        const lab_kernel_entry& kernel = lab_get_module()->kernels[abi.kernel];
        for (int k = 0; k < kernel.param_count && !b.initialised; k++) {
            const lab_param& p = kernel.params[k];
            const unsigned char* padding = p.padding && p.index == b.index ? p.padding() : nullptr;
            for (uint64_t at = 0; padding && at < b.nbytes; at++)
                if (padding[at % p.pointee_bytes]) s.written.set(at, 1);
            s.padded = s.padded || padding;
        }
        if (b.data && b.initialised) std::memcpy(reinterpret_cast<void*>(s.lo), b.data, b.nbytes);
        // What the kernel never wrote shows as NaN or -1, unless the buffer is too large to touch.
        if (b.data && !b.initialised) std::memset(reinterpret_cast<void*>(s.lo), 0xff, b.nbytes);
    }
    for (int i = 0; i < abi.threadgroup_count; i++)
        if (abi.threadgroup_bytes[i])
            lab_threadgroup_variable(("[[threadgroup(" + std::to_string(i) + ")]]").c_str(), 0,
                                     abi.threadgroup_bytes[i], 16, nullptr, 1);
    unsigned lanes = 1;
    for (int i = 0; i < 3; i++) {
        L->dispatch[i] = abi.threadgroup[i] < abi.grid[i] ? abi.threadgroup[i] : abi.grid[i];
        L->groups_per_grid[i] = (abi.grid[i] + L->dispatch[i] - 1) / L->dispatch[i];
        lanes *= L->dispatch[i];
    }
    if (lanes > MAX_LANES) return false;
    L->stacks_bytes = lanes * STACK_BYTES;
    L->stacks = static_cast<char*>(L->pages.take(L->stacks_bytes));
    if (!L->stacks) return false;
    for (unsigned i = 0; i < lanes; i++) mprotect(L->stacks + i * STACK_BYTES, 4096, PROT_NONE);
    L->lanes.reserve(lanes);
    return true;
}

void finish(lab_launch& abi) {
    for (int i = 0; i < abi.buffer_count; i++) {
        lab_buffer& b = abi.buffers[i];
        Slot& s = L->arena.slots[i + 1];
        b.touched_lo = s.touched_hi ? s.touched_lo : 0;
        b.touched_hi = s.touched_hi;
        b.unique_read = s.read.count(b.touched_lo, b.touched_hi);
        b.unique_written = s.padded ? s.written.count(0, b.nbytes) : s.written.count(b.touched_lo, b.touched_hi);
        b.first_unwritten = s.written.first_clear(b.nbytes);
        if (b.data && !b.read_only) std::memcpy(b.data, reinterpret_cast<void*>(s.lo), b.nbytes);
    }
    abi.array_count = 0;
    uint64_t total = 0;
    for (ThreadgroupArray& a : L->arrays) {
        total = (total + a.align - 1) / a.align * a.align + a.nbytes;
        if (abi.array_count == 32) continue;
        lab_threadgroup_array& out = abi.arrays[abi.array_count++];
        std::snprintf(out.name, sizeof(out.name), "%s", a.name.c_str());
        out.nbytes = a.nbytes;
        out.read_bytes = a.read_bytes;
        out.written_bytes = a.written_bytes;
    }
    abi.threadgroup_total = (total + 15) / 16 * 16;
    abi.aborted = L->aborted;
    abi.interrupted = L->interrupted != 0;
}

void run_groups(lab_launch& abi) {
    if (abi.groups) {
        for (int64_t i = 0; i < abi.group_count && !L->aborted; i++) {
            L->groups.push_back({abi.groups[3 * i], abi.groups[3 * i + 1], abi.groups[3 * i + 2]});
            run_group(L->groups.back().data());
        }
        return;
    }
    const uint32_t* n = L->groups_per_grid;
    for (uint32_t z = 0; z < n[2]; z++)
        for (uint32_t y = 0; y < n[1]; y++)
            for (uint32_t x = 0; x < n[0]; x++) {
                if (L->aborted) return;
                L->groups.push_back({x, y, z});
                run_group(L->groups.back().data());
            }
}

}  // namespace
}  // namespace lab

using lab::L;

extern "C" {

// 0, or 1 if memory for the launch could not be had.
int lab_run(lab_launch* abi) {
    auto launch = std::make_unique<lab::Launch>();
    L = launch.get();
    L->abi = abi;
    lab::pending.waiting = false;
    L->deadline = lab::now() + abi->timeout_s;
    dl_iterate_phdr(lab::find_module, nullptr);
    if (!lab::set_up(*abi)) {
        L = nullptr;
        return 1;
    }
    {
        lab::Signals signals;
        lab::Watch watch;
        if (sigsetjmp(L->crash, 1) == 0) lab::run_groups(*abi);
        L->current = nullptr;
        if (lab::pending.waiting) lab::settle_race();
    }
    lab::finish(*abi);
    L = nullptr;
    return 0;
}

void* lab_bound_buffer(int index) {
    for (int i = 0; i < L->abi->buffer_count; i++)
        if (L->abi->buffers[i].index == index) return reinterpret_cast<void*>(L->arena.slots[i + 1].lo);
    return nullptr;
}

void* lab_bound_threadgroup(int index) {
    std::string name = "[[threadgroup(" + std::to_string(index) + ")]]";
    for (auto& a : L->arrays)
        if (a.name == name) return reinterpret_cast<void*>(a.lo);
    return nullptr;
}

void* lab_threadgroup_variable(const char* name, unsigned serial, unsigned long bytes, unsigned align,
                               const unsigned char* padding, unsigned element) {
    auto& arrays = L->arrays;
    for (auto& a : arrays)
        if (a.serial == serial && a.nbytes == bytes && a.name == name) return reinterpret_cast<void*>(a.lo);
    lab::Arena& arena = L->arena;
    uint64_t part = arena.part(), guard = part / 4 < lab::GUARD ? part / 4 : lab::GUARD;
    uint64_t parts = (bytes + 2 * guard + part - 1) / part, first = L->owners.size();
    uint64_t inner = (2 * guard + bytes + 4095) & ~uint64_t{4095};
    uintptr_t map_lo = arena.slots[0].lo + first * part + ((parts * part - inner) / 2 & ~uint64_t{4095});
    uint64_t track = arrays.empty() ? 0 : (arrays.back().track + arrays.back().nbytes + 7) & ~uint64_t{7};
    arrays.push_back({name, serial, map_lo + guard, map_lo, map_lo + inner, bytes, track, 0, 0, align, padding, element});
    // The report says how much was asked for.
    if (track + bytes > lab::THREADGROUP_ARENA || first + parts > lab::PARTS) lab::abort_launch();
    if (mprotect(reinterpret_cast<void*>(map_lo), inner, PROT_READ | PROT_WRITE) != 0) lab::abort_launch();
    L->owners.resize(first + parts, static_cast<int16_t>(arrays.size() - 1));
    lab::forget(arrays.back());
    return reinterpret_cast<void*>(map_lo + guard);
}
}
