// Atomic types and functions. They take relaxed order only: atomics never order other accesses.
#pragma once

#include "types.h"

namespace metal {

enum memory_order { memory_order_relaxed, memory_order_seq_cst };

template <class T>
struct atomic {
    T lab_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

namespace lab_atomic_detail {
template <class T>
LAB_INLINE T load(const volatile atomic<T>* p) {
    T v;
    lab_raw_copy(&v, p, sizeof(T));
    return v;
}
template <class T>
LAB_INLINE void store(volatile atomic<T>* p, T v) {
    lab_raw_copy(p, &v, sizeof(T));
}
}  // namespace lab_atomic_detail

template <class T>
LAB_INLINE T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
    lab_atomic_access(p, sizeof(T), LAB_ATOMIC_READ);
    return lab_atomic_detail::load(p);
}
template <class T, class U>
LAB_INLINE void atomic_store_explicit(volatile atomic<T>* p, U v, memory_order) {
    lab_atomic_access(p, sizeof(T), LAB_ATOMIC_WRITE);
    lab_atomic_detail::store(p, static_cast<T>(v));
}
template <class T, class U>
LAB_INLINE T atomic_exchange_explicit(volatile atomic<T>* p, U v, memory_order) {
    lab_atomic_access(p, sizeof(T), LAB_ATOMIC_MODIFY);
    T old = lab_atomic_detail::load(p);
    lab_atomic_detail::store(p, static_cast<T>(v));
    return old;
}
template <class T, class U>
LAB_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected, U desired, memory_order,
                                                      memory_order) {
    lab_atomic_access(p, sizeof(T), LAB_ATOMIC_MODIFY);
    T old = lab_atomic_detail::load(p);
    bool same = __builtin_memcmp(&old, expected, sizeof(T)) == 0;
    if (same) lab_atomic_detail::store(p, static_cast<T>(desired));
    *expected = old;
    return same;
}

#define LAB_ATOMIC_FETCH(name, expression)                                                \
    template <class T, class U>                                                           \
    LAB_INLINE T atomic_fetch_##name##_explicit(volatile atomic<T>* p, U u, memory_order) { \
        lab_atomic_access(p, sizeof(T), LAB_ATOMIC_MODIFY);                               \
        T old = lab_atomic_detail::load(p), v = static_cast<T>(u);                        \
        lab_atomic_detail::store(p, static_cast<T>(expression));                          \
        return old;                                                                       \
    }
// Integers wrap, also signed ones.
template <class T>
LAB_INLINE T lab_wrapping_add(T a, T b) {
    if constexpr (lab_types::Integer<T>) {
        return static_cast<T>(static_cast<ulong>(a) + static_cast<ulong>(b));
    } else {
        return static_cast<T>(a + b);
    }
}
template <class T>
LAB_INLINE T lab_wrapping_sub(T a, T b) {
    if constexpr (lab_types::Integer<T>) {
        return static_cast<T>(static_cast<ulong>(a) - static_cast<ulong>(b));
    } else {
        return static_cast<T>(a - b);
    }
}
LAB_ATOMIC_FETCH(add, lab_wrapping_add(old, v))
LAB_ATOMIC_FETCH(sub, lab_wrapping_sub(old, v))
LAB_ATOMIC_FETCH(min, v < old ? v : old)
LAB_ATOMIC_FETCH(max, old < v ? v : old)
LAB_ATOMIC_FETCH(and, old & v)
LAB_ATOMIC_FETCH(or, old | v)
LAB_ATOMIC_FETCH(xor, old ^ v)
#undef LAB_ATOMIC_FETCH

enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

}  // namespace metal
