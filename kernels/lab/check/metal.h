// Declarations of Metal's library for the type check: OpenCL C++ has Metal's address spaces as real types. Nothing
// is defined, since nothing is run.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;
typedef half float16_t;

#define is_function_constant_defined(x) true

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// Packed vectors are aligned like their elements.
template <class T, int N>
using packed_vec = T __attribute__((ext_vector_type(N), aligned(sizeof(T))));

template <class X>
struct lab_parts {
    static constexpr int count = 1;
    typedef X element;
};
template <class T, int N>
struct lab_parts<T __attribute__((ext_vector_type(N)))> {
    static constexpr int count = N;
    typedef T element;
};

template <bool Fits, class V>
struct lab_made {};
template <class V>
struct lab_made<true, V> {
    typedef V type;
};

// Stands for a constructor of a vector: one scalar, one vector of as many elements, or parts that fill it exactly.
template <class V, class A>
typename lab_made<lab_parts<A>::count == 1 || lab_parts<A>::count == lab_parts<V>::count, V>::type lab_make(A);
template <class V, class A, class B, class... C>
typename lab_made<((lab_parts<A>::count + lab_parts<B>::count) + ... + lab_parts<C>::count) == lab_parts<V>::count,
                  V>::type
lab_make(A, B, C...);
template <class V>
V lab_make();

}  // namespace metal

#define LAB_NAMES(T, name)                                                                          \
    typedef T name##2 __attribute__((ext_vector_type(2)));                                          \
    typedef T name##3 __attribute__((ext_vector_type(3)));                                          \
    typedef T name##4 __attribute__((ext_vector_type(4)));                                          \
    typedef T packed_##name##2 __attribute__((ext_vector_type(2), aligned(sizeof(T))));             \
    typedef T packed_##name##3 __attribute__((ext_vector_type(3), aligned(sizeof(T))));             \
    typedef T packed_##name##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
LAB_NAMES(char, char)
LAB_NAMES(uchar, uchar)
LAB_NAMES(short, short)
LAB_NAMES(ushort, ushort)
LAB_NAMES(int, int)
LAB_NAMES(uint, uint)
LAB_NAMES(long, long)
LAB_NAMES(ulong, ulong)
LAB_NAMES(half, half)
LAB_NAMES(bfloat, bfloat)
LAB_NAMES(float, float)
// A comparison gives integers here, not bools.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;
#undef LAB_NAMES

template <class To, class From>
To as_type(From);
template <class T>
__local T* lab_shared() {
    return 0;  // a body, since the type may have no name
}

