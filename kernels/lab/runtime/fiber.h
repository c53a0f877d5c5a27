// A lane's own stack and the switch between stacks.
//
// Twenty lines of assembly on x86-64 and aarch64 (what a callee must keep is pushed, the stack pointer is
// exchanged), ucontext elsewhere or where LAB_UCONTEXT asks for it. No floating point environment is kept: kernels
// cannot change it.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(LAB_UCONTEXT)
#define LAB_UCONTEXT
#endif
#ifdef LAB_UCONTEXT
#include <ucontext.h>
#endif

namespace lab {

#ifndef LAB_UCONTEXT

struct Context {
    void* sp = nullptr;
};

extern "C" void lab_switch(void** from_sp, void* to_sp);

#if defined(__x86_64__)
asm(R"(
.text
.globl lab_switch
.hidden lab_switch
.type lab_switch, @function
lab_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size lab_switch, .-lab_switch
)");

inline void prepare(Context& c, char* stack, size_t bytes, void (*entry)()) {
    auto top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    auto* sp = reinterpret_cast<void**>(top);
    *--sp = nullptr;  // where entry would return to; it never does
    *--sp = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    c.sp = sp;
}
#else
asm(R"(
.text
.globl lab_switch
.hidden lab_switch
.type lab_switch, %function
lab_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size lab_switch, .-lab_switch
)");

inline void prepare(Context& c, char* stack, size_t bytes, void (*entry)()) {
    auto top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    auto* sp = reinterpret_cast<uint64_t*>(top - 160);
    for (int i = 0; i < 20; i++) sp[i] = 0;
    sp[11] = reinterpret_cast<uint64_t>(entry);  // x30
    c.sp = sp;
}
#endif

inline void switch_to(Context& from, Context& to) { lab_switch(&from.sp, to.sp); }

#else

struct Context {
    ucontext_t u;
};

inline void prepare(Context& c, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&c.u);
    c.u.uc_stack.ss_sp = stack;
    c.u.uc_stack.ss_size = bytes;
    c.u.uc_link = nullptr;
    makecontext(&c.u, entry, 0);
}

inline void switch_to(Context& from, Context& to) { swapcontext(&from.u, &to.u); }

#endif

}  // namespace lab
