// Functions of <metal_math>, <metal_common>, <metal_integer>, <metal_relational> and <metal_geometric>.
//
// As in Metal, each exists for every type by itself: exp(1) is ambiguous. half and bfloat are computed in float
// and rounded once. fast:: and precise:: are the same functions; the device's fast ones are less exact.
#pragma once

#include "vec.h"

namespace metal {

#define LAB_EACH(T, N, expression)                       \
    vec<T, N> r;                                         \
    for (int i = 0; i < N; i++) r[i] = expression;       \
    return r;

#define LAB_MATH_1(name, builtin)                                                                   \
    LAB_INLINE float name(float x) { return builtin(x); }                                           \
    LAB_INLINE half name(half x) { return static_cast<half>(builtin(static_cast<float>(x))); }      \
    LAB_INLINE bfloat name(bfloat x) { return bfloat(builtin(static_cast<float>(x))); }             \
    template <lab_types::Floating T, int N>                                                         \
    LAB_INLINE vec<T, N> name(vec<T, N> x) {                                                 \
        LAB_EACH(T, N, name(x[i]))                                                                  \
    }
#define LAB_MATH_2(name, builtin)                                                                   \
    LAB_INLINE float name(float x, float y) { return builtin(x, y); }                               \
    LAB_INLINE half name(half x, half y) {                                                          \
        return static_cast<half>(builtin(static_cast<float>(x), static_cast<float>(y)));            \
    }                                                                                               \
    LAB_INLINE bfloat name(bfloat x, bfloat y) {                                                    \
        return bfloat(builtin(static_cast<float>(x), static_cast<float>(y)));                       \
    }                                                                                               \
    template <lab_types::Floating T, int N>                                                         \
    LAB_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {                             \
        LAB_EACH(T, N, name(x[i], y[i]))                                                            \
    }
#define LAB_MATH_TEST(name, expression)                                                             \
    LAB_INLINE bool name(float x) { return expression; }                                            \
    LAB_INLINE bool name(half h) {                                                                  \
        float x = static_cast<float>(h);                                                            \
        return expression;                                                                          \
    }                                                                                               \
    LAB_INLINE bool name(bfloat h) {                                                                \
        float x = static_cast<float>(h);                                                            \
        return expression;                                                                          \
    }                                                                                               \
    template <lab_types::Floating T, int N>                                                         \
    LAB_INLINE vec<bool, N> name(vec<T, N> x) {                                              \
        LAB_EACH(bool, N, name(x[i]))                                                               \
    }

LAB_INLINE float lab_exp10(float x) { return __builtin_powf(10.0f, x); }
LAB_INLINE float lab_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
LAB_INLINE float lab_fract(float x) {
    float f = x - __builtin_floorf(x);
    return f < 1.0f ? f : 0x1.fffffep-1f;
}
LAB_INLINE float lab_sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f; }
LAB_INLINE float lab_saturate(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
LAB_INLINE float lab_sinpi(float x) { return __builtin_sinf(M_PI_F * x); }
LAB_INLINE float lab_cospi(float x) { return __builtin_cosf(M_PI_F * x); }
LAB_INLINE float lab_tanpi(float x) { return __builtin_tanf(M_PI_F * x); }
LAB_INLINE float lab_divide(float x, float y) { return x / y; }

#define LAB_ALL_MATH                       \
    LAB_MATH_1(exp, __builtin_expf)        \
    LAB_MATH_1(exp2, __builtin_exp2f)      \
    LAB_MATH_1(exp10, lab_exp10)           \
    LAB_MATH_1(log, __builtin_logf)        \
    LAB_MATH_1(log2, __builtin_log2f)      \
    LAB_MATH_1(log10, __builtin_log10f)    \
    LAB_MATH_1(sin, __builtin_sinf)        \
    LAB_MATH_1(cos, __builtin_cosf)        \
    LAB_MATH_1(tan, __builtin_tanf)        \
    LAB_MATH_1(sinpi, lab_sinpi)           \
    LAB_MATH_1(cospi, lab_cospi)           \
    LAB_MATH_1(tanpi, lab_tanpi)           \
    LAB_MATH_1(asin, __builtin_asinf)      \
    LAB_MATH_1(acos, __builtin_acosf)      \
    LAB_MATH_1(atan, __builtin_atanf)      \
    LAB_MATH_1(sinh, __builtin_sinhf)      \
    LAB_MATH_1(cosh, __builtin_coshf)      \
    LAB_MATH_1(tanh, __builtin_tanhf)      \
    LAB_MATH_1(asinh, __builtin_asinhf)    \
    LAB_MATH_1(acosh, __builtin_acoshf)    \
    LAB_MATH_1(atanh, __builtin_atanhf)    \
    LAB_MATH_1(sqrt, __builtin_sqrtf)      \
    LAB_MATH_1(rsqrt, lab_rsqrt)           \
    LAB_MATH_1(fabs, __builtin_fabsf)      \
    LAB_MATH_1(floor, __builtin_floorf)    \
    LAB_MATH_1(ceil, __builtin_ceilf)      \
    LAB_MATH_1(trunc, __builtin_truncf)    \
    LAB_MATH_1(rint, __builtin_rintf)      \
    LAB_MATH_1(round, __builtin_roundf)    \
    LAB_MATH_1(fract, lab_fract)           \
    LAB_MATH_1(sign, lab_sign)             \
    LAB_MATH_1(saturate, lab_saturate)     \
    LAB_MATH_2(pow, __builtin_powf)        \
    LAB_MATH_2(powr, __builtin_powf)       \
    LAB_MATH_2(atan2, __builtin_atan2f)    \
    LAB_MATH_2(fmod, __builtin_fmodf)      \
    LAB_MATH_2(fmin, __builtin_fminf)      \
    LAB_MATH_2(fmax, __builtin_fmaxf)      \
    LAB_MATH_2(copysign, __builtin_copysignf) \
    LAB_MATH_2(fdim, __builtin_fdimf)      \
    LAB_MATH_2(nextafter, __builtin_nextafterf) \
    LAB_MATH_2(divide, lab_divide)

LAB_ALL_MATH
LAB_MATH_TEST(isnan, __builtin_isnan(x))
LAB_MATH_TEST(isinf, __builtin_isinf(x) != 0)
LAB_MATH_TEST(isfinite, __builtin_isfinite(x))
LAB_MATH_TEST(isnormal, __builtin_isnormal(x))
LAB_MATH_TEST(signbit, __builtin_signbit(x) != 0)

namespace fast {
LAB_ALL_MATH
}
namespace precise {
LAB_ALL_MATH
}

LAB_INLINE float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
LAB_INLINE half ldexp(half x, int k) { return static_cast<half>(__builtin_ldexpf(static_cast<float>(x), k)); }
LAB_INLINE int ilogb(float x) { return __builtin_ilogbf(x); }
LAB_INLINE float frexp(float x, int& e) { return __builtin_frexpf(x, &e); }
LAB_INLINE float modf(float x, float& whole) { return __builtin_modff(x, &whole); }
LAB_INLINE float sincos(float x, float& c) {
    c = __builtin_cosf(x);
    return __builtin_sinf(x);
}

// A product rounded once with the sum; fma(half) is exact in double and rounded from there.
LAB_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LAB_INLINE half fma(half a, half b, half c) {
    return static_cast<half>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}
LAB_INLINE bfloat fma(bfloat a, bfloat b, bfloat c) {
    return bfloat(__builtin_fmaf(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
}
template <lab_types::Floating T, int N>
LAB_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
    LAB_EACH(T, N, fma(a[i], b[i], c[i]))
}

#define LAB_ORDERED(T)                                                                                    \
    LAB_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                                        \
    LAB_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                                        \
    LAB_INLINE constexpr T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }                         \
    LAB_INLINE constexpr T min3(T a, T b, T c) { return min(a, min(b, c)); }                              \
    LAB_INLINE constexpr T max3(T a, T b, T c) { return max(a, max(b, c)); }                              \
    LAB_INLINE constexpr T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
#define LAB_ORDERED_FLOAT(T)                                                                                       \
    LAB_INLINE T min(T a, T b) { return static_cast<T>(__builtin_fminf(static_cast<float>(a), static_cast<float>(b))); } \
    LAB_INLINE T max(T a, T b) { return static_cast<T>(__builtin_fmaxf(static_cast<float>(a), static_cast<float>(b))); } \
    LAB_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }                                            \
    LAB_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }                                                 \
    LAB_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }                                                 \
    LAB_INLINE T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }                              \
    LAB_INLINE T fmin3(T a, T b, T c) { return min3(a, b, c); }                                                    \
    LAB_INLINE T fmax3(T a, T b, T c) { return max3(a, b, c); }                                                    \
    LAB_INLINE T fmedian3(T a, T b, T c) { return median3(a, b, c); }                                              \
    LAB_INLINE bool isunordered(T a, T b) { return isnan(a) || isnan(b); }                                         \
    LAB_INLINE bool isordered(T a, T b) { return !isunordered(a, b); }                                             \
    LAB_INLINE T abs(T a) { return fabs(a); }                                                                      \
    LAB_INLINE T mix(T x, T y, T a) { return x + (y - x) * a; }                                                    \
    LAB_INLINE T step(T edge, T x) { return static_cast<T>(x < edge ? 0.0f : 1.0f); }                              \
    LAB_INLINE T smoothstep(T lo, T hi, T x) {                                                                     \
        T t = clamp(static_cast<T>((x - lo) / (hi - lo)), static_cast<T>(0.0f), static_cast<T>(1.0f));             \
        return static_cast<T>(t * t * (3 - 2 * t));                                                                \
    }                                                                                                              \
    LAB_INLINE T mad(T a, T b, T c) { return static_cast<T>(a * b + c); }