namespace metal {
using ::as_type;

// A scalar stands for a vector of one value, as it becomes one by itself in Metal.
template <class T>
struct lab_same {
    typedef T type;
};
#define LAB_V(N) T __attribute__((ext_vector_type(N)))
#define LAB_S typename lab_same<T>::type
#define LAB_AS(R, name, ...)  \
    template <class T, int N> \
    R name(__VA_ARGS__);
#define LAB_V2_AS(R, name)               \
    LAB_AS(R, name, LAB_V(N), LAB_V(N))  \
    LAB_AS(R, name, LAB_V(N), LAB_S)     \
    LAB_AS(R, name, LAB_S, LAB_V(N))
#define LAB_V2(name) LAB_V2_AS(LAB_V(N), name)
#define LAB_V3_AS(R, name)                          \
    LAB_AS(R, name, LAB_V(N), LAB_V(N), LAB_V(N))   \
    LAB_AS(R, name, LAB_V(N), LAB_V(N), LAB_S)      \
    LAB_AS(R, name, LAB_V(N), LAB_S, LAB_V(N))      \
    LAB_AS(R, name, LAB_S, LAB_V(N), LAB_V(N))      \
    LAB_AS(R, name, LAB_V(N), LAB_S, LAB_S)         \
    LAB_AS(R, name, LAB_S, LAB_V(N), LAB_S)         \
    LAB_AS(R, name, LAB_S, LAB_S, LAB_V(N))
#define LAB_V3(name) LAB_V3_AS(LAB_V(N), name)

#define LAB_1(name)                       \
    float name(float);                    \
    half name(half);                      \
    LAB_BFLOAT(bfloat name(bfloat);)      \
    template <class T, int N>             \
    vec<T, N> name(T __attribute__((ext_vector_type(N))));
#define LAB_2(name)                            \
    float name(float, float);                  \
    half name(half, half);                     \
    LAB_BFLOAT(bfloat name(bfloat, bfloat);)   \
    LAB_V2(name)
#define LAB_3(name)                                    \
    float name(float, float, float);                   \
    half name(half, half, half);                       \
    LAB_BFLOAT(bfloat name(bfloat, bfloat, bfloat);)   \
    LAB_V3(name)
// A comparison gives integers here, not bools.
#define LAB_TEST(name)              \
    bool name(float);               \
    bool name(half);                \
    LAB_BFLOAT(bool name(bfloat);)  \
    template <class T, int N>       \
    vec<int, N> name(LAB_V(N));
// Metal itself has no mathematics for bfloat; mlx adds it in front of metal_kernel's text.
#ifdef LAB_WITH_MLX
#define LAB_BFLOAT(x) x
#else
#define LAB_BFLOAT(x)
#endif

#define LAB_ALL                                                                                                   \
    LAB_1(exp) LAB_1(exp2) LAB_1(exp10) LAB_1(log) LAB_1(log2) LAB_1(log10) LAB_1(sin) LAB_1(cos) LAB_1(tan)      \
    LAB_1(sinpi) LAB_1(cospi) LAB_1(tanpi) LAB_1(asin) LAB_1(acos) LAB_1(atan) LAB_1(sinh) LAB_1(cosh) LAB_1(tanh)             \
    LAB_1(asinh) LAB_1(acosh) LAB_1(atanh) LAB_1(sqrt) LAB_1(rsqrt) LAB_1(fabs) LAB_1(floor) LAB_1(ceil)          \
    LAB_1(trunc) LAB_1(rint) LAB_1(round) LAB_1(fract) LAB_1(sign) LAB_1(saturate) LAB_2(pow) LAB_2(powr)         \
    LAB_2(atan2) LAB_2(fmod) LAB_2(fmin) LAB_2(fmax) LAB_2(copysign) LAB_2(fdim) LAB_2(nextafter) \
    LAB_2(divide)
LAB_ALL
LAB_TEST(isnan) LAB_TEST(isinf) LAB_TEST(isfinite) LAB_TEST(isnormal) LAB_TEST(signbit)
namespace fast {
LAB_ALL
}
namespace precise {
LAB_ALL
}
LAB_3(fma)
LAB_3(fmin3)
LAB_3(fmax3)
LAB_3(fmedian3)
LAB_3(mad)
LAB_3(mix)
LAB_3(smoothstep)
LAB_2(step)

#define LAB_EACH(T, U)                                                                              \
    T min(T, T);                                                                                    \
    T max(T, T);                                                                                    \
    T clamp(T, T, T);                                                                               \
    T min3(T, T, T);                                                                                \
    T max3(T, T, T);                                                                                \
    T median3(T, T, T);                                                                             \
    T abs(T);
LAB_EACH(float, float)
LAB_EACH(half, half)
LAB_BFLOAT(LAB_EACH(bfloat, bfloat))
#define LAB_INTEGER(T, U)                     \
    LAB_EACH(T, U)                            \
    T popcount(T);                            \
    T clz(T);                                 \
    T ctz(T);                                 \
    T reverse_bits(T);                        \
    T rotate(T, T);                           \
    T extract_bits(T, uint, uint);            \
    T insert_bits(T, T, uint, uint);          \
    T mulhi(T, T);                            \
    T madhi(T, T, T);                         \
    T madsat(T, T, T);                        \
    T addsat(T, T);                           \
    T subsat(T, T);                           \
    U absdiff(T, T);                          \
    T hadd(T, T);                             \
    T rhadd(T, T);
LAB_INTEGER(char, uchar)
LAB_INTEGER(uchar, uchar)
LAB_INTEGER(short, ushort)
LAB_INTEGER(ushort, ushort)
LAB_INTEGER(int, uint)
LAB_INTEGER(uint, uint)
LAB_INTEGER(long, ulong)
LAB_INTEGER(ulong, ulong)
}  // namespace metal

#include "vectors.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
mem_flags operator&(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

struct simd_vote {
    typedef ulong vote_t;
    explicit simd_vote(vote_t v = 0);
    explicit operator vote_t() const;
    bool all() const;
    bool any() const;
};
struct quad_vote {
    typedef uint vote_t;
    explicit quad_vote(vote_t v = 0);
    explicit operator vote_t() const;
    bool all() const;
    bool any() const;
};
#define LAB_GROUP(name)      \
    template <class T>       \
    T simd_##name(T);        \
    template <class T>       \
    T quad_##name(T);
LAB_GROUP(sum) LAB_GROUP(product) LAB_GROUP(min) LAB_GROUP(max) LAB_GROUP(and) LAB_GROUP(or) LAB_GROUP(xor)
LAB_GROUP(broadcast_first) LAB_GROUP(prefix_inclusive_sum) LAB_GROUP(prefix_exclusive_sum)
LAB_GROUP(prefix_inclusive_product) LAB_GROUP(prefix_exclusive_product)
#define LAB_GROUP_LANE(name)        \
    template <class T>              \
    T simd_##name(T, ushort);       \
    template <class T>              \
    T quad_##name(T, ushort);
LAB_GROUP_LANE(shuffle) LAB_GROUP_LANE(broadcast) LAB_GROUP_LANE(shuffle_xor) LAB_GROUP_LANE(shuffle_up)
LAB_GROUP_LANE(shuffle_down) LAB_GROUP_LANE(shuffle_rotate_up) LAB_GROUP_LANE(shuffle_rotate_down)
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort, ushort = 32);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort, ushort = 32);
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
quad_vote quad_ballot(bool);
quad_vote quad_active_threads_mask();
template <class T>
T quad_shuffle_and_fill_up(T, T, ushort, ushort = 4);
template <class T>
T quad_shuffle_and_fill_down(T, T, ushort, ushort = 4);
bool quad_all(bool);
bool quad_any(bool);
bool quad_is_first();

