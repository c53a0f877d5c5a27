// Calls a kernel with the arguments that its attributes ask for.
#pragma once

#include "padding.h"
#include "vec.h"

namespace lab_invoke {

template <class T>
struct pointee {
    using type = T;
    static constexpr bool pointer = false;
};
template <class T>
struct pointee<T*> {
    using type = T;
    static constexpr bool pointer = true;
};
template <class T>
struct pointee<T&> {
    using type = T;
    static constexpr bool pointer = true;
};

template <class T>
inline constexpr unsigned bytes_of = sizeof(T);
template <>
inline constexpr unsigned bytes_of<void> = 1;
template <>
inline constexpr unsigned bytes_of<const void> = 1;

template <class T>
inline constexpr bool is_const = false;
template <class T>
inline constexpr bool is_const<const T> = true;

template <int I, class F>
struct nth;
template <int I, class R, class First, class... Rest>
struct nth<I, R(First, Rest...)> : nth<I - 1, R(Rest...)> {};
template <class R, class First, class... Rest>
struct nth<0, R(First, Rest...)> {
    using type = First;
};
template <int I, class F>
using nth_t = typename nth<I, F>::type;

// Description of parameter I of a kernel of type F for the host.
template <int I, class F>
constexpr lab_param describe(int kind, int index) {
    using P = pointee<nth_t<I, F>>;
    if constexpr (P::pointer) {
        if constexpr (__is_class(typename P::type)) {
            return {kind, index, is_const<typename P::type>, bytes_of<typename P::type>,
                    lab_padding::of<typename P::type>};
        } else {
            return {kind, index, is_const<typename P::type>, bytes_of<typename P::type>, nullptr};
        }
    } else {
        return {kind, index, 1, sizeof(nth_t<I, F>), nullptr};
    }
}

template <class A>
LAB_INLINE A memory(void* p) {
    if constexpr (lab_types::same<A, typename pointee<A>::type&>) {
        return *static_cast<typename pointee<A>::type*>(p);
    } else {
        return static_cast<A>(p);
    }
}

template <class A, int N>
struct Position {
    static LAB_INLINE A of(const unsigned* v) { return static_cast<A>(v[0]); }
};
template <class T, int N>
struct Position<metal::vec<T, N>, 3> {
    static LAB_INLINE metal::vec<T, N> of(const unsigned* v) {
        metal::vec<T, N> r;
        for (int i = 0; i < N; i++) r[i] = static_cast<T>(v[i]);
        return r;
    }
};
template <class A>
LAB_INLINE A position(const unsigned (&v)[3]) {
    return Position<lab_types::bare_t<A>, 3>::of(v);
}
template <class A>
LAB_INLINE A position(const unsigned& v) {
    return static_cast<A>(v);
}

}  // namespace lab_invoke