LAB_ORDERED_FLOAT(float)
LAB_ORDERED_FLOAT(half)
LAB_ORDERED_FLOAT(bfloat)
#undef LAB_ORDERED_FLOAT

#define LAB_INTEGER(T, U, BITS)                                                                            \
    LAB_ORDERED(T)                                                                                         \
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
        return static_cast<T>(static_cast<__int128>(a) * static_cast<__int128>(b) >> BITS);                \
    }                                                                                                      \
    LAB_INLINE constexpr T madhi(T a, T b, T c) { return static_cast<T>(static_cast<U>(mulhi(a, b)) + static_cast<U>(c)); } \
    LAB_INLINE constexpr T madsat(T a, T b, T c) { return lab_saturated<T>(static_cast<__int128>(a) * b + c); } \
    LAB_INLINE constexpr T addsat(T a, T b) { return lab_saturated<T>(static_cast<__int128>(a) + b); }     \
    LAB_INLINE constexpr T subsat(T a, T b) { return lab_saturated<T>(static_cast<__int128>(a) - b); }     \
    LAB_INLINE constexpr U absdiff(T a, T b) { return static_cast<U>(a < b ? static_cast<U>(b) - static_cast<U>(a) : static_cast<U>(a) - static_cast<U>(b)); } \
    LAB_INLINE constexpr T hadd(T a, T b) { return static_cast<T>((static_cast<__int128>(a) + b) >> 1); }  \
    LAB_INLINE constexpr T rhadd(T a, T b) { return static_cast<T>((static_cast<__int128>(a) + b + 1) >> 1); }

