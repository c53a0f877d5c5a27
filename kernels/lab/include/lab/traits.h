// <metal_type_traits>, <metal_limits>, and the little of the standard library that kernels use.
#pragma once

#include "vec.h"

namespace metal {

template <class T, T V>
struct integral_constant {
    static constexpr T value = V;
    typedef T value_type;
    typedef integral_constant type;
    constexpr operator T() const { return V; }
    constexpr T operator()() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class A, class B>
struct is_same : bool_constant<lab_types::same<A, B>> {};
template <class A, class B>
inline constexpr bool is_same_v = lab_types::same<A, B>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
    typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
    typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
    typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct remove_cv {
    typedef lab_types::bare_t<T> type;
};
template <class T>
using remove_cv_t = lab_types::bare_t<T>;
template <class T>
struct remove_const {
    typedef T type;
};
template <class T>
struct remove_const<const T> {
    typedef T type;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
struct remove_reference {
    typedef T type;
};
template <class T>
struct remove_reference<T&> {
    typedef T type;
};
template <class T>
struct remove_reference<T&&> {
    typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_pointer {
    typedef T type;
};
template <class T>
struct remove_pointer<T*> {
    typedef T type;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;
// The host has one address space.
template <class T>
using remove_addrspace_t = T;
template <class T>
struct decay {
    typedef lab_types::bare_t<remove_reference_t<T>> type;
};
template <class T>
using decay_t = typename decay<T>::type;

template <class T>
struct is_integral : bool_constant<lab_types::Integer<T>> {};
template <class T>
struct is_floating_point : bool_constant<lab_types::Floating<T>> {};
template <class T>
struct is_arithmetic : bool_constant<lab_types::Scalar<T>> {};
template <class T>
struct is_signed : bool_constant<(lab_types::Floating<T> || static_cast<T>(-1) < static_cast<T>(0))> {};
template <class T>
struct is_unsigned : bool_constant<(lab_types::Integer<T> && !(static_cast<T>(-1) < static_cast<T>(0)))> {};
template <class T>
struct is_pointer : false_type {};
template <class T>
struct is_pointer<T*> : true_type {};
template <class T>
struct is_const : false_type {};
template <class T>
struct is_const<const T> : true_type {};
template <class From, class To>
struct is_convertible : bool_constant<requires(From (*make)(), void (*take)(To)) { take(make()); }> {};
template <class A, class B>
struct is_base_of : bool_constant<__is_base_of(A, B)> {};
template <class T>
inline constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
inline constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T>
inline constexpr bool is_signed_v = is_signed<T>::value;
template <class T>
inline constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <class T>
inline constexpr bool is_pointer_v = is_pointer<T>::value;
template <class From, class To>
inline constexpr bool is_convertible_v = is_convertible<From, To>::value;
template <class A, class B>
inline constexpr bool is_base_of_v = is_base_of<A, B>::value;

template <class T>
struct make_unsigned;
template <class T>
struct make_signed;
#define LAB_SIGNS(S, U)              \
    template <>                      \
    struct make_unsigned<S> {        \
        typedef U type;              \
    };                               \
    template <>                      \
    struct make_unsigned<U> {        \
        typedef U type;              \
    };                               \
    template <>                      \
    struct make_signed<S> {          \
        typedef S type;              \
    };                               \
    template <>                      \
    struct make_signed<U> {          \
        typedef S type;              \
    };
LAB_SIGNS(char, uchar)
LAB_SIGNS(short, ushort)
LAB_SIGNS(int, uint)
LAB_SIGNS(long, ulong)
#undef LAB_SIGNS
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <class T>
using make_signed_t = typename make_signed<T>::type;

template <class T>
constexpr T&& forward(remove_reference_t<T>& v) {
    return static_cast<T&&>(v);
}
template <class T>
constexpr remove_reference_t<T>&& move(T&& v) {
    return static_cast<remove_reference_t<T>&&>(v);
}
template <class T>
T&& declval();

template <class T>
struct numeric_limits;
#define LAB_INTEGER_LIMITS(T, LO, HI)                                       \
    template <>                                                             \
    struct numeric_limits<T> {                                              \
        static constexpr bool is_specialized = true, is_integer = true;     \
        static constexpr bool is_signed = (LO) < 0, has_infinity = false;   \
        static constexpr int digits = sizeof(T) * 8 - is_signed;            \
        static constexpr T min() { return LO; }                             \
        static constexpr T lowest() { return LO; }                          \
        static constexpr T max() { return HI; }                             \
        static constexpr T epsilon() { return 0; }                          \
        static constexpr T infinity() { return 0; }                         \
    };
LAB_INTEGER_LIMITS(bool, false, true)
LAB_INTEGER_LIMITS(char, SCHAR_MIN, SCHAR_MAX)
LAB_INTEGER_LIMITS(signed char, SCHAR_MIN, SCHAR_MAX)
LAB_INTEGER_LIMITS(uchar, 0, UCHAR_MAX)
LAB_INTEGER_LIMITS(short, SHRT_MIN, SHRT_MAX)
LAB_INTEGER_LIMITS(ushort, 0, USHRT_MAX)
LAB_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
LAB_INTEGER_LIMITS(uint, 0, UINT_MAX)
LAB_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX)
LAB_INTEGER_LIMITS(ulong, 0, ULONG_MAX)
#undef LAB_INTEGER_LIMITS
#define LAB_FLOAT_LIMITS(T, U, MIN, MAX, EPSILON, INF, QNAN, DIGITS)                           \
    template <>                                                                                \
    struct numeric_limits<T> {                                                                 \
        static constexpr bool is_specialized = true, is_integer = false, is_signed = true;     \
        static constexpr bool has_infinity = true, has_quiet_NaN = true;                       \
        static constexpr int digits = DIGITS;                                                  \
        static constexpr T min() { return __builtin_bit_cast(T, static_cast<U>(MIN)); }        \
        static constexpr T lowest() { return __builtin_bit_cast(T, static_cast<U>((MAX) | (static_cast<U>(1) << (sizeof(U) * 8 - 1)))); } \
        static constexpr T max() { return __builtin_bit_cast(T, static_cast<U>(MAX)); }        \
        static constexpr T epsilon() { return __builtin_bit_cast(T, static_cast<U>(EPSILON)); }\
        static constexpr T infinity() { return __builtin_bit_cast(T, static_cast<U>(INF)); }   \
        static constexpr T quiet_NaN() { return __builtin_bit_cast(T, static_cast<U>(QNAN)); } \
    };
LAB_FLOAT_LIMITS(float, uint, 0x00800000, 0x7f7fffff, 0x34000000, 0x7f800000, 0x7fc00000, 24)
LAB_FLOAT_LIMITS(half, ushort, 0x0400, 0x7bff, 0x1400, 0x7c00, 0x7e00, 11)
LAB_FLOAT_LIMITS(bfloat, ushort, 0x0080, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0, 8)
#undef LAB_FLOAT_LIMITS

template <class T, size_t N>
struct array {
    T lab_e[N];
    LAB_INLINE constexpr T& operator[](size_t i) {
        if (i >= N) lab_index_beyond(static_cast<long>(i));
        return lab_e[i];
    }
    LAB_INLINE constexpr const T& operator[](size_t i) const {
        if (i >= N) lab_index_beyond(static_cast<long>(i));
        return lab_e[i];
    }
    static constexpr size_t size() { return N; }
    constexpr T* data() { return lab_e; }
    constexpr T* begin() { return lab_e; }
    constexpr T* end() { return lab_e + N; }
};

}  // namespace metal
