// Which bytes of a type are padding: nobody has to write them, though whole copies read them.
#pragma once

#include "simd.h"

namespace lab_padding {

template <class T>
struct element {
    using type = lab_types::bare_t<T>;
};
template <class T, unsigned long N>
struct element<T[N]> : element<T> {};
template <class T>
using element_t = typename element<T>::type;

template <class T>
inline constexpr bool vector3 = false;
template <class T>
inline constexpr bool vector3<metal::vec<T, 3>> = true;

// A byte per byte of the element type of T, not 0 for padding; null if there is none.
template <class T>
LAB_HIDDEN const unsigned char* of() {
    using E = element_t<T>;
    static unsigned char mask[sizeof(E)];
    bool any = false;
    if constexpr (vector3<E>) {
        for (unsigned i = sizeof(E) / 4 * 3; i < sizeof(E); i++) mask[i] = any = true;
    }
#if __has_builtin(__builtin_clear_padding)
    else if constexpr (__is_class(E) && __is_trivially_copyable(E)) {
        alignas(E) unsigned char raw[sizeof(E)];
        for (unsigned i = 0; i < sizeof(E); i++) raw[i] = 1;
        __builtin_clear_padding(reinterpret_cast<E*>(raw));
        for (unsigned i = 0; i < sizeof(E); i++)
            if (!raw[i]) mask[i] = any = true;
    }
#endif
    return any ? mask : nullptr;
}

}  // namespace lab_padding