template <class T>
LAB_INLINE constexpr T lab_saturated(__int128 v) {
    constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
    __int128 hi = (static_cast<__int128>(1) << (sizeof(T) * 8 - is_signed)) - 1, lo = is_signed ? -hi - 1 : 0;
    return static_cast<T>(v < lo ? lo : v > hi ? hi : v);
}

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

#define LAB_ABS(T, U) \
    LAB_INLINE constexpr U abs(T a) { return static_cast<U>(a < 0 ? 0 - static_cast<U>(a) : static_cast<U>(a)); }
LAB_ABS(char, uchar)
LAB_ABS(signed char, uchar)
LAB_ABS(short, ushort)
LAB_ABS(int, uint)
LAB_ABS(long, ulong)
#undef LAB_ABS
LAB_INLINE constexpr uchar abs(uchar a) { return a; }
LAB_INLINE constexpr ushort abs(ushort a) { return a; }
LAB_INLINE constexpr uint abs(uint a) { return a; }
LAB_INLINE constexpr ulong abs(ulong a) { return a; }
LAB_INLINE constexpr int mad24(int a, int b, int c) { return static_cast<int>(static_cast<uint>(a) * static_cast<uint>(b) + static_cast<uint>(c)); }
LAB_INLINE constexpr uint mad24(uint a, uint b, uint c) { return a * b + c; }
LAB_INLINE constexpr int mul24(int a, int b) { return static_cast<int>(static_cast<uint>(a) * static_cast<uint>(b)); }
LAB_INLINE constexpr uint mul24(uint a, uint b) { return a * b; }

