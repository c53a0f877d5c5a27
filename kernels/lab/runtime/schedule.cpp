// Runs one threadgroup: every lane on its own stack until it waits, SIMD group after SIMD group.
#include <array>

#include "access.h"

namespace lab {

lab_board boards[MAX_LANES / SIMD][2];

namespace {

void wait(State state) {
    if (pending.waiting) settle_race();
    Lane* me = L->current;
    me->state = state;
    L->current = nullptr;
    switch_to(me->context, L->scheduler);
}

void lane_main() {
    lab_get_module()->kernels[L->abi->kernel].run();
    wait(State::done);
    __builtin_unreachable();
}

void resume(Lane& lane) {
    L->transactions.start_lane();
    L->current = &lane;
    switch_to(L->scheduler, lane.context);
    if (!L->aborted) L->current = nullptr;
}

// How a lane that waits and another one are not together; faults.py knows the numbers.
enum Apart { SUSPECT = 1, ELSEWHERE = 2, ENDED = 3, OTHER_ROUND = 4 };

// A fault of lane `a` that waits, against lane `b`, which is nullptr if it has ended.
void diverged(lab_fault_kind kind, Lane& a, Lane* b, Apart how) {
    L->current = &a;
    // In the place of a buffer, so that one way does not pass for another.
    lab_fault* f = report(kind, a.pc, b ? relative(b->pc) : 0, 2, -how, 0);
    L->current = nullptr;
    if (!f) return;
    // A suspect waits in the same operation at another address: Python asks whether it is the same line.
    f->value = how;
    if (!b) return;
    std::memcpy(f->other, b->where.thread_position_in_grid, sizeof(f->other));
    for (unsigned i = 0; i < 8 && i < b->depth; i++)
        f->other_stack[i] = relative(b->calls[(b->depth < MAX_CALLS ? b->depth : MAX_CALLS) - 1 - i]);
}

bool together(SimdGroup& s, const Lane& first) {
    for (unsigned i = 0; i < s.count; i++) {
        const Lane& l = L->lanes[s.first + i];
        if (l.state != first.state || l.op != first.op || l.pc != first.pc || !l.same_round(first)) return false;
    }
    return true;
}

void release_simd(SimdGroup& s, Lane& first) {
    unsigned begin = 0, end = s.count;
    if ((first.op & LAB_QUAD) && !together(s, first)) {
        begin = static_cast<unsigned>(&first - &L->lanes[s.first]) & ~3u;
        end = begin + 4 < s.count ? begin + 4 : s.count;
    }
    bool barrier = first.state == State::simd_barrier, active = first.op == LAB_SIMD_ACTIVE;
    auto kind = FAULT_SIMD_DIVERGENCE;
    Lane* lanes = &L->lanes[s.first];
    unsigned index = s.first / SIMD;
    lab_board& board = boards[index][s.turn ^= 1];
    board.active = 0;
    board.present = s.count == 32 ? ~0u : (1u << s.count) - 1;
    board.done = 0;
    Lane *elsewhere = nullptr, *suspect = nullptr, *other_round = nullptr;
    bool ended = false;
    int flags = first.flags;
    for (unsigned i = begin; i < end; i++) {
        Lane& l = lanes[i];
        if (l.state == State::done) {
            ended = true;
        } else if (l.state != first.state || l.op != first.op ||
                   (active && (l.flags != first.flags || !l.same_round(first)))) {
            elsewhere = &l;
        } else {
            if (l.pc != first.pc || l.chain() != first.chain()) suspect = &l;
            if (!l.same_round(first)) other_round = &l;
            board.active |= 1u << i;
            flags &= l.flags;
            std::memcpy(board.data[i], l.shown, l.bytes);
        }
    }
    if (active) {
        suspect = nullptr;
    } else if (elsewhere) {
        diverged(kind, first, elsewhere, ELSEWHERE);
    } else if (ended) {
        diverged(kind, first, nullptr, ENDED);
    }
    if (suspect) diverged(kind, first, suspect, SUSPECT);
    if (other_round) diverged(kind, first, other_round, OTHER_ROUND);
    for (unsigned i = 0; i < s.count; i++) {
        if (!(board.active >> i & 1)) continue;
        lanes[i].state = State::ready;
        lanes[i].board = &board;
    }
    if (barrier && (flags & LAB_MEM_DEVICE)) s.epoch[0]++;
    if (barrier && (flags & LAB_MEM_THREADGROUP)) s.epoch[1]++;
}

// A lane of those that go on next, nullptr if none waits for others of its SIMD group. Quads that are whole need not wait
// for the others, nor do the lanes that are active in a branch, but the others may wait for them.
Lane* next_to_go(SimdGroup& s) {
    Lane *any = nullptr, *quad = nullptr, *active = nullptr;
    Lane* lanes = &L->lanes[s.first];
    for (unsigned i = 0; i < s.count; i++) {
        Lane& l = lanes[i];
        if (l.state != State::simd && l.state != State::simd_barrier) continue;
        if (!any) any = &l;
        if (l.state == State::simd && l.op == LAB_SIMD_ACTIVE && !active) active = &l;
        if (l.state != State::simd || !(l.op & LAB_QUAD)) continue;
        if (!quad) quad = &l;
        bool whole = true;
        for (unsigned k = i & ~3u; k < (i | 3) + 1 && k < s.count; k++)
            whole = whole && lanes[k].state == State::simd && lanes[k].op == l.op;
        if (whole) return &l;
    }
    return active ? active : quad ? quad : any;
}

// Until every lane of the SIMD group has ended or waits for the threadgroup.
void run_simd(SimdGroup& s) {
    for (;;) {
        L->transactions.start_segment();
        for (unsigned i = 0; i < s.count && !L->aborted; i++)
            if (L->lanes[s.first + i].state == State::ready) resume(L->lanes[s.first + i]);
        if (L->aborted) return;
        Lane* waiting = next_to_go(s);
        if (!waiting) return;
        release_simd(s, *waiting);
        check_time();
    }
}

// True while lanes were waiting at a barrier, which are ready now.
bool release_group() {
    Lane *first = nullptr, *ended = nullptr, *suspect = nullptr, *other_round = nullptr;
    int flags = ~0;
    for (Lane& l : L->lanes) {
        if (l.state == State::done) {
            ended = &l;
        } else {
            if (!first) first = &l;
            if (l.pc != first->pc || l.chain() != first->chain()) suspect = &l;
            if (!l.same_round(*first)) other_round = &l;
            flags &= l.flags;
            l.state = State::ready;
        }
    }
    if (!first) return false;
    if (ended) diverged(FAULT_BARRIER_DIVERGENCE, *first, nullptr, ENDED);
    if (suspect) diverged(FAULT_BARRIER_DIVERGENCE, *first, suspect, SUSPECT);
    if (other_round) diverged(FAULT_BARRIER_DIVERGENCE, *first, other_round, OTHER_ROUND);
    if (flags & LAB_MEM_DEVICE) L->group_epoch[0]++;
    if (flags & LAB_MEM_THREADGROUP) L->group_epoch[1]++;
    check_time();
    return true;
}

void place(Lane& lane, unsigned index, const uint32_t group[3]) {
    lab_position& w = lane.where;
    uint32_t local[3] = {index % L->dims[0], index / L->dims[0] % L->dims[1], index / L->dims[0] / L->dims[1]};
    unsigned threads = L->dims[0] * L->dims[1] * L->dims[2];
    for (int i = 0; i < 3; i++) {
        w.thread_position_in_threadgroup[i] = local[i];
        w.threadgroup_position_in_grid[i] = group[i];
        w.thread_position_in_grid[i] = group[i] * L->dispatch[i] + local[i];
        w.threads_per_threadgroup[i] = L->dims[i];
        w.dispatch_threads_per_threadgroup[i] = L->dispatch[i];
        w.threads_per_grid[i] = L->abi->grid[i];
        w.threadgroups_per_grid[i] = L->groups_per_grid[i];
    }
    w.thread_index_in_threadgroup = index;
    w.thread_index_in_simdgroup = index % SIMD;
    w.simdgroup_index_in_threadgroup = index / SIMD;
    w.simdgroups_per_threadgroup = (threads + SIMD - 1) / SIMD;
    w.dispatch_simdgroups_per_threadgroup =
        (L->dispatch[0] * L->dispatch[1] * L->dispatch[2] + SIMD - 1) / SIMD;
}

}  // namespace

// One threadgroup from beginning to end, or until the launch is aborted.
void run_group(const uint32_t group[3]) {
    unsigned threads = 1;
    for (int i = 0; i < 3; i++) {
        uint32_t left = L->abi->grid[i] - group[i] * L->dispatch[i];
        L->dims[i] = left < L->dispatch[i] ? left : L->dispatch[i];
        threads *= L->dims[i];
    }
    L->group++;
    L->group_epoch[0] = L->group_epoch[1] = 0;
    L->lanes.resize(threads);
    L->simds.assign((threads + SIMD - 1) / SIMD, {});
    for (unsigned i = 0; i < threads; i++) {
        Lane& l = L->lanes[i];
        l.stack = L->stacks + i * STACK_BYTES;
        l.depth = 0;
        l.loops = 0;
        l.flags = 0;
        l.state = State::ready;
        place(l, i, group);
        // The lowest page is the guard of the stack.
        prepare(l.context, l.stack + 4096, STACK_BYTES - 4096, lane_main);
        SimdGroup& s = L->simds[i / SIMD];
        if (i % SIMD == 0) s.first = i;
        s.count++;
    }
    L->abi->threads += threads;
    for (const ThreadgroupArray& a : L->arrays) forget(a);
    do {
        for (SimdGroup& s : L->simds) {
            run_simd(s);
            if (L->aborted) return;
        }
    } while (release_group());
}

}  // namespace lab

