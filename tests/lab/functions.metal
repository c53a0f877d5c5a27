// One kernel per family of functions; test_functions.py has the same in numpy.
#include <metal_stdlib>
using namespace metal;

kernel void reductions(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    float x = a[i];
    o[i] = simd_sum(x);
    o[i + 64] = simd_product(1.0f + x / 64.0f);
    o[i + 128] = simd_min(x);
    o[i + 192] = simd_max(x);
    o[i + 256] = simd_prefix_inclusive_sum(x);
    o[i + 320] = simd_prefix_exclusive_sum(x);
    o[i + 384] = simd_prefix_inclusive_product(1.0f + x / 64.0f);
    o[i + 448] = quad_sum(x);
    o[i + 512] = quad_max(x);
    o[i + 576] = float(simd_sum(half(x)));
    o[i + 640] = simd_sum(float2(x, 2 * x)).y;
}
kernel void bits(device const uint* a, device uint* o, uint i [[thread_position_in_grid]]) {
    uint x = a[i];
    o[i] = simd_and(x);
    o[i + 64] = simd_or(x);
    o[i + 128] = simd_xor(x);
    o[i + 192] = (uint)(ulong)simd_ballot(x & 1);
    o[i + 256] = simd_all(x > 0) | simd_any(x == 0) << 1 | simd_is_first() << 2 | simd_ballot(x > 0).all() << 3;
    o[i + 320] = popcount(x) | clz(x) << 8 | ctz(x) << 16;
    o[i + 384] = extract_bits(x, 5, 7);
    o[i + 448] = insert_bits(x, 0x55u, 8, 8);
    o[i + 512] = reverse_bits(x);
    o[i + 576] = rotate(x, 9u);
    o[i + 640] = mulhi(x, 0x12345678u);
    o[i + 704] = (uint)extract_bits((int)x, 3, 4);
}
kernel void shuffles(device const float* a, device float* o, uint i [[thread_position_in_grid]],
                     ushort lane [[thread_index_in_simdgroup]]) {
    float x = a[i];
    o[i] = simd_shuffle(x, 31 - lane);
    o[i + 64] = simd_shuffle_up(x, 3);
    o[i + 128] = simd_shuffle_down(x, 5);
    o[i + 192] = simd_shuffle_xor(x, 7);
    o[i + 256] = simd_broadcast(x, 9);
    o[i + 320] = simd_broadcast_first(x);
    o[i + 384] = simd_shuffle_and_fill_down(x, -x, 5);
    o[i + 448] = simd_shuffle_and_fill_up(x, -x, 5);
    o[i + 512] = simd_shuffle_rotate_down(x, 5);
    o[i + 576] = simd_shuffle_rotate_up(x, 5);
    o[i + 640] = quad_shuffle(x, 3 - lane % 4);
    o[i + 704] = quad_shuffle_xor(x, 1);
    o[i + 768] = quad_broadcast(x, 2);
    o[i + 832] = quad_shuffle_down(x, 1);
    o[i + 896] = quad_shuffle_up(x, 1);
    o[i + 960] = simd_shuffle_and_fill_down(x, -x, 3, 8);
}
template <typename T>
kernel void matrices(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device float* o [[buffer(2)]],
                     device T* t [[buffer(3)]], device float* e [[buffer(4)]],
                     uint lane [[thread_index_in_simdgroup]]) {
    simdgroup_matrix<T, 8, 8> x, y, z;
    simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(2.0f), product;
    simdgroup_load(x, a, 16, ulong2(8, 2));
    simdgroup_load(y, b, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, x, y, sum);
    simdgroup_store(sum, o);
    simdgroup_multiply(product, x, simdgroup_matrix<T, 8, 8>(T(3.0f)));
    simdgroup_store(product, o + 64, 8);
    simdgroup_load(z, a, 16);
    simdgroup_store(z, t, 8, ulong2(0, 0), true);
    e[lane * 2] = float(z.thread_elements()[0]);
    e[lane * 2 + 1] = float(z.thread_elements()[1]);
}
template [[host_name("matrices_half")]] [[kernel]] decltype(matrices<half>) matrices<half>;
template [[host_name("matrices_float")]] [[kernel]] decltype(matrices<float>) matrices<float>;
template [[host_name("matrices_bfloat")]] [[kernel]] decltype(matrices<bfloat>) matrices<bfloat>;

