// Planted faults, each beside a near miss. In a `bad_` kernel the faulty line is marked with the kind expected.
#include <metal_stdlib>
using namespace metal;

// Out of bounds: one element beyond the end, and one before the start.
kernel void bad_read_beyond(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = a[i + 1];  // out-of-bounds-read
}
kernel void good_read_to_the_end(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = a[i + 1 < 64 ? i + 1 : i];
}
kernel void bad_read_before(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = a[int(i) - 1];  // out-of-bounds-read
}
kernel void bad_read_across_the_end(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    float4 v = *(device const packed_float4*)(a + min(i, 61u));  // out-of-bounds-read
    o[i] = v.x + v.y + v.z + v.w;
}
kernel void bad_read_far_away(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    o[i] = a[(ulong)i * 1000000007ul];  // out-of-bounds-read
}
kernel void bad_write_beyond(device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 1;
    if (i == 63) o[64] = 2;  // out-of-bounds-write
}
kernel void good_write_to_the_end(device float* o, uint i [[thread_position_in_grid]]) {
    if (i < 64) o[i] = 1;
}
kernel void bad_threadgroup_beyond(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    threadgroup float* p = s;
    p[i] = i;
    p[i + 1] = p[i];  // out-of-bounds-write
    o[i] = 0;
}
kernel void bad_null(device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    device float* none = 0;
    none[o[i] == 0 ? i : 0] = 1;  // out-of-bounds-write
}
kernel void bad_write_to_input(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    ((device float*)a)[i] = 1;  // write-to-input
}

// Memory that nobody has written.
kernel void bad_read_output(device float* o, uint i [[thread_position_in_grid]]) {
    o[i] += 1;  // uninitialised-read
}
kernel void good_read_output(device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 1;
    o[i] += 1;
}
kernel void bad_read_threadgroup(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    if (i < 63) s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = s[i];  // uninitialised-read
}
kernel void good_read_threadgroup(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    if (i < 63) s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = i < 63 ? s[i] : 0;
}
kernel void bad_threadgroup_of_the_last_group(device float* o, uint i [[thread_position_in_grid]],
                                              uint l [[thread_position_in_threadgroup]]) {
    threadgroup float s[32];
    if (i < 32) s[l] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = s[l];  // uninitialised-read
}
kernel void bad_output_left_out(device float* o, uint i [[thread_position_in_grid]]) {  // unwritten-output
    if (i != 17) o[i] = 1;
}

// Padding is nobody's to write; the fourth element of a vector is.
struct Padded {
    half a;
    float b;
};
kernel void good_padding(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float3 v[64];
    threadgroup Padded s[64];
    v[i].x = 1;
    v[i].y = 2;
    v[i].z = 3;
    s[i].a = i;
    s[i].b = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float3 copy = v[63 - i];
    Padded other = s[63 - i];
    o[i] = copy.x + copy.y + copy.z + other.a + other.b;
}
kernel void bad_vector_half_written(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float4 v[64];
    v[i].x = 1;
    v[i].y = 2;
    v[i].z = 3;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float4 copy = v[63 - i];  // uninitialised-read
    o[i] = copy.x + copy.w;
}

