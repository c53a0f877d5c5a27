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
// What is handed over by value is an access like others, whether the function is inlined or not.
struct Two {
    float a, b;
};
static float of_vector(float4 v) {
    return sin(v.x) + cos(v.y) * exp(v.z) + v.w;
}
__attribute__((noinline)) static float of_struct(Two t) {
    return sin(t.a) + cos(t.b);
}
static Two make(float x) {
    Two t;
    t.a = sin(x);
    t.b = cos(x) + exp(x);
    return t;
}
kernel void bad_vector_by_value(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = i < 17 ? of_vector(((device const float4*)a)[i]) : 0;  // out-of-bounds-read
}
kernel void good_vector_by_value(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = i < 16 ? of_vector(((device const float4*)a)[i]) : 0;
}
kernel void bad_struct_by_value(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = i < 33 ? of_struct(((device const Two*)a)[i]) : 0;  // out-of-bounds-read
}
kernel void bad_struct_returned(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    if (i == 0) ((device Two*)o)[32] = make(a[i]);  // out-of-bounds-write
}
kernel void bad_bfloat_by_value(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup bfloat s[64];
    s[i] = bfloat(1.0f);
    o[i] = exp(float(s[63 - i]));  // race
}
kernel void bad_vector_by_value_unwritten(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float4 s[64];
    o[i] = of_vector(s[i]);  // uninitialised-read
}

