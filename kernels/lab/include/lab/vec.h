// Vectors of 2, 3 and 4 elements, packed vectors, swizzles.
//
// A vector is copied as one object, so that the hooks see one access of its whole width, as on the device.
#pragma once

#include "types.h"

namespace metal {

template <class T, int N>
struct vec;

template <class T, int N>
struct packed_vec;

template <class X>
struct lab_width {
    static constexpr int value = lab_types::Scalar<X> ? 1 : 0;
};
template <class T, int N>
struct lab_width<vec<T, N>> {
    static constexpr int value = N;
};
template <class T, int N>
struct lab_width<packed_vec<T, N>> {
    static constexpr int value = N;
};

// What functions of vectors return whose other arguments may be packed, or scalars that stand for all elements:
// the vector, void if there is none.
template <class A, class... B>
struct lab_mix : lab_mix<B...> {};
template <class A>
struct lab_mix<A> {
    typedef void type;
};
template <class T, int N, class... B>
struct lab_mix<vec<T, N>, B...> {
    typedef vec<T, N> type;
};
template <class T, int N>
struct lab_mix<vec<T, N>> {
    typedef vec<T, N> type;
};
template <class T, int N, class... B>
struct lab_mix<packed_vec<T, N>, B...> {
    typedef vec<T, N> type;
};
template <class T, int N>
struct lab_mix<packed_vec<T, N>> {
    typedef vec<T, N> type;
};
template <class... A>
using lab_mix_t = typename lab_mix<A...>::type;
template <class... A>
concept lab_mixed = !lab_types::same<lab_mix_t<A...>, void> &&
                    ((lab_types::Scalar<A> || lab_types::same<lab_mix_t<A>, lab_mix_t<A...>>) && ...) &&
                    !(lab_types::same<A, lab_mix_t<A...>> && ...);

// clang takes copies of structures apart; a copy as one vector of integers stays one access.
#if defined(__clang__)
template <int Bytes>
struct lab_raw;
template <>
struct lab_raw<1> {
    typedef unsigned char type;
};
template <>
struct lab_raw<2> {
    typedef unsigned short type;
};
template <>
struct lab_raw<4> {
    typedef unsigned int type;
};
template <>
struct lab_raw<8> {
    typedef unsigned long type;
};
#define LAB_VEC_WHOLE(N) typename lab_raw<sizeof(T)>::type lab_whole __attribute__((vector_size(N * sizeof(T))));
#define LAB_VEC_COPY                                                         \
    LAB_INLINE vec(const vec& o) : lab_whole(o.lab_whole) {}                 \
    LAB_INLINE vec& operator=(const vec& o) {                                \
        lab_whole = o.lab_whole;                                             \
        return *this;                                                        \
    }
#else
#define LAB_VEC_WHOLE(N)
#define LAB_VEC_COPY
#endif

// Assignable view of some elements of a vector: v.zx = float2(1, 2).
template <class T, int... I>
struct lab_swizzle_view {
    T* elements;
    static constexpr int count = sizeof...(I);
    LAB_INLINE operator vec<T, count>() const { return vec<T, count>(elements[I]...); }
    LAB_INLINE void operator=(const vec<T, count>& v) const {
        int at[] = {I...};
        for (int i = 0; i < count; i++) elements[at[i]] = v[i];
    }
#define LAB_VIEW_ASSIGN(op)                                                                        \
    template <class V>                                                                             \
    LAB_INLINE void operator op##=(const V& v) const {                                             \
        *this = static_cast<vec<T, count>>(*this) op v;                                            \
    }
    LAB_VIEW_ASSIGN(+)
    LAB_VIEW_ASSIGN(-)
    LAB_VIEW_ASSIGN(*)
    LAB_VIEW_ASSIGN(/)
#undef LAB_VIEW_ASSIGN
};

