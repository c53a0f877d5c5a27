// Metal's names on CUDA, for kernels written in the dialect of docs/simt.md.
//
// Sections begin with "//: words" and are taken into a kernel's text where one of the words occurs in it, since mlx
// copies and hashes the whole text at every call. The first section is always taken. mlx puts its own header before
// this text: cuda_fp16.h, cuda_bf16.h and cooperative_groups.h are there.

#define METAL_FUNC __device__ __forceinline__
#define bfloat __nv_bfloat16
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

//: as_type
template <typename To, typename From>
METAL_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type of another size");
  To to;
  memcpy(&to, &value, sizeof(to));
  return to;
}

//: INFINITY
// A compiler without the host's headers does not have it.
#ifndef INFINITY
#define INFINITY as_type<float>(0x7f800000u)
#endif

//: simd_sum
METAL_FUNC float simd_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
  return v;
}

//: simd_max
METAL_FUNC float simd_max(float v) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, i));
  return v;
}

//: simd_shuffle
template <typename T>
METAL_FUNC T simd_shuffle(T v, ushort lane) {
  return __shfl_sync(0xffffffffu, v, lane);
}

//: simd_shuffle_xor
template <typename T>
METAL_FUNC T simd_shuffle_xor(T v, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}

//: simd_shuffle_down
// As in Metal, what comes from beyond the last lane is undefined.
template <typename T>
METAL_FUNC T simd_shuffle_down(T v, ushort delta) {
  return __shfl_down_sync(0xffffffffu, v, delta);
}

//: threadgroup_barrier simdgroup_barrier mem_flags
namespace mem_flags {
enum flags { mem_none, mem_threadgroup, mem_device };
}
METAL_FUNC void threadgroup_barrier(mem_flags::flags) {
  __syncthreads();
}
METAL_FUNC void simdgroup_barrier(mem_flags::flags) {
  __syncwarp();
}

