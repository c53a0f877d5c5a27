// `a << b` with a look at what a signed result loses. C++20 defines it, so the compilers' own check is silent; Metal is
// C++17, where it is undefined unless the type, or its unsigned sibling, holds the result.
//
// The rewriter makes `a <<lab_shl<< b` of `a << b` and `a <<=lab_shl= b` of `a <<= b`, which binds as before.
#pragma once

#include "vec.h"

template <class B>
struct lab_shift_by {
    B value;
};

struct lab_shift {
    template <class B>
    LAB_INLINE constexpr lab_shift_by<B> operator=(B b) const {
        return {b};
    }
};
inline constexpr lab_shift lab_shl{};

template <class A>
struct lab_shifted {
    A value;
};
template <class A>
LAB_INLINE constexpr lab_shifted<A> operator<<(A a, lab_shift) {
    return {a};
}

template <class R>
struct lab_sibling {
    static constexpr bool is_signed = false;
};
template <>
struct lab_sibling<int> {
    static constexpr bool is_signed = true;
    typedef uint type;
};
template <>
struct lab_sibling<long> {
    static constexpr bool is_signed = true;
    typedef ulong type;
};

template <class A, class B>
LAB_INLINE constexpr auto operator<<(lab_shifted<A> a, B b) {
    using R = decltype(a.value << b);
    if constexpr (lab_sibling<R>::is_signed) {
        using U = typename lab_sibling<R>::type;
        const R from = a.value;
        const int by = static_cast<int>(b) & static_cast<int>(8 * sizeof(R) - 1);
        const U to = static_cast<U>(from) << by;
        if (from < 0 ? static_cast<R>(to) >> by != from : to >> by != static_cast<U>(from)) lab_shift_overflow();
        return static_cast<R>(to);
    } else {
        return a.value << b;
    }
}
template <class A, class B>
LAB_INLINE constexpr A& operator<<=(A& a, lab_shift_by<B> by) {
    return a = static_cast<A>(a << lab_shl << by.value);
}
