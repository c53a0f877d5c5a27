// The structures that Python fills and reads (mirrored in backend_core/testing/lab/launch.py).
#pragma once

#include <cstdint>

extern "C" {

enum lab_fault_kind {
    FAULT_OUT_OF_BOUNDS_READ,
    FAULT_OUT_OF_BOUNDS_WRITE,
    FAULT_WRITE_TO_INPUT,
    FAULT_UNINITIALISED_READ,
    FAULT_RACE,
    FAULT_RACE_SAME_VALUE,
    FAULT_BARRIER_DIVERGENCE,
    FAULT_SIMD_DIVERGENCE,
    FAULT_INACTIVE_LANE,
    FAULT_MISALIGNED,
    FAULT_SIGNED_OVERFLOW,
    FAULT_DIVISION,
    FAULT_ARRAY_BOUNDS,
    FAULT_CRASH,
    FAULT_TIMEOUT,
};

struct lab_buffer {
    int32_t index;        // of [[buffer(i)]]
    uint32_t itemsize;
    void* data;           // copied in and, if writable, what was written copied out; null: zeros, not copied
    uint64_t nbytes;
    uint32_t initialised;  // false: reading what the kernel has not written is a fault
    uint32_t read_only;
    uint32_t skew;  // bytes from a multiple of 128 to where the buffer starts
    // results
    uint64_t read_bytes, written_bytes;
    uint64_t unique_read, unique_written;
    uint64_t read_transactions, write_transactions;
    int64_t first_unwritten;  // byte offset, or -1
    uint64_t touched_lo, touched_hi;  // from the first byte that was reached to behind the last; both 0 if none
};

struct lab_threadgroup_array {
    char name[64];
    uint64_t nbytes;
    uint64_t read_bytes, written_bytes;
};

struct lab_fault {
    uint32_t kind;
    int32_t space;       // 0: buffers[buffer], 1: threadgroup array, 2: no known memory
    int32_t buffer;
    uint32_t size;       // bytes of the access
    int64_t offset;      // bytes from the start of the buffer
    uint32_t thread[3];  // in the grid
    uint32_t other[3];
    uint32_t write, other_write;
    uint64_t count;
    uint64_t pc;         // offsets in the shared object, 0 if unknown
    uint64_t other_pc;
    uint64_t stack[8];   // callers of pc, innermost first
    uint64_t other_stack[8];
    uint64_t value;
    const char* file;    // when the compiler gave the place itself
    uint32_t line, column;
};

struct lab_launch {
    lab_buffer* buffers;
    int32_t buffer_count;
    int32_t kernel;
    const uint64_t* threadgroup_bytes;  // per [[threadgroup(i)]], 0 if unused
    int32_t threadgroup_count;
    uint32_t grid[3];         // threads
    uint32_t threadgroup[3];  // threads
    const uint32_t* groups;   // null: all; else group_count triples
    int64_t group_count;
    double timeout_s;
    // results
    lab_fault* faults;
    int32_t fault_capacity;
    int32_t fault_count;
    uint32_t aborted;
    uint32_t interrupted;  // by SIGINT
    lab_threadgroup_array arrays[32];  // the first ones
    int32_t array_count;
    uint64_t threadgroup_total;  // bytes of all
    uint64_t threads;
};

int lab_run(lab_launch* launch);
}