using lab::L;

extern "C" {

const lab_position* lab_where() {
    static lab_position here;  // in the shared object, where the hooks expect it
    here = L->current->where;
    return &here;
}

lab_board* lab_simd(const void* value, unsigned bytes, int op) {
    lab::Lane& me = *L->current;
    std::memcpy(me.shown, value, bytes);
    me.bytes = bytes;
    me.op = op;
    me.flags = 0;
    me.pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    lab::wait(lab::State::simd);
    return me.board;
}

lab_board* lab_simd_of_active(const void* value, unsigned bytes, int line) {
    lab::Lane& me = *L->current;
    std::memcpy(me.shown, value, bytes);
    me.bytes = bytes;
    me.op = LAB_SIMD_ACTIVE;
    me.flags = line;
    me.pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    lab::wait(lab::State::simd);
    return me.board;
}

void lab_simdgroup_barrier(int flags, int) {
    lab::Lane& me = *L->current;
    me.bytes = 0;
    me.op = LAB_SIMD_BARRIER;
    me.flags = flags;
    me.pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    lab::wait(lab::State::simd_barrier);
}

void lab_threadgroup_barrier(int flags, int) {
    lab::Lane& me = *L->current;
    me.flags = flags;
    me.pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    lab::wait(lab::State::group_barrier);
}

void lab_loop_enter() {
    lab::Lane& me = *L->current;
    if (me.loops < lab::MAX_LOOPS) me.rounds[me.loops] = 0;
    me.loops++;
}
void lab_loop_round() {
    lab::Lane& me = *L->current;
    if (me.loops <= lab::MAX_LOOPS) me.rounds[me.loops - 1]++;
}
void lab_loop_leave() { L->current->loops--; }

void lab_read_inactive(unsigned lane) {
    auto pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    if (lab_fault* f = lab::report(FAULT_INACTIVE_LANE, pc, 0, 2, -1, 0)) f->value = lane;
}
}
