// <metal_type_traits> and <metal_limits> for the type check.
#pragma once

namespace metal {

template <class T, T V>
struct integral_constant {
    static constexpr __constant T value = V;
    typedef T value_type;
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr __constant bool is_same_v = __is_same(A, B);
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
#define LAB_REMOVE(name, qualified)      \
    template <class T>                   \
    struct name {                        \
        typedef T type;                  \
    };                                   \
    template <class T>                   \
    struct name<qualified> {             \
        typedef T type;                  \
    };                                   \
    template <class T>                   \
    using name##_t = typename name<T>::type;
LAB_REMOVE(remove_const, const T)
LAB_REMOVE(remove_volatile, volatile T)
LAB_REMOVE(remove_reference, T&)
LAB_REMOVE(remove_pointer, T*)
template <class T>
using remove_cv_t = remove_volatile_t<remove_const_t<T>>;
template <class T>
using remove_addrspace_t = T;
// The type of a variable in the private address space, without it.
template <class T>
struct lab_bare {
    typedef T type;
};
template <class T>
struct lab_bare<thread T> {
    typedef T type;
};
template <class T>
using lab_bare_t = typename lab_bare<T>::type;
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <class T>
constexpr __constant bool is_integral_v = __is_integral(T);
template <class T>
constexpr __constant bool is_floating_point_v = __is_floating_point(T);
template <class A, class B>
constexpr __constant bool is_convertible_v = __is_convertible(A, B);

template <class T>
struct numeric_limits {
    static constexpr T min();
    static constexpr T lowest();
    static constexpr T max();
    static constexpr T epsilon();
    static constexpr T infinity();
    static constexpr T quiet_NaN();
    static constexpr __constant int digits = 1;
};

template <class T, size_t N>
struct array {
    T lab_values[N];
    thread T& operator[](size_t) thread;
    device T& operator[](size_t) device;
    threadgroup T& operator[](size_t) threadgroup;
    const thread T& operator[](size_t) const thread;
    const device T& operator[](size_t) const device;
    const threadgroup T& operator[](size_t) const threadgroup;
    const constant T& operator[](size_t) const constant;
    static constexpr size_t size() { return N; }
};

}  // namespace metal