template <class T>
struct lab_storage {
    typedef T type __attribute__((ext_vector_type(2)));
};
template <class T, int C, int R = C>
struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "a SIMD-group matrix has 8 columns and 8 rows");
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal);
    thread typename lab_storage<T>::type& thread_elements() const;
};
template <class T, int C, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define LAB_MATRIX(space)                                                                                       \
    template <class T, int C, int R>                                                                            \
    void simdgroup_load(thread simdgroup_matrix<T, C, R>&, const space T*, ulong = C, ulong2 = (ulong2)(0, 0),  \
                        bool = false);                                                                          \
    template <class T, int C, int R>                                                                            \
    void simdgroup_store(simdgroup_matrix<T, C, R>, space T*, ulong = C, ulong2 = (ulong2)(0, 0), bool = false);
LAB_MATRIX(device)
LAB_MATRIX(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
template <class T>
simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8>, simdgroup_matrix<T, 8, 8>);
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
template <class T>
struct atomic {
    T lab_value;
};
// OpenCL has types of these names; the check renames those in the kernel's text.
typedef atomic<int> metal_atomic_int;
typedef atomic<uint> metal_atomic_uint;
typedef atomic<bool> metal_atomic_bool;
typedef atomic<float> metal_atomic_float;
typedef atomic<ulong> metal_atomic_ulong;
#define LAB_ATOMIC(space)                                                                             \
    template <class T>                                                                                \
    T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                            \
    template <class T>                                                                                \
    void atomic_store_explicit(volatile space atomic<T>*, T, memory_order);                           \
    template <class T, class U>                                                                       \
    void atomic_store_explicit(volatile space atomic<T>*, U, memory_order);                           \
    template <class T, class U>                                                                       \
    T atomic_exchange_explicit(volatile space atomic<T>*, U, memory_order);                           \
    template <class T, class U>                                                                       \
    bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, thread T*, U, memory_order, memory_order);
#define LAB_ATOMIC_FETCH(space, name) \
    template <class T, class U>       \
    T atomic_fetch_##name##_explicit(volatile space atomic<T>*, U, memory_order);
LAB_ATOMIC(device)
LAB_ATOMIC(threadgroup)
#define LAB_FETCH(name)            \
    LAB_ATOMIC_FETCH(device, name) \
    LAB_ATOMIC_FETCH(threadgroup, name)
LAB_FETCH(add) LAB_FETCH(sub) LAB_FETCH(min) LAB_FETCH(max) LAB_FETCH(and) LAB_FETCH(or) LAB_FETCH(xor)
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);
#define LAB_PACK(N, BITS)                                            \
    uint pack_float_to_unorm##N##x##BITS(vec<float, N>);             \
    uint pack_float_to_snorm##N##x##BITS(vec<float, N>);             \
    uint pack_half_to_unorm##N##x##BITS(vec<half, N>);               \
    uint pack_half_to_snorm##N##x##BITS(vec<half, N>);               \
    vec<float, N> unpack_unorm##N##x##BITS##_to_float(uint);         \
    vec<float, N> unpack_snorm##N##x##BITS##_to_float(uint);         \
    vec<half, N> unpack_unorm##N##x##BITS##_to_half(uint);           \
    vec<half, N> unpack_snorm##N##x##BITS##_to_half(uint);
LAB_PACK(4, 8)
LAB_PACK(2, 16)

}  // namespace metal

#include "traits.h"

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.40282347e+38f
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-07f
#define HALF_MAX 65504.0h
#define M_PI_F 3.14159265358979323846f
#define M_PI_H 3.140625h
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define CHAR_BIT 8

#ifdef LAB_WITH_MLX
using namespace metal;
template <class Index = int64_t>
Index elem_to_loc(Index, constant const int*, constant const int64_t*, int);
int64_t elem_to_loc(uint, constant const int*, constant const int64_t*, int);
int64_t elem_to_loc(int, constant const int*, constant const int64_t*, int);
template <class T, class U>
T ceildiv(T, U);
#endif
