// What mx.fast.metal_kernel puts in front of a kernel: the helpers for arrays with strides.
#pragma once

#include "metal.h"

using namespace metal;

template <class Index = int64_t>
inline Index elem_to_loc(Index elem, const int* shape, const int64_t* strides, int ndim) {
    Index loc = 0;
    for (int i = ndim - 1; i >= 0 && elem > 0; i--) {
        loc += (elem % shape[i]) * static_cast<Index>(strides[i]);
        elem /= shape[i];
    }
    return loc;
}
inline int64_t elem_to_loc(uint elem, const int* shape, const int64_t* strides, int ndim) {
    return elem_to_loc<int64_t>(static_cast<int64_t>(elem), shape, strides, ndim);
}
inline int64_t elem_to_loc(int elem, const int* shape, const int64_t* strides, int ndim) {
    return elem_to_loc<int64_t>(static_cast<int64_t>(elem), shape, strides, ndim);
}
template <class T, class U>
inline T ceildiv(T n, U m) {
    return (n + m - 1) / m;
}
