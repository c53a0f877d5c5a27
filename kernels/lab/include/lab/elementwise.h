// Functions of <metal_integer>, <metal_math>, <metal_common> and <metal_relational> for vectors, element by element.
//
// Arguments may be packed, and scalars stand for vectors of one value, as they become vectors by themselves in Metal.
#pragma once

#include "integer.h"
#include "math.h"

namespace metal {

#define LAB_VECTOR_1(name)                                        \
    template <class T, int N>                                     \
    LAB_INLINE auto name(vec<T, N> a) {                           \
        vec<decltype(name(a[0])), N> r;                           \
        for (int i = 0; i < N; i++) r[i] = name(a[i]);            \
        return r;                                                 \
    }
#define LAB_VECTOR_2(name)                                        \
    template <class T, int N>                                     \
    LAB_INLINE auto name(vec<T, N> a, vec<T, N> b) {              \
        vec<decltype(name(a[0], b[0])), N> r;                     \
        for (int i = 0; i < N; i++) r[i] = name(a[i], b[i]);      \
        return r;                                                 \
    }                                                             \
    template <class A, class B>                                   \
        requires lab_mixed<A, B>                                  \
    LAB_INLINE auto name(A a, B b) {                              \
        using V = lab_mix_t<A, B>;                                \
        return name(V(a), V(b));                                  \
    }
#define LAB_VECTOR_3(name)                                        \
    template <class T, int N>                                     \
    LAB_INLINE auto name(vec<T, N> a, vec<T, N> b, vec<T, N> c) { \
        vec<decltype(name(a[0], b[0], c[0])), N> r;               \
        for (int i = 0; i < N; i++) r[i] = name(a[i], b[i], c[i]); \
        return r;                                                 \
    }                                                             \
    template <class A, class B, class C>                          \
        requires lab_mixed<A, B, C>                               \
    LAB_INLINE auto name(A a, B b, C c) {                         \
        using V = lab_mix_t<A, B, C>;                             \
        return name(V(a), V(b), V(c));                            \
    }

LAB_VECTOR_1(abs)
LAB_VECTOR_1(popcount)
LAB_VECTOR_1(clz)
LAB_VECTOR_1(ctz)
LAB_VECTOR_1(reverse_bits)
LAB_VECTOR_1(ilogb)

LAB_VECTOR_2(min)
LAB_VECTOR_2(max)
LAB_VECTOR_2(step)
LAB_VECTOR_2(rotate)
LAB_VECTOR_2(mulhi)
LAB_VECTOR_2(mul24)
LAB_VECTOR_2(addsat)
LAB_VECTOR_2(subsat)
LAB_VECTOR_2(absdiff)
LAB_VECTOR_2(hadd)
LAB_VECTOR_2(rhadd)
LAB_VECTOR_2(isordered)
LAB_VECTOR_2(isunordered)

LAB_VECTOR_3(clamp)
LAB_VECTOR_3(min3)
LAB_VECTOR_3(max3)
LAB_VECTOR_3(median3)
LAB_VECTOR_3(fmin3)
LAB_VECTOR_3(fmax3)
LAB_VECTOR_3(fmedian3)
LAB_VECTOR_3(fma)
LAB_VECTOR_3(mad)
LAB_VECTOR_3(mad24)
LAB_VECTOR_3(madhi)
LAB_VECTOR_3(madsat)
LAB_VECTOR_3(mix)
LAB_VECTOR_3(smoothstep)
#undef LAB_VECTOR_1
#undef LAB_VECTOR_2
#undef LAB_VECTOR_3

template <lab_types::Integer T, int N>
LAB_INLINE vec<T, N> extract_bits(vec<T, N> x, uint offset, uint bits) {
    LAB_EACH(T, N, extract_bits(x[i], offset, bits))
}
template <lab_types::Integer T, int N>
LAB_INLINE vec<T, N> insert_bits(vec<T, N> base, vec<T, N> insert, uint offset, uint bits) {
    LAB_EACH(T, N, insert_bits(base[i], insert[i], offset, bits))
}
template <lab_types::Floating T, int N>
LAB_INLINE vec<T, N> ldexp(vec<T, N> x, vec<int, N> k) {
    LAB_EACH(T, N, ldexp(x[i], k[i]))
}
template <lab_types::Floating T, int N>
LAB_INLINE vec<T, N> ldexp(vec<T, N> x, int k) {
    LAB_EACH(T, N, ldexp(x[i], k))
}
template <lab_types::Floating T, int N>
LAB_INLINE vec<T, N> frexp(vec<T, N> x, vec<int, N>& e) {
    LAB_EACH(T, N, frexp(x[i], e[i]))
}
template <lab_types::Floating T, int N>
LAB_INLINE vec<T, N> modf(vec<T, N> x, vec<T, N>& whole) {
    LAB_EACH(T, N, modf(x[i], whole[i]))
}
template <lab_types::Floating T, int N>
LAB_INLINE vec<T, N> sincos(vec<T, N> x, vec<T, N>& c) {
    LAB_EACH(T, N, sincos(x[i], c[i]))
}
template <class T, int N>
LAB_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    LAB_EACH(T, N, c[i] ? b[i] : a[i])
}
template <class A, class B, int N>
    requires lab_mixed<A, B>
LAB_INLINE auto select(A a, B b, vec<bool, N> c) {
    using V = lab_mix_t<A, B>;
    return select(V(a), V(b), c);
}
template <class T, int N>
LAB_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) {
    return c ? b : a;
}

}  // namespace metal