#define LAB_VEC_COMMON(NAME, N)                                                                           \
    typedef T element_type;                                                                               \
    NAME() = default;                                                                                     \
    template <class S>                                                                                    \
        requires lab_types::Scalar<S>                                                                     \
    LAB_INLINE constexpr NAME(S s) {                                                                      \
        for (int i = 0; i < N; i++) lab_e[i] = static_cast<T>(s);                                         \
    }                                                                                                     \
    template <class A, class B, class... C>                                                               \
    LAB_INLINE constexpr NAME(A a, B b, C... c) {                                    \
        static_assert(((lab_width<A>::value + lab_width<B>::value) + ... + lab_width<C>::value) == N,       \
                      "a vector of " #N " elements takes " #N " values");                                 \
        int at = 0;                                                                                       \
        put(at, a);                                                                                       \
        put(at, b);                                                                                       \
        (put(at, c), ...);                                                                                \
    }                                                                                                     \
    LAB_INLINE constexpr T& operator[](int i) { return lab_e[within(i)]; }                                \
    LAB_INLINE constexpr const T& operator[](int i) const { return lab_e[within(i)]; }                    \
    template <int... I>                                                                                   \
    LAB_INLINE constexpr vec<T, sizeof...(I)> lab_swizzle() const {                                       \
        return vec<T, sizeof...(I)>(lab_e[I]...);                                                         \
    }                                                                                                     \
    template <int... I>                                                                                   \
    LAB_INLINE constexpr lab_swizzle_view<T, I...> lab_swizzle_assign() {                                 \
        return {lab_e};                                                                                   \
    }                                                                                                     \
                                                                                                          \
private:                                                                                                  \
    /* The compiler's check lets what a reference to an element refers to lie one behind the last. */     \
    LAB_INLINE static constexpr int within(int i) {                                                       \
        if (static_cast<unsigned>(i) >= N) lab_index_beyond(i);                                           \
        return i;                                                                                         \
    }                                                                                                     \
    template <class S>                                                                                    \
    LAB_INLINE constexpr void put(int& at, S s) {                                                  \
        if constexpr (lab_types::Scalar<S>) {                                                             \
            lab_e[at++] = static_cast<T>(s);                                                              \
        } else {                                                                                          \
            for (int i = 0; i < lab_width<S>::value; i++) lab_e[at++] = static_cast<T>(s[i]);             \
        }                                                                                                 \
    }                                                                                                     \
                                                                                                          \
public:

// clang-format off
template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    union { T lab_e[2]; struct { T x, y; }; struct { T r, g; }; LAB_VEC_WHOLE(2) };
    LAB_VEC_COMMON(vec, 2)
    LAB_VEC_COPY
    template <class U> LAB_INLINE explicit constexpr vec(vec<U, 2> o) : lab_e{T(o[0]), T(o[1])} {}
    template <class U> LAB_INLINE constexpr vec(packed_vec<U, 2> o) : lab_e{T(o[0]), T(o[1])} {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
    union { T lab_e[4]; struct { T x, y, z; }; struct { T r, g, b; }; };
    LAB_VEC_COMMON(vec, 3)
    template <class U> LAB_INLINE explicit constexpr vec(vec<U, 3> o) : lab_e{T(o[0]), T(o[1]), T(o[2])} {}
    template <class U> LAB_INLINE constexpr vec(packed_vec<U, 3> o) : lab_e{T(o[0]), T(o[1]), T(o[2])} {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    union { T lab_e[4]; struct { T x, y, z, w; }; struct { T r, g, b, a; }; LAB_VEC_WHOLE(4) };
    LAB_VEC_COMMON(vec, 4)
    LAB_VEC_COPY
    template <class U> LAB_INLINE explicit constexpr vec(vec<U, 4> o)
        : lab_e{T(o[0]), T(o[1]), T(o[2]), T(o[3])} {}
    template <class U> LAB_INLINE constexpr vec(packed_vec<U, 4> o)
        : lab_e{T(o[0]), T(o[1]), T(o[2]), T(o[3])} {}
};
template <class T>
struct packed_vec<T, 2> {
    union { T lab_e[2]; struct { T x, y; }; };
    LAB_VEC_COMMON(packed_vec, 2)
    template <class U> LAB_INLINE constexpr packed_vec(vec<U, 2> o) : lab_e{T(o[0]), T(o[1])} {}
};
template <class T>
struct packed_vec<T, 3> {
    union { T lab_e[3]; struct { T x, y, z; }; };
    LAB_VEC_COMMON(packed_vec, 3)
    template <class U> LAB_INLINE constexpr packed_vec(vec<U, 3> o) : lab_e{T(o[0]), T(o[1]), T(o[2])} {}
};
template <class T>
struct packed_vec<T, 4> {
    union { T lab_e[4]; struct { T x, y, z, w; }; };
    LAB_VEC_COMMON(packed_vec, 4)
    template <class U> LAB_INLINE constexpr packed_vec(vec<U, 4> o)
        : lab_e{T(o[0]), T(o[1]), T(o[2]), T(o[3])} {}
};
// clang-format on
#undef LAB_VEC_COMMON
#undef LAB_VEC_WHOLE
#undef LAB_VEC_COPY

#define LAB_VEC_BINARY(op)                                                             \
    template <class T, int N>                                                          \
    LAB_INLINE constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
        vec<T, N> r;                                                                   \
        for (int i = 0; i < N; i++) r[i] = static_cast<T>(a[i] op b[i]);               \
        return r;                                                                      \
    }                                                                                  \
    template <class T, int N, lab_types::Scalar S>                                     \
    LAB_INLINE constexpr vec<T, N> operator op(vec<T, N> a, S b) {              \
        return a op vec<T, N>(b);                                                      \
    }                                                                                  \
    template <class T, int N, lab_types::Scalar S>                                     \
    LAB_INLINE constexpr vec<T, N> operator op(S a, vec<T, N> b) {              \
        return vec<T, N>(a) op b;                                                      \
    }                                                                                  \
    template <class T, int N, class S>                                                 \
    LAB_INLINE constexpr vec<T, N>& operator op##=(vec<T, N>& a, S b) {         \
        return a = a op b;                                                             \
    }                                                                                  \
    template <class T, int N, class S>                                                 \
    LAB_INLINE constexpr packed_vec<T, N>& operator op##=(packed_vec<T, N>& a, S b) { \
        return a = vec<T, N>(a) op b;                                                  \
    }                                                                                  \
    template <class T, int N>                                                          \
    LAB_INLINE constexpr vec<T, N> operator op(packed_vec<T, N> a, packed_vec<T, N> b) { \
        return vec<T, N>(a) op vec<T, N>(b);                                           \
    }                                                                                  \
    template <class T, int N>                                                          \
    LAB_INLINE constexpr vec<T, N> operator op(vec<T, N> a, packed_vec<T, N> b) { \
        return a op vec<T, N>(b);                                                      \
    }                                                                                  \
    template <class T, int N>                                                          \
    LAB_INLINE constexpr vec<T, N> operator op(packed_vec<T, N> a, vec<T, N> b) { \
        return vec<T, N>(a) op b;                                                      \
    }                                                                                  \
    template <class T, int N, lab_types::Scalar S>                                     \
    LAB_INLINE constexpr vec<T, N> operator op(packed_vec<T, N> a, S b) {       \
        return vec<T, N>(a) op b;                                                      \
    }                                                                                  \
    template <class T, int N, lab_types::Scalar S>                                     \
    LAB_INLINE constexpr vec<T, N> operator op(S a, packed_vec<T, N> b) {       \
        return a op vec<T, N>(b);                                                      \
    }