// Races in threadgroup memory.
kernel void bad_race(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = i;
    o[i] = s[i ^ 1];  // race
}
kernel void good_race(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = s[i ^ 1];
}
kernel void bad_race_wrong_flags(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = i;
    threadgroup_barrier(mem_flags::mem_device);
    o[i] = s[i ^ 1];  // race
}
kernel void bad_race_next_round(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    float sum = 0;
    for (int k = 0; k < 3; k++) {
        s[i] = i + k;  // race
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += s[63 - i];
    }
    o[i] = sum;
}
kernel void good_race_next_round(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    float sum = 0;
    for (int k = 0; k < 3; k++) {
        s[i] = i + k;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += s[63 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    o[i] = sum;
}
kernel void bad_race_across_simdgroups(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = i;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = s[63 - i];  // race
}
kernel void good_race_within_simdgroup(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = i;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = s[i ^ 31];
}
kernel void bad_race_lockstep(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = i;
    float t = simd_sum(1.0f);
    o[i] = t + s[i ^ 1];  // race
}
kernel void bad_race_many_readers(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    s[i] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = s[0];
    if (i == 63) s[0] = 2;  // race
}
kernel void bad_race_halves_overlap(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup half s[128];
    s[i * 2] = i;
    s[i * 2 + 1] = i;
    if (i == 5) *(threadgroup uint*)(s + 12) = 7;  // race
    o[i] = 0;
}
kernel void good_race_neighbouring_bytes(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup uchar s[64];
    s[i] = i;
    o[i] = s[i];
}

// Races in device memory.
kernel void bad_device_race(device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 1;
    o[i / 2] = i;  // race
}
kernel void bad_device_race_of_groups(device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0.5f;
    threadgroup_barrier(mem_flags::mem_device);
    o[63 - i] = i;  // race
}
kernel void good_device_barrier(device float* o, uint i [[thread_position_in_threadgroup]]) {
    o[i] = 1;
    threadgroup_barrier(mem_flags::mem_device);
    o[63 - i] = i;
}
kernel void bad_atomic_and_plain(device atomic_uint* n, device float* o, uint i [[thread_position_in_grid]]) {
    atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
    o[i] = ((device uint*)n)[0];  // race
}
kernel void good_atomic(device atomic_uint* n, device float* o, uint i [[thread_position_in_grid]]) {
    atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
    o[i] = atomic_load_explicit(n, memory_order_relaxed) > 0;
}
kernel void bad_same_value(device float* o, uint i [[thread_position_in_grid]]) {
    o[i & ~1u] = 3;  // race-same-value
    o[i | 1u] = 3;
}

// Divergence.
kernel void bad_barrier_in_branch(device float* o, uint i [[thread_position_in_threadgroup]]) {
    if (i < 40) threadgroup_barrier(mem_flags::mem_none);  // barrier-divergence
    o[i] = 1;
}
kernel void bad_barrier_after_return(device float* o, uint i [[thread_position_in_threadgroup]]) {
    o[i] = 1;
    if (i >= 32) return;
    threadgroup_barrier(mem_flags::mem_none);  // barrier-divergence
}
kernel void bad_two_barriers(device float* o, uint i [[thread_position_in_threadgroup]]) {
    if (i < 32) {
        threadgroup_barrier(mem_flags::mem_none);  // barrier-divergence
    } else {
        threadgroup_barrier(mem_flags::mem_none);
    }
    o[i] = 1;
}
kernel void good_barrier_in_uniform_branch(device float* o, constant int& n, uint i [[thread_position_in_threadgroup]]) {
    if (n > 0) threadgroup_barrier(mem_flags::mem_none);
    for (int k = 0; k < n; k++) threadgroup_barrier(mem_flags::mem_none);
    o[i] = 1;
}
kernel void bad_simd_in_branch(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = i;
    if (i % 32 < 16) s = simd_sum(s);  // simd-divergence
    o[i] = s;
}
kernel void good_simd_in_branch_of_simdgroup(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = i;
    if (i < 32) s = simd_sum(s);
    o[i] = s;
}
kernel void bad_simd_against_barrier(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = i;
    if (i % 32 == 3) s = simd_max(s);  // simd-divergence
    threadgroup_barrier(mem_flags::mem_none);
    o[i] = s;
}
kernel void bad_simd_twice(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s;
    if (i % 2) {
        s = simd_sum(1.0f);  // simd-divergence
    } else {
        s = simd_sum(2.0f);
    }
    o[i] = s;
}
kernel void good_quads_apart(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = i;
    if (i / 4 % 2) s = quad_sum(s);
    if (i / 4 % 3) {
        s = quad_max(s);
    } else {
        s += quad_shuffle_xor(s, 1);
    }
    o[i] = simd_sum(s);
}
kernel void bad_quad_divided(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = i;
    if (i % 4 != 2) s = quad_sum(s);  // simd-divergence
    o[i] = s;
}
static float total(float x) {
    return simd_sum(x);
}
kernel void bad_simd_in_function(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s;
    if (i % 2) {
        s = total(1.0f);  // simd-divergence
    } else {
        s = total(2.0f);
    }
    o[i] = s;
}
kernel void bad_simd_uneven_loop(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = 0;
    for (uint k = 0; k < i % 32; k++) {
        s += simd_sum(1.0f);  // simd-divergence
    }
    o[i] = s;
}
kernel void good_simd_even_loop(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float s = 0;
    for (uint k = i % 32; k < 96; k += 32) s += simd_sum(1.0f);
    o[i] = s;
}
kernel void bad_shuffle_from_nobody(device float* o, uint i [[thread_position_in_threadgroup]]) {
    o[i] = simd_shuffle(float(i), 40);  // inactive-lane
}
kernel void good_shuffle_down(device float* o, uint i [[thread_position_in_threadgroup]]) {
    o[i] = simd_shuffle_down(float(i), 16);
}

// Alignment, overflow, division, local arrays.
kernel void bad_alignment(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    if (i == 1) o[i] = (*(device const float2*)(a + i)).y;  // misaligned
}
kernel void bad_wide_alignment(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    if (i == 2) o[i] = (*(device const float4*)(a + i)).y;  // misaligned
}
kernel void bad_threadgroup_alignment(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup half s[132];
    s[i] = s[i + 64] = 1;
    if (i < 4) s[i + 128] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = (*(threadgroup half4*)(s + 2 * (i / 2))).y;  // misaligned
}
kernel void good_alignment(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = (*(device const float4*)(a + i / 4 * 4)).y + (*(device const packed_float2*)(a + i / 2)).y;
}
kernel void bad_overflow(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    int at = n * 0x2000000 * (int)i;  // signed-overflow
    o[i] = at;
}
kernel void good_overflow(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    long at = (long)n * 65536 * i;
    uint wraps = (uint)n * 0x10000000u;
    o[i] = at + wraps;
}
kernel void bad_division(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    o[i] = i;
    o[i] = (int)i / (n - 2);  // division-by-zero
}
kernel void bad_local_array(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    float v[4] = {1, 2, 3, 4};
    o[i] = v[n + 1];
    o[i] = v[n + 2];  // array-bounds
}
kernel void bad_row_of_matrix(device float* o, constant int& n, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float m[4][8];
    if (i < 32) m[i / 8][i % 8] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = m[n - 2][n + 6];  // array-bounds
}

// Sizes.
kernel void bad_threadgroup_memory(device float* o, uint i [[thread_position_in_threadgroup]]) {  // threadgroup-memory
    threadgroup float a[8192];
    threadgroup float b;
    a[i] = 1;
    if (i == 0) b = 1;
    o[i] = a[i];
}
kernel void good_threadgroup_memory(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float a[8188];
    threadgroup float b;
    a[i] = 1;
    if (i == 0) b = 1;
    o[i] = a[i];
}
#define MANY(n) threadgroup float n##0[256], n##1[256], n##2[256], n##3[256], n##4[256], n##5[256], n##6[256], n##7[256]
kernel void good_declarations(device float* o, uint i [[thread_position_in_threadgroup]]) {
    alignas(16) threadgroup float a[64];
    volatile threadgroup float b[64], c[64];
    threadgroup alignas(8) volatile float d[64];
    threadgroup union {
        float f[64];
        uint u[64];
    } e;
    threadgroup struct Local {
        float f;
    } g[64];
    a[i] = b[i] = c[i] = d[i] = e.f[i] = g[i].f = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint k = 63 - i;
    o[i] = a[k] + b[k] + c[k] + d[k] + e.f[k] + g[k].f;
}
kernel void bad_race_in_union(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup union {
        float f[64];
        uint u[64];
    } e;
    e.f[i] = i;
    o[i] = e.u[i ^ 1];  // race
}
kernel void bad_many_variables(device float* o, uint i [[thread_position_in_threadgroup]]) {  // threadgroup-memory
    MANY(a);
    MANY(b);
    MANY(c);
    MANY(d);
    threadgroup float last;
    if (i == 0) last = 1;
    o[i] = i;
}
kernel void good_small_variables(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float a[8190];
    threadgroup half b, c, d, e;  // 32768 bytes with them: variables lie as close as their types allow
    a[i] = 1;
    if (i == 0) b = c = d = e = 1;
    o[i] = a[i];
}
kernel void bad_endless_without_memory(device float* o, uint i [[thread_position_in_grid]]) {  // timeout
    uint k = i | 1;
    while (k != 0) k = k * 3 + 2 * (k & 1);
    o[i] = k;
}
kernel void bad_endless(device float* o, uint i [[thread_position_in_grid]]) {  // timeout
    o[i] = 1;
    while (o[i] > 0) o[i] = 1;
}
kernel void bad_endless_simd(device float* o, uint i [[thread_position_in_grid]]) {  // timeout
    float s = 1;
    while (s > 0) s = simd_max(s);
    o[i] = s;
}
static float down(device float* o, int n) {
    volatile float big[512];
    big[n & 511] = n;
    return n == 0 ? 0 : down(o, n + 1) + big[n & 511];
}
kernel void bad_recursion(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    o[i] = down(o, n);  // crash
}
