// Scalar types of the Metal Shading Language: fixed-width integers, half, bfloat.
#pragma once

#include "abi.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

#define LAB_INLINE inline __attribute__((always_inline))

typedef _Float16 half;
typedef half float16_t;

// Eight bits of exponent, seven of mantissa, rounded to nearest even. Arithmetic between two bfloats or a bfloat
// and an integer is done in float and rounded; with a float the result is a float.
struct bfloat {
    unsigned short bits;

    bfloat() = default;
    // As in Metal, nothing but integers becomes a bfloat unless the text says so.
    explicit constexpr bfloat(float f) : bits(round(f)) {}
    explicit constexpr bfloat(half h) : bfloat(static_cast<float>(h)) {}
    explicit constexpr bfloat(double d) : bfloat(static_cast<float>(d)) {}
    constexpr bfloat(bool i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(char i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(signed char i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(unsigned char i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(short i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(unsigned short i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(int i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(unsigned int i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(long i) : bfloat(static_cast<float>(i)) {}
    constexpr bfloat(unsigned long i) : bfloat(static_cast<float>(i)) {}

    constexpr operator float() const { return __builtin_bit_cast(float, static_cast<uint>(bits) << 16); }

    static constexpr unsigned short round(float f) {
        uint u = __builtin_bit_cast(uint, f);
        if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((u >> 16) | 0x40u);
        return static_cast<unsigned short>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }

#define LAB_BFLOAT_ASSIGN(op)                                                                           \
    template <class U>                                                                                  \
    constexpr bfloat& operator op##=(U other) {                                                         \
        return *this = bfloat(static_cast<float>(*this) op static_cast<float>(other));                  \
    }
    LAB_BFLOAT_ASSIGN(+)
    LAB_BFLOAT_ASSIGN(-)
    LAB_BFLOAT_ASSIGN(*)
    LAB_BFLOAT_ASSIGN(/)
#undef LAB_BFLOAT_ASSIGN
    constexpr bfloat& operator++() { return *this += 1; }
    constexpr bfloat operator-() const { return __builtin_bit_cast(bfloat, static_cast<unsigned short>(bits ^ 0x8000)); }
    constexpr bfloat operator+() const { return *this; }
};
typedef bfloat bfloat16_t;

namespace lab_types {
template <class A, class B>
inline constexpr bool same = false;
template <class A>
inline constexpr bool same<A, A> = true;
template <class T>
struct bare {
    using type = T;
};
template <class T>
struct bare<const T> {
    using type = T;
};
template <class T>
struct bare<volatile T> {
    using type = T;
};
template <class T>
struct bare<const volatile T> {
    using type = T;
};
template <class T>
using bare_t = typename bare<T>::type;

template <class T>
inline constexpr bool integer = same<T, bool> || same<T, char> || same<T, signed char> || same<T, uchar> ||
                                same<T, short> || same<T, ushort> || same<T, int> || same<T, uint> ||
                                same<T, long> || same<T, ulong> || same<T, long long> || same<T, unsigned long long>;
template <class T>
inline constexpr bool floating = same<T, float> || same<T, half> || same<T, bfloat>;
template <class T>
concept Integer = integer<bare_t<T>>;
template <class T>
concept Floating = floating<bare_t<T>>;
template <class T>
concept Scalar = integer<bare_t<T>> || floating<bare_t<T>> || same<bare_t<T>, double>;
}  // namespace lab_types

// bfloat op bfloat, bfloat op integer: rounded. Everything else goes through the conversion to float.
#define LAB_BFLOAT_BINARY(op)                                                                                        \
    constexpr bfloat operator op(bfloat a, bfloat b) {                                                               \
        return bfloat(static_cast<float>(a) op static_cast<float>(b));                                               \
    }                                                                                                                \
    template <lab_types::Integer I>                                                                                  \
    constexpr bfloat operator op(bfloat a, I b) {                                                                    \
        return bfloat(static_cast<float>(a) op static_cast<float>(b));                                               \
    }                                                                                                                \
    template <lab_types::Integer I>                                                                                  \
    constexpr bfloat operator op(I a, bfloat b) {                                                                    \
        return bfloat(static_cast<float>(a) op static_cast<float>(b));                                               \
    }                                                                                                                \
    constexpr float operator op(bfloat a, float b) { return static_cast<float>(a) op b; }                            \
    constexpr float operator op(float a, bfloat b) { return a op static_cast<float>(b); }                            \
    constexpr float operator op(bfloat a, half b) { return static_cast<float>(a) op static_cast<float>(b); }         \
    constexpr float operator op(half a, bfloat b) { return static_cast<float>(a) op static_cast<float>(b); }
LAB_BFLOAT_BINARY(+)
LAB_BFLOAT_BINARY(-)
LAB_BFLOAT_BINARY(*)
LAB_BFLOAT_BINARY(/)
#undef LAB_BFLOAT_BINARY

constexpr half operator""h(long double v) { return static_cast<half>(v); }
constexpr bfloat operator""bf(long double v) { return bfloat(static_cast<float>(v)); }

template <class To, class From>
LAB_INLINE To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type: both types have to have one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.40282347e+38f
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-07f
#define FLT_DIG 6
#define HALF_MAX static_cast<half>(65504.0f)
#define HALF_MIN static_cast<half>(6.103515625e-05f)
#define HALF_EPSILON static_cast<half>(0.0009765625f)
#define MAXHALF static_cast<half>(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_PI_H static_cast<half>(M_PI_F)
#define M_PI_2_H static_cast<half>(M_PI_2_F)
#define M_PI_4_H static_cast<half>(M_PI_4_F)
#define M_E_H static_cast<half>(M_E_F)
#define M_LOG2E_H static_cast<half>(M_LOG2E_F)
#define M_LN2_H static_cast<half>(M_LN2_F)
#define M_SQRT2_H static_cast<half>(M_SQRT2_F)
#define M_SQRT1_2_H static_cast<half>(M_SQRT1_2_F)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1l)
#define ULONG_MAX 18446744073709551615ul