kernel void bad_another_array(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64], t[1024];
    s[i] = 1;
    for (uint k = 0; k < 16; k++) t[16 * i + k] = 2;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* p = s;
    o[i] = p[i + 512] + t[i];  // out-of-bounds-read
}
kernel void bad_another_array_far_away(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64], t[1024];
    s[i] = t[i] = o[i] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* p = t;
    o[i] = p[i - 0x4000000];  // out-of-bounds-read
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
#define ADD(n) atomic_fetch_add_explicit((threadgroup atomic_uint*)&n, 1u, memory_order_relaxed)
kernel void bad_atomic_after_its_start(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup uint n;
    if (i == 0) n = 0;
    ADD(n);  // race
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = n;
}
kernel void good_atomic_after_its_start(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup uint n;
    if (i == 0) n = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ADD(n);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = n;
}
kernel void bad_plain_read_of_the_last(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup uint n;
    if (i == 0) n = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint before = ADD(n);
    o[i] = before == 63 ? n : 0;  // race
}
kernel void good_atomic_read_of_the_last(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup atomic_uint n;
    if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint before = atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);
    o[i] = before == 63 ? atomic_load_explicit(&n, memory_order_relaxed) : 0;
}
kernel void bad_plain_read_of_the_first(device atomic_uint* n, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    if (i == 0) o[i] = ((device uint*)n)[0];
    atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);  // race
}
kernel void good_atomic_and_plain_of_one_lane(device atomic_uint* n, device float* o, uint i [[thread_position_in_grid]]) {
    o[i] = 0;
    if (i != 7) return;
    atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
    o[i] = ((device uint*)n)[0];
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
kernel void bad_simd_in_turn(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float r = 0;
    for (uint k = 0; k < 4; k++)
        if (k == i % 4) r = simd_sum(1.0f);  // simd-divergence
    o[i] = r;
}
kernel void bad_simd_in_turn_unrolled(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float r = 0;
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        if (k == i % 4) r = simd_sum(1.0f);  // simd-divergence
    }
    o[i] = r;
}
kernel void bad_simd_in_turn_of_two_loops(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float r = 0;
    uint k = 0;
    do {
        uint j = 0;
        while (j < 2) {
            if (2 * k + j == i % 4) r = simd_sum(1.0f);  // simd-divergence
            j++;
        }
    } while (++k < 2);
    o[i] = r;
}
kernel void good_simd_turns_of_simdgroups(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float r = 0;
    for (uint k = 0; k < 4; k++) {
        if (k == i / 32) r += simd_sum(1.0f);
        if (i % 32 == 3) continue;
        r += 1;
    }
    uint rest = i % 8;
    while (simd_any(rest > 0)) {
        for (uint j = 0; j < rest; j++) r += 1;  // as often as the lane likes
        if (rest) rest--;
    }
    if (i < 32)
        for (uint k = 0; k < 2; k++)
            for (uint j = 0; j <= k; j++) r += simd_max(r);
    else
        r = 1;
    do
        r += quad_sum(1.0f);
    while (simd_sum(r) < 0);
    o[i] = r;
}
kernel void bad_barrier_in_turn(device float* o, uint i [[thread_position_in_threadgroup]]) {
    for (uint k = 0; k < 2; k++)
        if (k == i / 32) threadgroup_barrier(mem_flags::mem_none);  // barrier-divergence
    o[i] = 1;
}
kernel void good_turns_before_a_barrier(device float* o, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    float r = 0;
    for (uint k = 0; k < 3; k++) {
        for (uint j = 0; j < i % 5; j++) r += j;
        s[i] = r;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        r = s[63 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    o[i] = r;
}
kernel void good_first_of_a_branch(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float r = 0;
    if (i & 1) {
        if (simd_is_first()) r = 1;
        r += simd_broadcast_first(r);
    } else {
        r = popcount(uint(ulong(simd_active_threads_mask())));
    }
    o[i] = r + simd_sum(r);
}
kernel void bad_all_of_a_branch(device float* o, uint i [[thread_position_in_threadgroup]]) {
    o[i] = 0;
    if ((i & 1) && simd_all(true)) o[i] = 1;  // simd-divergence
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
kernel void bad_shift(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    int row = n * 0x8000001 + int(i);
    o[i] = row << 4;  // signed-overflow
}
kernel void bad_shift_assigned(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    long row = n * 0x0800000100000000;
    row <<= i > 70 ? 1 : 4;  // signed-overflow
    o[i] = row;
}
kernel void good_shifts(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    constexpr int size = 1 << 3;
    float v[1 << 2] = {1, 2, 3, 4};
    int bits = (n * 127 << 24 ^ 1 << 31) + (-n << 4) + (int8_t(-n * 40) << 8);
    uint wraps = ((uint)n << 31) + (0xffffffffu << size);
    uint2 both = uint2(wraps, n) << 5;
    ushort small = 0xffff;
    small <<= 9;
    o[i] = bits + both.x + (both << uint2(1, 30)).y + small + v[i & 3] + ((long)n << 40);
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
kernel void bad_index_of_array(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    array<float, 4> v = {1, 2, 3, 4};
    o[i] = v[n + 1];
    o[i] = v[n + 2];  // array-bounds
}
kernel void bad_index_of_vector(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    float4 v = i;
    o[i] = v[n + 1];
    v[n + 2] = 1;  // array-bounds
    o[i] = v.x;
}
kernel void bad_index_of_three(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    float3 v = i;
    packed_float3 p = v;
    o[i] = v[n] + p[n];
    o[i] = v[n + 1];  // array-bounds
}
kernel void bad_index_of_member(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
    struct {
        float v[3];
    } s;
    s.v[0] = s.v[n] = 1;
    o[i] = s.v[n + 1];  // array-bounds
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
#define PART(v) { threadgroup float s[SIZE]; s[i] = v; threadgroup_barrier(mem_flags::mem_threadgroup); r += s[63 - i]; }
kernel void good_one_name_on_one_line(device float* o, uint i [[thread_position_in_threadgroup]]) {
    float r = 0;
#define SIZE 64
    PART(1) PART(2)
    o[i] = r;
}
kernel void bad_one_name_on_one_line(device float* o, uint i [[thread_position_in_threadgroup]]) {  // threadgroup-memory
    float r = 0;
#undef SIZE
#define SIZE 5000
    PART(1) PART(2)
    o[i] = r;
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
