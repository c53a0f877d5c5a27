// Functions of <metal_integer>, for scalars.
#pragma once

#include "types.h"

namespace metal {

// Sums and products of two Ts, and one T more, exactly.
template <class T>
struct lab_wide {
    typedef __int128 type;
};
template <>
struct lab_wide<ulong> {
    typedef unsigned __int128 type;
};
template <class T>
using lab_wide_t = typename lab_wide<T>::type;

// The nearest T.
template <class T>
LAB_INLINE constexpr T lab_saturated(__int128 v) {
    constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
    __int128 hi = (static_cast<__int128>(1) << (sizeof(T) * 8 - is_signed)) - 1, lo = is_signed ? -hi - 1 : 0;
    return static_cast<T>(v < lo ? lo : v > hi ? hi : v);
}
template <class T>
LAB_INLINE constexpr T lab_saturated(unsigned __int128 v) {
    constexpr T hi = static_cast<T>(-1);
    return v > hi ? hi : static_cast<T>(v);
}

#define LAB_ORDERED(T)                                                                                    \
    LAB_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                                        \
    LAB_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                                        \
    LAB_INLINE constexpr T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }                         \
    LAB_INLINE constexpr T min3(T a, T b, T c) { return min(a, min(b, c)); }                              \
    LAB_INLINE constexpr T max3(T a, T b, T c) { return max(a, max(b, c)); }                              \
    LAB_INLINE constexpr T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
#define LAB_INTEGER(T, U, BITS)                                                                            \
    LAB_ORDERED(T)                                                                                         \
    LAB_INLINE constexpr T abs(T x) { return static_cast<T>(x < 0 ? static_cast<U>(0 - static_cast<U>(x)) : static_cast<U>(x)); } \
    LAB_INLINE constexpr T popcount(T x) { return static_cast<T>(__builtin_popcountl(static_cast<U>(x))); }\
    LAB_INLINE constexpr T clz(T x) {                                                                      \
        return static_cast<T>(x == 0 ? BITS : __builtin_clzl(static_cast<U>(x)) - (64 - BITS));            \
    }                                                                                                      \
    LAB_INLINE constexpr T ctz(T x) {                                                                      \
        return static_cast<T>(x == 0 ? BITS : __builtin_ctzl(static_cast<U>(x)));                          \
    }                                                                                                      \
    LAB_INLINE constexpr T reverse_bits(T x) {                                                             \
        U r = 0;                                                                                           \
        for (int i = 0; i < BITS; i++) r = static_cast<U>(r | ((static_cast<U>(x) >> i & 1) << (BITS - 1 - i))); \
        return static_cast<T>(r);                                                                          \
    }                                                                                                      \
    LAB_INLINE constexpr T rotate(T x, T n) {                                                              \
        U u = static_cast<U>(x), k = static_cast<U>(n) & (BITS - 1);                                       \
        return static_cast<T>(k == 0 ? u : static_cast<U>(u << k | u >> (BITS - k)));                      \
    }                                                                                                      \
    LAB_INLINE constexpr T extract_bits(T x, uint offset, uint bits) {                                     \
        if (bits == 0) return 0;                                                                           \
        T up = static_cast<T>(static_cast<U>(static_cast<U>(x) << (BITS - offset - bits)));                \
        return static_cast<T>(up >> (BITS - bits));                                                        \
    }                                                                                                      \
    LAB_INLINE constexpr T insert_bits(T base, T insert, uint offset, uint bits) {                         \
        if (bits == 0) return base;                                                                        \
        U mask = static_cast<U>(static_cast<U>(static_cast<U>(~static_cast<U>(0)) >> (BITS - bits)) << offset); \
        return static_cast<T>((static_cast<U>(base) & static_cast<U>(~mask)) |                             \
                              (static_cast<U>(static_cast<U>(insert) << offset) & mask));                  \
    }                                                                                                      \
    LAB_INLINE constexpr T mulhi(T a, T b) {                                                               \
        return static_cast<T>(static_cast<lab_wide_t<T>>(a) * static_cast<lab_wide_t<T>>(b) >> BITS);      \
    }                                                                                                      \
    LAB_INLINE constexpr T madhi(T a, T b, T c) { return static_cast<T>(static_cast<U>(mulhi(a, b)) + static_cast<U>(c)); } \
    LAB_INLINE constexpr T madsat(T a, T b, T c) { return lab_saturated<T>(static_cast<lab_wide_t<T>>(a) * b + c); } \
    LAB_INLINE constexpr T addsat(T a, T b) { return lab_saturated<T>(static_cast<__int128>(a) + b); }     \
    LAB_INLINE constexpr T subsat(T a, T b) { return lab_saturated<T>(static_cast<__int128>(a) - b); }     \
    LAB_INLINE constexpr U absdiff(T a, T b) { return static_cast<U>(a < b ? static_cast<U>(b) - static_cast<U>(a) : static_cast<U>(a) - static_cast<U>(b)); } \
    LAB_INLINE constexpr T hadd(T a, T b) { return static_cast<T>((static_cast<__int128>(a) + b) >> 1); }  \
    LAB_INLINE constexpr T rhadd(T a, T b) { return static_cast<T>((static_cast<__int128>(a) + b + 1) >> 1); }

LAB_INTEGER(char, uchar, 8)
LAB_INTEGER(signed char, uchar, 8)
LAB_INTEGER(uchar, uchar, 8)
LAB_INTEGER(short, ushort, 16)
LAB_INTEGER(ushort, ushort, 16)
LAB_INTEGER(int, uint, 32)
LAB_INTEGER(uint, uint, 32)
LAB_INTEGER(long, ulong, 64)
LAB_INTEGER(ulong, ulong, 64)
#undef LAB_INTEGER
#undef LAB_ORDERED
LAB_INLINE constexpr int mad24(int a, int b, int c) { return static_cast<int>(static_cast<uint>(a) * static_cast<uint>(b) + static_cast<uint>(c)); }
LAB_INLINE constexpr uint mad24(uint a, uint b, uint c) { return a * b + c; }
LAB_INLINE constexpr int mul24(int a, int b) { return static_cast<int>(static_cast<uint>(a) * static_cast<uint>(b)); }
LAB_INLINE constexpr uint mul24(uint a, uint b) { return a * b; }

}  // namespace metal
