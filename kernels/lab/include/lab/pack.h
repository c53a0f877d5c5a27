// <metal_pack>: vectors of numbers in [0, 1] or [-1, 1] as integers of 8 or 16 bits, packed into 32.
#pragma once

#include "math.h"

namespace metal {

template <int N>
LAB_INLINE uint lab_pack(vec<float, N> v, float low, float scale) {
    constexpr int bits = 32 / N;
    uint packed = 0;
    for (int i = 0; i < N; i++) {
        int n = static_cast<int>(__builtin_rintf(clamp(v[i], low, 1.0f) * scale));
        packed |= (static_cast<uint>(n) & ((1u << bits) - 1)) << (i * bits);
    }
    return packed;
}
template <int N>
LAB_INLINE vec<float, N> lab_unpack(uint packed, bool is_signed, float scale) {
    constexpr int bits = 32 / N;
    vec<float, N> v;
    for (int i = 0; i < N; i++) {
        uint up = packed << (32 - bits - i * bits);
        float n = is_signed ? static_cast<float>(static_cast<int>(up) >> (32 - bits)) : static_cast<float>(up >> (32 - bits));
        v[i] = max(n / scale, -1.0f);
    }
    return v;
}
#define LAB_PACK(N, BITS)                                                                                             \
    LAB_INLINE uint pack_float_to_unorm##N##x##BITS(vec<float, N> v) { return lab_pack(v, 0.0f, (1 << BITS) - 1); }         \
    LAB_INLINE uint pack_float_to_snorm##N##x##BITS(vec<float, N> v) { return lab_pack(v, -1.0f, (1 << (BITS - 1)) - 1); } \
    LAB_INLINE uint pack_half_to_unorm##N##x##BITS(vec<half, N> v) { return pack_float_to_unorm##N##x##BITS(vec<float, N>(v)); } \
    LAB_INLINE uint pack_half_to_snorm##N##x##BITS(vec<half, N> v) { return pack_float_to_snorm##N##x##BITS(vec<float, N>(v)); } \
    LAB_INLINE vec<float, N> unpack_unorm##N##x##BITS##_to_float(uint p) { return lab_unpack<N>(p, false, (1 << BITS) - 1); } \
    LAB_INLINE vec<float, N> unpack_snorm##N##x##BITS##_to_float(uint p) { return lab_unpack<N>(p, true, (1 << (BITS - 1)) - 1); } \
    LAB_INLINE vec<half, N> unpack_unorm##N##x##BITS##_to_half(uint p) { return vec<half, N>(unpack_unorm##N##x##BITS##_to_float(p)); } \
    LAB_INLINE vec<half, N> unpack_snorm##N##x##BITS##_to_half(uint p) { return vec<half, N>(unpack_snorm##N##x##BITS##_to_float(p)); }
LAB_PACK(4, 8)
LAB_PACK(2, 16)
#undef LAB_PACK

}  // namespace metal