//: aligned
template <typename P>
METAL_FUNC bool aligned(P pointer) {
  return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

//: bits_of
METAL_FUNC uint bits_of(uint v) {
  return v;
}
METAL_FUNC uint bits_of(float v) {
  return as_type<uint>(v);
}
METAL_FUNC uint bits_of(half v) {
  return as_type<ushort>(v);
}
METAL_FUNC uint bits_of(bfloat v) {
  return as_type<ushort>(v);
}

//: low_value
template <typename T>
METAL_FUNC float low_value(uint v) {
  return __low2float(as_type<__half2>(v));
}
template <>
METAL_FUNC float low_value<bfloat>(uint v) {
  return as_type<float>(v << 16);
}

//: high_value
template <typename T>
METAL_FUNC float high_value(uint v) {
  return __high2float(as_type<__half2>(v));
}
template <>
METAL_FUNC float high_value<bfloat>(uint v) {
  return as_type<float>(v & 0xffff0000u);
}

//: join_low join_high
METAL_FUNC uint join_low(uint a, uint b) {
  return __byte_perm(a, b, 0x5410);
}
METAL_FUNC uint join_high(uint a, uint b) {
  return __byte_perm(a, b, 0x7632);
}

//: join_even_bytes join_odd_bytes
METAL_FUNC uint join_even_bytes(uint a, uint b) {
  return __byte_perm(a, b, 0x6240);
}
METAL_FUNC uint join_odd_bytes(uint a, uint b) {
  return __byte_perm(a, b, 0x7351);
}

//: max_halves
METAL_FUNC uint max_halves(uint a, uint b) {
  return __vmaxu2(a, b);
}

//: pair_least_size pair_sum
template <typename T>
METAL_FUNC uint pair_least_size(uint a, uint b) {
  return as_type<uint>(__hmin2(__habs2(as_type<__half2>(a)), as_type<__half2>(b)));
}
template <>
METAL_FUNC uint pair_least_size<bfloat>(uint a, uint b) {
  return as_type<uint>(__hmin2(__habs2(as_type<__nv_bfloat162>(a)), as_type<__nv_bfloat162>(b)));
}
template <typename T>
METAL_FUNC uint pair_sum(uint a, uint b) {
  return as_type<uint>(__hadd2(as_type<__half2>(a), as_type<__half2>(b)));
}
template <>
METAL_FUNC uint pair_sum<bfloat>(uint a, uint b) {
  return as_type<uint>(__hadd2(as_type<__nv_bfloat162>(a), as_type<__nv_bfloat162>(b)));
}

//: mask_or
// One instruction; from the plain expression the compiler makes two where both operands are constants.
METAL_FUNC uint mask_or(uint v, uint mask, uint bits) {
  uint r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}

//: mask_select
// Likewise.
METAL_FUNC uint mask_select(uint a, uint b, uint mask) {
  uint r;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
  return r;
}

//: bf16_pair_fma
METAL_FUNC uint bf16_pair_fma(uint v, float k, float c) {
  const __nv_bfloat162 r =
      __hfma2(as_type<__nv_bfloat162>(v), __float2bfloat162_rn(k), __float2bfloat162_rn(c));
  return as_type<uint>(r);
}

//: bf16_pair_mul
METAL_FUNC uint bf16_pair_mul(uint v, uint k) {
  return as_type<uint>(__hmul2(as_type<__nv_bfloat162>(v), as_type<__nv_bfloat162>(k)));
}

//: f16_pair_fma f16_pair_mul
METAL_FUNC uint f16_pair_fma(uint v, float k, float c) {
  return as_type<uint>(__hfma2(as_type<__half2>(v), __float2half2_rn(k), __float2half2_rn(c)));
}
METAL_FUNC uint f16_pair_mul(uint v, uint k) {
  return as_type<uint>(__hmul2(as_type<__half2>(v), as_type<__half2>(k)));
}

//: f16_pair_fused
METAL_FUNC uint f16_pair_fused(uint a, uint b, uint c) {
  return as_type<uint>(__hfma2(as_type<__half2>(a), as_type<__half2>(b), as_type<__half2>(c)));
}

//: mma_16x8x16
template <typename T>
METAL_FUNC void mma_16x8x16(float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
METAL_FUNC void mma_16x8x16<bfloat>(float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

//: mma_16x8x16_first
template <typename T>
METAL_FUNC void mma_16x8x16_first(float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
template <>
METAL_FUNC void mma_16x8x16_first<bfloat>(float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

//: mma_bits_first
METAL_FUNC void mma_bits_first(int* d, uint a0, uint a1, uint b, uint start, ushort) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(start));
}

//: mma_bytes
METAL_FUNC void mma_bytes(int* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, ushort) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
METAL_FUNC void mma_bytes(int* d, uint a0, uint a1, uint b, ushort) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

//: even_bytes bytes_as_halves
METAL_FUNC uint even_bytes(uint a, uint b) {
  return __byte_perm(a, b, 0x6420);
}
METAL_FUNC uint bytes_as_halves(uint w, bool upper) {
  return __byte_perm(w, 0x65u, upper ? 0x4342u : 0x4140u);
}

//: popcount
METAL_FUNC uint popcount(uint v) {
  return __popc(v);
}

//: copy_words copies_end copies_wait
template <int COUNT, typename T>
METAL_FUNC void copy_words(uint* to, const T* from) {
  const uint at = uint(__cvta_generic_to_shared(to));
  if (COUNT == 4) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(at), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(at), "l"(from), "n"(COUNT * 4) : "memory");
  }
}
METAL_FUNC void copies_end() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
template <int LEFT>
METAL_FUNC void copies_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
}

//: load_words
template <int COUNT, bool VECTORS, typename T>
METAL_FUNC void load_words(uint* to, const T* from) {
  if (VECTORS && COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from) + i);
      to[4 * i] = v.x;
      to[4 * i + 1] = v.y;
      to[4 * i + 2] = v.z;
      to[4 * i + 3] = v.w;
    }
  } else if (VECTORS && COUNT % 2 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from) + i);
      to[2 * i] = v.x;
      to[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (sizeof(T) == 2 && !VECTORS) {
        const ushort* halves = reinterpret_cast<const ushort*>(from);
        to[i] = __ldg(halves + 2 * i) | (uint(__ldg(halves + 2 * i + 1)) << 16);
      } else {
        to[i] = __ldg(reinterpret_cast<const uint*>(from) + i);
      }
    }
  }
}

//: load_words_first
// The compiler would move a plain load behind other memory traffic, to where its values are used.
template <int COUNT, bool VECTORS, typename T>
METAL_FUNC void load_words_first(uint* to, const T* from) {
  if (VECTORS && COUNT == 1) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(*to) : "l"(from) : "memory");
  } else if (VECTORS) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "l"(reinterpret_cast<const uint*>(from) + i)
                   : "memory");
    }
  } else {
    load_words<COUNT, false>(to, from);
  }
}

//: stream_words
template <int COUNT, bool VECTORS, typename T>
METAL_FUNC void stream_words(uint* to, const T* from) {
  static_assert(sizeof(T) == 4, "stream_words takes elements of four bytes");
  if (VECTORS && COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "l"(from + i));
    }
  } else if (VECTORS && COUNT % 2 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                   : "=r"(to[i]), "=r"(to[i + 1])
                   : "l"(from + i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(to[i]) : "l"(from + i));
    }
  }
}