kernel void vectors(device const float4* a, device float* o, device packed_float3* p, device half4* h, device uchar4* c,
                    uint i [[thread_position_in_grid]]) {
    float4 v = a[i];
    v.xy = v.yx;
    v.z += 1;
    float2 low = v.xy, high = v.zw;
    float4 w = float4(low * 2, high).wzyx;
    o[i] = dot(v, w);
    p[i] = v.xyz;
    p[i].y += 0.5f;
    h[i] = half4(w);
    h[i].wx = half2(7, 8);
    c[i] = uchar4(uint4(clamp(w * 10.0f, 0.0f, 255.0f)));
    bool4 positive = v > 0.0f;
    o[i + 64] = select(-1.0f, 1.0f, any(positive)) + (all(positive) ? 10 : 0) + length(float2(3, 4)) + v[2];
    int3 q = int3(v.xyz) % 3 + (int3(1, 2, 3) << 1);
    o[i + 128] = q.x + 10 * q.y + 100 * q.z;
    o[i + 192] = as_type<float>(as_type<uint>(v.x) ^ 0x80000000u) + as_type<half2>(as_type<uint>(half2(1, 2))).y;
}
kernel void maths(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    float x = a[i];
    o[i] = exp(x);
    o[i + 64] = metal::fast::exp2(x);
    o[i + 128] = precise::log(fabs(x) + 1);
    o[i + 192] = rsqrt(x * x + 1);
    o[i + 256] = fma(x, x, -1.0f);
    o[i + 320] = clamp(x, -1.0f, 1.0f) + sign(x) + step(0.5f, x) + saturate(x) + mix(x, 2.0f, 0.25f);
    o[i + 384] = rint(x) + floor(x) * 100 + ceil(x) * 10000 + trunc(x) * 0.01f;
    o[i + 448] = max(min(x, 0.5f), -0.5f) + max3(x, 0.0f, 1.0f) + abs(x) + (float)abs((int)(x * 3));
    o[i + 512] = tanh(x);
    o[i + 576] = isnan(x * INFINITY - INFINITY) ? 1 : 0;
    o[i + 640] = float(half(x) * half(x) + 0.1h);
    o[i + 704] = float(bfloat(x) * bfloat(3.0f));
    o[i + 768] = float(exp(bfloat(x))) + numeric_limits<half>::max() + FLT_EPSILON;
    o[i + 832] = pow(fabs(x), 1.5f) + fmod(x, 0.75f) + copysign(2.0f, x) + atan2(x, 2.0f);
    o[i + 896] = float(ushort(half(2.5h))) + float(char(-3)) + float((long)1 << 40);
}
kernel void atomics(device atomic_uint* n, device atomic_int* lowest, device atomic<float>* sum, device uint* tickets,
                    uint i [[thread_position_in_grid]], uint l [[thread_position_in_threadgroup]]) {
    threadgroup atomic_uint local;
    if (l == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&local, i, memory_order_relaxed);
    tickets[i] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
    atomic_fetch_min_explicit(lowest, -(int)i, memory_order_relaxed);
    atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
    uint seen = 0;
    while (!atomic_compare_exchange_weak_explicit(n + 1, &seen, seen | 1u << (i % 32), memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l == 0) {
        atomic_fetch_max_explicit(n + 2, atomic_load_explicit(&local, memory_order_relaxed), memory_order_relaxed);
        atomic_exchange_explicit(n + 3, 5u, memory_order_relaxed);
    }
}
kernel void positions(device uint* o, uint3 grid [[thread_position_in_grid]],
                      uint3 local [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
                      ushort3 size [[threads_per_threadgroup]], uint3 full [[dispatch_threads_per_threadgroup]],
                      uint2 total [[threads_per_grid]], uint3 groups [[threadgroups_per_grid]],
                      uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]],
                      uint quad [[thread_index_in_quadgroup]], uint width [[threads_per_simdgroup]]) {
    device uint* row = o + ((grid.z * total.y + grid.y) * total.x + grid.x) * 24;
    uint v[24] = {grid.x,  grid.y,  grid.z,  local.x, local.y, local.z, group.x, group.y, group.z, size.x, size.y, size.z,
                  full.x,  full.y,  full.z,  total.x, total.y, groups.x, index,  lane,    simd,    simds,  quad,   width};
    for (int k = 0; k < 24; k++) row[k] = v[k];
}

