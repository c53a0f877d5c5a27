// Functions of <metal_geometric>, and names that fast:: and precise:: share with all others.
#pragma once

#include "elementwise.h"

namespace metal {

template <class T, int N>
LAB_INLINE T dot(vec<T, N> a, vec<T, N> b) {
    T r = a[0] * b[0];
    for (int i = 1; i < N; i++) r = static_cast<T>(r + a[i] * b[i]);
    return r;
}
template <class T, int N>
LAB_INLINE T length_squared(vec<T, N> a) {
    return dot(a, a);
}
template <class T, int N>
LAB_INLINE T length(vec<T, N> a) {
    return sqrt(dot(a, a));
}
template <class T, int N>
LAB_INLINE T distance_squared(vec<T, N> a, vec<T, N> b) {
    return length_squared(a - b);
}
template <class T, int N>
LAB_INLINE T distance(vec<T, N> a, vec<T, N> b) {
    return length(a - b);
}
template <class T, int N>
LAB_INLINE vec<T, N> normalize(vec<T, N> a) {
    return a * rsqrt(dot(a, a));
}
template <class T>
LAB_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
    return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}
// The normal, on the side that the incident vector comes from as `seen` says.
template <class T, int N>
LAB_INLINE vec<T, N> faceforward(vec<T, N> normal, vec<T, N> incident, vec<T, N> seen) {
    return dot(seen, incident) < 0 ? normal : -normal;
}
// The normal has length 1, and so has what is refracted.
template <class T, int N>
LAB_INLINE vec<T, N> reflect(vec<T, N> incident, vec<T, N> normal) {
    return incident - static_cast<T>(2 * dot(normal, incident)) * normal;
}
template <class T, int N>
LAB_INLINE vec<T, N> refract(vec<T, N> incident, vec<T, N> normal, lab_types::bare_t<T> eta) {
    T along = dot(normal, incident), rest = static_cast<T>(1 - eta * eta * (1 - along * along));
    if (rest < 0) return vec<T, N>(0);
    return eta * incident - static_cast<T>(eta * along + sqrt(rest)) * normal;
}

#define LAB_SHARED_NAMES                                                                                  \
    using metal::abs;                                                                                     \
    using metal::clamp;                                                                                   \
    using metal::cross;                                                                                   \
    using metal::distance;                                                                                \
    using metal::distance_squared;                                                                        \
    using metal::dot;                                                                                     \
    using metal::faceforward;                                                                             \
    using metal::fma;                                                                                     \
    using metal::fmax3;                                                                                   \
    using metal::fmedian3;                                                                                \
    using metal::fmin3;                                                                                   \
    using metal::frexp;                                                                                   \
    using metal::ilogb;                                                                                   \
    using metal::isfinite;                                                                                \
    using metal::isinf;                                                                                   \
    using metal::isnan;                                                                                   \
    using metal::isnormal;                                                                                \
    using metal::isordered;                                                                               \
    using metal::isunordered;                                                                             \
    using metal::ldexp;                                                                                   \
    using metal::length;                                                                                  \
    using metal::length_squared;                                                                          \
    using metal::max;                                                                                     \
    using metal::max3;                                                                                    \
    using metal::median3;                                                                                 \
    using metal::min;                                                                                     \
    using metal::min3;                                                                                    \
    using metal::mix;                                                                                     \
    using metal::modf;                                                                                    \
    using metal::normalize;                                                                               \
    using metal::reflect;                                                                                 \
    using metal::refract;                                                                                 \
    using metal::signbit;                                                                                 \
    using metal::sincos;                                                                                  \
    using metal::smoothstep;                                                                              \
    using metal::step;
namespace fast {
LAB_SHARED_NAMES
}
namespace precise {
LAB_SHARED_NAMES
}
#undef LAB_SHARED_NAMES
#undef LAB_EACH

}  // namespace metal