LAB_VEC_BINARY(+)
LAB_VEC_BINARY(-)
LAB_VEC_BINARY(*)
LAB_VEC_BINARY(/)
LAB_VEC_BINARY(%)
LAB_VEC_BINARY(&)
LAB_VEC_BINARY(|)
LAB_VEC_BINARY(^)
LAB_VEC_BINARY(<<)
LAB_VEC_BINARY(>>)
#undef LAB_VEC_BINARY

#define LAB_VEC_COMPARE(op)                                                               \
    template <class T, int N>                                                             \
    LAB_INLINE constexpr vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) { \
        vec<bool, N> r;                                                                   \
        for (int i = 0; i < N; i++) r[i] = a[i] op b[i];                                  \
        return r;                                                                         \
    }                                                                                     \
    template <class T, int N, lab_types::Scalar S>                                        \
    LAB_INLINE constexpr vec<bool, N> operator op(vec<T, N> a, S b) {              \
        return a op vec<T, N>(b);                                                         \
    }                                                                                     \
    template <class T, int N, lab_types::Scalar S>                                        \
    LAB_INLINE constexpr vec<bool, N> operator op(S a, vec<T, N> b) {              \
        return vec<T, N>(a) op b;                                                         \
    }
LAB_VEC_COMPARE(==)
LAB_VEC_COMPARE(!=)
LAB_VEC_COMPARE(<)
LAB_VEC_COMPARE(<=)
LAB_VEC_COMPARE(>)
LAB_VEC_COMPARE(>=)
LAB_VEC_COMPARE(&&)
LAB_VEC_COMPARE(||)
#undef LAB_VEC_COMPARE