#define LAB_VECTOR_2(name)                                                            \
    template <class T, int N>                                                         \
    LAB_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) {               \
        LAB_EACH(T, N, name(a[i], b[i]))                                              \
    }                                                                                 \
    template <class T, int N, lab_types::Scalar S>                                    \
    LAB_INLINE vec<T, N> name(vec<T, N> a, S b) {                              \
        LAB_EACH(T, N, name(a[i], static_cast<T>(b)))                                 \
    }
#define LAB_VECTOR_3(name)                                                                          \
    template <class T, int N>                                                                       \
    LAB_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b, vec<T, N> c) {         \
        LAB_EACH(T, N, name(a[i], b[i], c[i]))                                                      \
    }                                                                                               \
    template <class T, int N, lab_types::Scalar S, lab_types::Scalar V>                             \
    LAB_INLINE vec<T, N> name(vec<T, N> a, S b, V c) {                                       \
        LAB_EACH(T, N, name(a[i], static_cast<T>(b), static_cast<T>(c)))                            \
    }
#define LAB_VECTOR_1(name)                                      \
    template <lab_types::Integer T, int N>                      \
    LAB_INLINE vec<T, N> name(vec<T, N> a) {             \
        LAB_EACH(T, N, static_cast<T>(name(a[i])))              \
    }
LAB_VECTOR_2(min)
LAB_VECTOR_2(max)
LAB_VECTOR_2(step)
LAB_VECTOR_3(clamp)
LAB_VECTOR_3(mad)
LAB_VECTOR_3(smoothstep)
LAB_VECTOR_1(popcount)
LAB_VECTOR_1(clz)
LAB_VECTOR_1(ctz)
template <class T, int N>
LAB_INLINE vec<T, N> abs(vec<T, N> a) {
    LAB_EACH(T, N, static_cast<T>(abs(a[i])))
}
template <class T, int N>
LAB_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, vec<T, N> t) {
    LAB_EACH(T, N, mix(a[i], b[i], t[i]))
}
template <class T, int N>
LAB_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, T t) {
    LAB_EACH(T, N, mix(a[i], b[i], t))
}

template <lab_types::Scalar T>
LAB_INLINE constexpr T select(T a, T b, bool c) {
    return c ? b : a;
}
template <class T, int N>
LAB_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    LAB_EACH(T, N, c[i] ? b[i] : a[i])
}
template <class T, int N>
LAB_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) {
    return c ? b : a;
}

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

}  // namespace metal
