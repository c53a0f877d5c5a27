// Functions of integers and floats for vectors, and those with two results, for the type check.
#pragma once

namespace metal {

// Integers alone have these: the type, and that without a sign.
template <class T>
struct lab_integer {};
#define LAB_INTEGERS(S, U)         \
    template <>                    \
    struct lab_integer<S> {        \
        typedef S type;            \
        typedef U without_sign;    \
    };                             \
    template <>                    \
    struct lab_integer<U> {        \
        typedef U type;            \
        typedef U without_sign;    \
    };
LAB_INTEGERS(char, uchar)
LAB_INTEGERS(short, ushort)
LAB_INTEGERS(int, uint)
LAB_INTEGERS(long, ulong)
#undef LAB_INTEGERS
#define LAB_I typename lab_integer<T>::type __attribute__((ext_vector_type(N)))
#define LAB_U typename lab_integer<T>::without_sign __attribute__((ext_vector_type(N)))
#define LAB_I1(name) LAB_AS(LAB_I, name, LAB_V(N))
#define LAB_I2(name) LAB_V2_AS(LAB_I, name)

LAB_AS(LAB_V(N), abs, LAB_V(N))
LAB_I1(popcount) LAB_I1(clz) LAB_I1(ctz) LAB_I1(reverse_bits)
LAB_V2(min) LAB_V2(max)
LAB_I2(rotate) LAB_I2(mulhi) LAB_I2(mul24) LAB_I2(addsat) LAB_I2(subsat) LAB_I2(hadd) LAB_I2(rhadd)
LAB_V2_AS(LAB_U, absdiff)
LAB_V3_AS(LAB_V(N), clamp) LAB_V3_AS(LAB_V(N), min3) LAB_V3_AS(LAB_V(N), max3) LAB_V3_AS(LAB_V(N), median3)
LAB_V3_AS(LAB_I, mad24) LAB_V3_AS(LAB_I, madhi) LAB_V3_AS(LAB_I, madsat)
LAB_AS(LAB_I, extract_bits, LAB_V(N), uint, uint)
LAB_AS(LAB_I, insert_bits, LAB_V(N), LAB_V(N), uint, uint)
int mad24(int, int, int);
uint mad24(uint, uint, uint);
int mul24(int, int);
uint mul24(uint, uint);

#define LAB_COMPARED(name)    \
    bool name(float, float);  \
    bool name(half, half);    \
    template <class T, int N> \
    vec<int, N> name(LAB_V(N), LAB_V(N));
LAB_COMPARED(isordered)
LAB_COMPARED(isunordered)
template <class B, int N>
bool all(B __attribute__((ext_vector_type(N))));
template <class B, int N>
bool any(B __attribute__((ext_vector_type(N))));
bool all(bool);
bool any(bool);
template <class T>
T select(T, T, bool);
template <class T, class B, int N>
vec<T, N> select(LAB_V(N), LAB_V(N), B __attribute__((ext_vector_type(N))));
template <class T, class B, int N>
vec<T, N> select(LAB_V(N), LAB_S, B __attribute__((ext_vector_type(N))));
template <class T, class B, int N>
vec<T, N> select(LAB_S, LAB_V(N), B __attribute__((ext_vector_type(N))));

#define LAB_PARTS(T, I)             \
    T modf(T, thread T&);           \
    T sincos(T, thread T&);         \
    I ilogb(T);                     \
    T frexp(T, thread I&);          \
    T ldexp(T, I);
#define LAB_PARTS_OF(T)       \
    LAB_PARTS(T, int)         \
    LAB_PARTS(T##2, int2)     \
    LAB_PARTS(T##3, int3)     \
    LAB_PARTS(T##4, int4)
LAB_PARTS_OF(float)
LAB_PARTS_OF(half)
LAB_BFLOAT(bfloat frexp(bfloat, thread int&);)
LAB_BFLOAT(bfloat ldexp(bfloat, int);)

template <class T, int N>
T dot(LAB_V(N), LAB_V(N));
template <class T, int N>
T length(LAB_V(N));
template <class T, int N>
T length_squared(LAB_V(N));
template <class T, int N>
T distance(LAB_V(N), LAB_V(N));
template <class T, int N>
T distance_squared(LAB_V(N), LAB_V(N));
template <class T, int N>
vec<T, N> normalize(LAB_V(N));
template <class T>
vec<T, 3> cross(LAB_V(3), LAB_V(3));
template <class T, int N>
vec<T, N> faceforward(LAB_V(N), LAB_V(N), LAB_V(N));
template <class T, int N>
vec<T, N> reflect(LAB_V(N), LAB_V(N));
template <class T, int N>
vec<T, N> refract(LAB_V(N), LAB_V(N), LAB_S);

#define LAB_SHARED_NAMES                                                                                        \
    using metal::abs; using metal::clamp; using metal::cross; using metal::distance; using metal::distance_squared; \
    using metal::dot; using metal::faceforward; using metal::fma; using metal::fmax3; using metal::fmedian3;    \
    using metal::fmin3; using metal::frexp; using metal::ilogb; using metal::isfinite; using metal::isinf;      \
    using metal::isnan; using metal::isnormal; using metal::isordered; using metal::isunordered;                \
    using metal::ldexp; using metal::length; using metal::length_squared; using metal::max; using metal::max3;  \
    using metal::median3; using metal::min; using metal::min3; using metal::mix; using metal::modf;             \
    using metal::normalize; using metal::reflect; using metal::refract; using metal::signbit;                   \
    using metal::sincos; using metal::smoothstep; using metal::step;
namespace fast {
LAB_SHARED_NAMES
}
namespace precise {
LAB_SHARED_NAMES
}

}  // namespace metal