#define LAB_VEC_UNARY(op, R)                                           \
    template <class T, int N>                                          \
    LAB_INLINE constexpr vec<R, N> operator op(vec<T, N> a) {   \
        vec<R, N> r;                                                   \
        for (int i = 0; i < N; i++) r[i] = static_cast<R>(op a[i]);    \
        return r;                                                      \
    }
LAB_VEC_UNARY(-, T)
LAB_VEC_UNARY(+, T)
LAB_VEC_UNARY(~, T)
LAB_VEC_UNARY(!, bool)
#undef LAB_VEC_UNARY

template <int N>
LAB_INLINE constexpr bool all(vec<bool, N> v) {
    bool r = true;
    for (int i = 0; i < N; i++) r = r && v[i];
    return r;
}
template <int N>
LAB_INLINE constexpr bool any(vec<bool, N> v) {
    bool r = false;
    for (int i = 0; i < N; i++) r = r || v[i];
    return r;
}
LAB_INLINE constexpr bool all(bool v) { return v; }
LAB_INLINE constexpr bool any(bool v) { return v; }

}  // namespace metal

#define LAB_VEC_NAMES(T, name)                                                                         \
    typedef metal::vec<T, 2> name##2;                                                                  \
    typedef metal::vec<T, 3> name##3;                                                                  \
    typedef metal::vec<T, 4> name##4;                                                                  \
    typedef metal::packed_vec<T, 2> packed_##name##2;                                                  \
    typedef metal::packed_vec<T, 3> packed_##name##3;                                                  \
    typedef metal::packed_vec<T, 4> packed_##name##4;                                                  \
    namespace metal {                                                                                  \
    using ::name##2;                                                                                   \
    using ::name##3;                                                                                   \
    using ::name##4;                                                                                   \
    using ::packed_##name##2;                                                                          \
    using ::packed_##name##3;                                                                          \
    using ::packed_##name##4;                                                                          \
    }
LAB_VEC_NAMES(bool, bool)
LAB_VEC_NAMES(char, char)
LAB_VEC_NAMES(uchar, uchar)
LAB_VEC_NAMES(short, short)
LAB_VEC_NAMES(ushort, ushort)
LAB_VEC_NAMES(int, int)
LAB_VEC_NAMES(uint, uint)
LAB_VEC_NAMES(long, long)
LAB_VEC_NAMES(ulong, ulong)
LAB_VEC_NAMES(half, half)
LAB_VEC_NAMES(bfloat, bfloat)
LAB_VEC_NAMES(float, float)
#undef LAB_VEC_NAMES
