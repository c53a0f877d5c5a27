// Functions of <metal_math> and <metal_common> for scalars, and those with one or two arguments for vectors.
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
    }                                                                                               \
    template <class A, class B>                                                                     \
        requires lab_mixed<A, B>                                                                    \
    LAB_INLINE lab_mix_t<A, B> name(A a, B b) {                                                     \
        lab_mix_t<A, B> x(a), y(b), r;                                                              \
        for (int i = 0; i < lab_width<decltype(r)>::value; i++) r[i] = name(x[i], y[i]);            \
        return r;                                                                                   \
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

// Besides a result they have a second one, or an exponent; half and bfloat are values of float.
LAB_INLINE float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
LAB_INLINE int ilogb(float x) { return __builtin_ilogbf(x); }
LAB_INLINE float frexp(float x, int& e) { return __builtin_frexpf(x, &e); }
LAB_INLINE float modf(float x, float& whole) { return __builtin_modff(x, &whole); }
LAB_INLINE float sincos(float x, float& c) {
    c = __builtin_cosf(x);
    return __builtin_sinf(x);
}
#define LAB_MATH_PARTS(T)                                                                            \
    LAB_INLINE T ldexp(T x, int k) { return static_cast<T>(ldexp(static_cast<float>(x), k)); }       \
    LAB_INLINE int ilogb(T x) { return ilogb(static_cast<float>(x)); }                               \
    LAB_INLINE T frexp(T x, int& e) { return static_cast<T>(frexp(static_cast<float>(x), e)); }      \
    LAB_INLINE T modf(T x, T& whole) {                                                               \
        float w, r = modf(static_cast<float>(x), w);                                                 \
        whole = static_cast<T>(w);                                                                   \
        return static_cast<T>(r);                                                                    \
    }                                                                                                \
    LAB_INLINE T sincos(T x, T& c) {                                                                 \
        float d, r = sincos(static_cast<float>(x), d);                                               \
        c = static_cast<T>(d);                                                                       \
        return static_cast<T>(r);                                                                    \
    }
LAB_MATH_PARTS(half)
LAB_MATH_PARTS(bfloat)
#undef LAB_MATH_PARTS

// A product rounded once with the sum; fma(half) is exact in double and rounded from there.
LAB_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LAB_INLINE half fma(half a, half b, half c) {
    return static_cast<half>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}
LAB_INLINE bfloat fma(bfloat a, bfloat b, bfloat c) {
    return bfloat(__builtin_fmaf(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
}

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

template <lab_types::Scalar T>
LAB_INLINE constexpr T select(T a, T b, bool c) {
    return c ? b : a;
}

}  // namespace metal