constant int scale [[function_constant(3)]];
constant float offset [[function_constant(4)]];
constant bool has_offset [[function_constant(5)]];
constant int table[4] = {10, 20, 30, 40};
struct Params {
    int stride;
    float factor;
};
kernel void arguments(device const float* a [[buffer(0)]], constant Params& p [[buffer(1)]],
                      device float* o [[buffer(2)]], threadgroup float* shared [[threadgroup(0)]],
                      device const float* extra [[buffer(7), function_constant(has_offset)]],
                      uint i [[thread_position_in_threadgroup]]) {
    shared[i] = a[i * p.stride] * p.factor;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = shared[i ^ 1] * scale + table[i % 4];
    if (is_function_constant_defined(offset)) o[i] += offset;
    if (has_offset) o[i] += extra[0];
}
kernel void packing(device const float4* a, device uint* o, device float4* back, uint i [[thread_position_in_grid]]) {
    float4 v = a[i];
    o[i] = pack_float_to_unorm4x8(v);
    o[i + 64] = pack_float_to_snorm4x8(v);
    o[i + 128] = pack_half_to_unorm2x16(half2(v.xy));
    o[i + 192] = pack_float_to_snorm2x16(v.zw);
    back[i] = unpack_unorm4x8_to_float(o[i]);
    back[i + 64] = unpack_snorm4x8_to_float(o[i + 64]);
}
kernel void of_three(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    float x = a[i], y = a[(i + 7) % 64], z = a[(i + 11) % 64];
    o[i] = fmin3(x, y, z);
    o[i + 64] = fmax3(half(x), half(y), half(z));
    o[i + 128] = fmedian3(x, y, z);
    o[i + 192] = isunordered(x, NAN) + 2 * isordered(x, y) + 4 * isunordered(x, y);
    o[i + 256] = madhi(0x40000000u, uint(int(x) + 64), 3u) + madsat(0x40000000, 4, int(x)) % 1000;
    o[i + 320] = tanpi(x / 300) + float(M_PI_H) + precise::divide(x, 3.0f) + fast::divide(x, 3.0f);
}
kernel void quads(device const uint* a, device uint* o, uint i [[thread_position_in_grid]]) {
    uint x = a[i];
    quad_vote odd = quad_ballot(x & 1);
    o[i] = (quad_vote::vote_t)odd | odd.all() << 8 | odd.any() << 9 | quad_active_threads_mask().all() << 10;
    o[i + 64] = quad_prefix_inclusive_sum(x);
    o[i + 128] = quad_prefix_exclusive_sum(x);
    o[i + 192] = quad_prefix_inclusive_product(x);
    o[i + 256] = quad_prefix_exclusive_product(x);
    o[i + 320] = quad_shuffle_rotate_down(x, 3);
    o[i + 384] = quad_shuffle_rotate_up(x, 1);
    o[i + 448] = quad_shuffle_and_fill_down(x, x + 100, 3);
    o[i + 512] = quad_shuffle_and_fill_up(x, x + 100, 1);
    o[i + 576] = quad_shuffle_and_fill_down(x, x + 100, 1, 2);
    o[i + 640] = quad_shuffle_and_fill_up(x, x + 100, 1, 2);
}
kernel void quads_apart(device const uint* a, device uint* o, uint i [[thread_position_in_grid]]) {
    uint q = 0;
    if (i & 4) q = (uint)(quad_vote::vote_t)quad_ballot(a[i] & 1) + 16 * quad_prefix_inclusive_sum(1u);
    o[i] = q + 256 * quad_shuffle_and_fill_down(i, 99u, 2);
}
