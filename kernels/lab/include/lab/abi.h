// What the kernel's translation unit, the runtime and Python share. No header of the C library is included
// here: kernel text would see its names (select, exp, ...).
#pragma once

// Two calls in two branches are two operations: the compiler must not make them one.
#if defined(__clang__)
#define LAB_CONVERGENT __attribute__((convergent, nomerge))
#else
#define LAB_CONVERGENT
#endif

extern "C" {

// One parameter of a kernel.
enum lab_param_kind { LAB_BUFFER = 0, LAB_THREADGROUP = 1, LAB_POSITION = 2 };
struct lab_param {
    int kind;
    int index;               // of [[buffer(i)]] or [[threadgroup(i)]]
    int read_only;           // the pointee is const
    unsigned pointee_bytes;  // 1 for void
    const unsigned char* (*padding)();  // per byte of the pointee whether it is padding; null: none is
};

struct lab_kernel_entry {
    const char* name;
    void (*run)();
    const lab_param* params;
    int param_count;
};

struct lab_function_constant {
    int index;
    const char* name;
    void* value;
    unsigned bytes;
    bool* defined;
};

// One table per shared object.
struct lab_module {
    const lab_kernel_entry* kernels;
    int kernel_count;
    const lab_function_constant* constants;
    int constant_count;
};
const lab_module* lab_get_module();

// Where the running lane is. Three values for the vectors of the Metal attributes.
struct lab_position {
    unsigned thread_position_in_grid[3];
    unsigned thread_position_in_threadgroup[3];
    unsigned threadgroup_position_in_grid[3];
    unsigned threads_per_threadgroup[3];
    unsigned dispatch_threads_per_threadgroup[3];
    unsigned threads_per_grid[3];
    unsigned threadgroups_per_grid[3];
    unsigned thread_index_in_threadgroup;
    unsigned thread_index_in_simdgroup;
    unsigned simdgroup_index_in_threadgroup;
    unsigned simdgroups_per_threadgroup;
    unsigned dispatch_simdgroups_per_threadgroup;
};
const lab_position* lab_where();

void* lab_bound_buffer(int index);
void* lab_bound_threadgroup(int index);

// Storage of a `threadgroup` variable, the same for all lanes of the group. `serial`: of its declaration in the text.
// `padding`: per byte of an element whether it is padding, or null.
void* lab_threadgroup_variable(const char* name, unsigned serial, unsigned long bytes, unsigned align,
                               const unsigned char* padding, unsigned element);

// Values that lanes of one SIMD group show each other. A board is valid until the lane's next SIMD operation.
struct lab_board {
    alignas(16) unsigned char data[32][64];
    alignas(16) unsigned char result[64];
    unsigned active;   // bit per lane that takes part
    unsigned present;  // bit per lane that exists (the last SIMD group of a group may be short)
    unsigned done;     // result is computed
};
enum lab_simd_op { LAB_SIMD_REDUCE, LAB_SIMD_SHUFFLE, LAB_SIMD_BALLOT, LAB_SIMD_MATRIX, LAB_SIMD_BARRIER, LAB_SIMD_ACTIVE };
enum { LAB_QUAD = 1 << 20 };  // or-ed to an operation that needs the lanes of its quad only
LAB_CONVERGENT lab_board* lab_simd(const void* value, unsigned bytes, int op);
// The same for an operation over whichever lanes come to it (by its line), for whom the others need not wait.
LAB_CONVERGENT lab_board* lab_simd_of_active(const void* value, unsigned bytes, int line);
void lab_read_inactive(unsigned lane);  // a shuffle took the value of a lane that does not take part

enum { LAB_MEM_NONE = 0, LAB_MEM_DEVICE = 1, LAB_MEM_THREADGROUP = 2, LAB_MEM_TEXTURE = 4 };
// The line only keeps two barriers from becoming one.
LAB_CONVERGENT void lab_simdgroup_barrier(int flags, int line);
LAB_CONVERGENT void lab_threadgroup_barrier(int flags, int line);

// A lane enters a loop in which lanes wait for each other, begins a round of it, leaves it.
void lab_loop_enter();
void lab_loop_round();
void lab_loop_leave();

LAB_CONVERGENT __attribute__((cold, leaf)) void lab_shift_overflow();          // a signed number was shifted out of its type
LAB_CONVERGENT __attribute__((cold, leaf)) void lab_index_beyond(long index);  // of a vector or an array<T, N>

enum lab_access_kind { LAB_READ, LAB_WRITE, LAB_ATOMIC_READ, LAB_ATOMIC_WRITE, LAB_ATOMIC_MODIFY };
void lab_atomic_access(const volatile void* address, unsigned bytes, int kind);
void lab_raw_copy(volatile void* to, const volatile void* from, unsigned bytes);  // not seen by the checks
}
