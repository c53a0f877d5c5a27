// What compiled kernels call: the instrumentation of -fsanitize=thread (every load and store, function entry and
// exit) and of a few checks of -fsanitize=undefined. No runtime of a sanitizer is linked.
#include "access.h"

using lab::Access;

#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))

namespace {

struct SourcePlace {
    const char* file;
    uint32_t line, column;
};

void report_at(lab_fault_kind kind, const SourcePlace* place, uintptr_t pc, uint64_t value) {
    if (!lab::L || !lab::L->current) return;
    if (lab_fault* f = lab::report(kind, pc, 0, 2, -1, 0)) {
        f->file = place->file;
        f->line = place->line;
        f->column = place->column;
        f->value = value;
    }
}

struct TypeMismatch {
    SourcePlace place;
    const void* type;
    unsigned char log_alignment, check;
};

}  // namespace

extern "C" {

void __tsan_init() {}

void __tsan_func_entry(void* caller) {
    if (!lab::L || !lab::L->current) return;
    lab::Lane& l = *lab::L->current;
    if (l.depth < lab::MAX_CALLS) l.calls[l.depth] = reinterpret_cast<uintptr_t>(caller);
    l.depth++;
    if ((++lab::L->ticks & 0xffff) == 0) lab::check_time();
}
void __tsan_func_exit() {
    if (lab::L && lab::L->current && lab::L->current->depth) lab::L->current->depth--;
}

#define HOOKS(n)                                                                                       \
    void __tsan_read##n(void* p) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::read, PC); } \
    void __tsan_write##n(void* p) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::write, PC); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#define MORE_HOOKS(n)                                                                                              \
    void __tsan_unaligned_read##n(void* p) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::read, PC); }   \
    void __tsan_unaligned_write##n(void* p) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::write, PC); } \
    void __tsan_volatile_read##n(void* p) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::read, PC); }    \
    void __tsan_volatile_write##n(void* p) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::write, PC); }
MORE_HOOKS(1)
MORE_HOOKS(2)
MORE_HOOKS(4)
MORE_HOOKS(8)
MORE_HOOKS(16)

void __tsan_read_range(void* p, unsigned long n) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::read, PC); }
void __tsan_write_range(void* p, unsigned long n) { lab::access(reinterpret_cast<uintptr_t>(p), n, Access::write, PC); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
    lab::access(reinterpret_cast<uintptr_t>(from), n, Access::read, PC);
    lab::access(reinterpret_cast<uintptr_t>(to), n, Access::write, PC);
    return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
    lab::access(reinterpret_cast<uintptr_t>(from), n, Access::read, PC);
    lab::access(reinterpret_cast<uintptr_t>(to), n, Access::write, PC);
    return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
    lab::access(reinterpret_cast<uintptr_t>(to), n, Access::write, PC);
    return std::memset(to, value, n);
}

void __ubsan_handle_add_overflow(SourcePlace* d, void*, void*) { report_at(FAULT_SIGNED_OVERFLOW, d, PC, '+'); }
void __ubsan_handle_sub_overflow(SourcePlace* d, void*, void*) { report_at(FAULT_SIGNED_OVERFLOW, d, PC, '-'); }
void __ubsan_handle_mul_overflow(SourcePlace* d, void*, void*) { report_at(FAULT_SIGNED_OVERFLOW, d, PC, '*'); }
void __ubsan_handle_negate_overflow(SourcePlace* d, void*) { report_at(FAULT_SIGNED_OVERFLOW, d, PC, '-'); }
void __ubsan_handle_divrem_overflow(SourcePlace* d, void*, void*) {
    report_at(FAULT_DIVISION, d, PC, 0);
    if (lab::L && lab::L->current) lab::abort_launch();  // the division itself would stop the process
}
void __ubsan_handle_out_of_bounds(SourcePlace* d, void* index) {
    report_at(FAULT_ARRAY_BOUNDS, d, PC, reinterpret_cast<uint64_t>(index));
}
void __ubsan_handle_type_mismatch_v1(TypeMismatch* d, void* address) {
    if (!lab::L || !lab::L->current) return;
    auto a = reinterpret_cast<uintptr_t>(address);
    uint64_t wanted = uint64_t{1} << d->log_alignment;
    lab::Slot* slot = lab::L->arena.find(a);
    int space = 2, buffer = -1;
    auto offset = static_cast<int64_t>(a);
    if (slot && slot != lab::L->arena.slots) {
        space = 0;
        buffer = static_cast<int>(slot - lab::L->arena.slots) - 1;
        offset = static_cast<int64_t>(a - slot->lo);
    } else if (slot) {
        int i = lab::L->array_at(a);
        if (i >= 0 && a - lab::L->arrays[static_cast<size_t>(i)].lo < lab::L->arrays[static_cast<size_t>(i)].nbytes) {
            space = 1;
            buffer = i;
            offset = static_cast<int64_t>(a - lab::L->arrays[static_cast<size_t>(i)].lo);
        }
    }
    if (lab_fault* f = lab::report(FAULT_MISALIGNED, PC, 0, space, buffer, offset)) {
        f->file = d->place.file;
        f->line = d->place.line;
        f->column = d->place.column;
        f->value = wanted;
    }
    if (wanted >= 16) lab::abort_launch();  // the processor's own aligned loads would stop the process
}

// The compilers' checks do not see these; the text is where the calls are inlined.
void lab_shift_overflow() {
    if (!lab::L || !lab::L->current) return;
    if (lab_fault* f = lab::report(FAULT_SIGNED_OVERFLOW, PC, 0, 2, -1, 0)) f->value = '<';
}
void lab_index_beyond(long index) {
    if (!lab::L || !lab::L->current) return;
    if (lab_fault* f = lab::report(FAULT_ARRAY_BOUNDS, PC, 0, 2, -1, 0)) f->value = static_cast<uint64_t>(index);
}

void lab_atomic_access(const volatile void* address, unsigned bytes, int kind) {
    lab::access(reinterpret_cast<uintptr_t>(address), bytes, static_cast<Access>(kind), PC);
}
void lab_raw_copy(volatile void* to, const volatile void* from, unsigned bytes) {
    std::memcpy(const_cast<void*>(to), const_cast<const void*>(from), bytes);
}
}
