/* accel/kernel.h: the C ABI between mlx-accel and a CPU kernel. ABI version 1.
 *
 * A CPU kernel is one C function in a plain shared library:
 *
 *     #include <accel/kernel.h>
 *     ACCEL_KERNEL void my_kernel(const accel_call* call) { ... }
 *
 * It sees arrays, parameters, the instruction set it may use and the host's thread pool, and nothing of
 * mlx, Python or the C++ ABI: a library built against this header keeps working when mlx, Python or
 * mlx-accel are upgraded.
 *
 * Rules of the ABI
 *   - Append-only. Structs grow at the end, enumerators and flag bits are never renumbered, and the host
 *     accepts every library whose ACCEL_ABI_VERSION is not newer than its own. `struct_size` tells a
 *     library how much of a struct an older host filled in.
 *   - Arrays are handed over as arrays of pointers, so that accel_array may grow too.
 *   - The host owns all memory. A kernel writes every element of every output, and nothing else. It is not
 *     called if all its outputs are empty.
 *   - An output to which an input was donated (a property of the call, see cpu_kernel) holds that input's elements
 *     when the kernel is entered; the kernel writes what changes there, and does not read that input, which may be
 *     the same memory.
 *   - A kernel may be entered from several threads at once, also with the same inputs. It keeps no
 *     mutable global state.
 *   - A kernel does not throw, longjmp or exit. What it cannot compute it reports with accel_fail().
 *   - The same inputs give the same bits whatever `threads` is: split the work by what is computed, never
 *     by how many threads there are.
 */
#ifndef ACCEL_KERNEL_H
#define ACCEL_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#define ACCEL_ABI_VERSION 1u

#if defined(_WIN32)
#define ACCEL_EXPORT __declspec(dllexport)
#else
#define ACCEL_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
#define ACCEL_EXTERN_C extern "C"
extern "C" {
#else
#define ACCEL_EXTERN_C
#endif

/* Marks a kernel: C linkage, visible in the shared library. */
#define ACCEL_KERNEL ACCEL_EXTERN_C ACCEL_EXPORT

enum accel_dtype {
  ACCEL_BOOL = 0,
  ACCEL_UINT8 = 1,
  ACCEL_UINT16 = 2,
  ACCEL_UINT32 = 3,
  ACCEL_UINT64 = 4,
  ACCEL_INT8 = 5,
  ACCEL_INT16 = 6,
  ACCEL_INT32 = 7,
  ACCEL_INT64 = 8,
  ACCEL_FLOAT16 = 9,
  ACCEL_FLOAT32 = 10,
  ACCEL_FLOAT64 = 11,
  ACCEL_BFLOAT16 = 12,
  ACCEL_COMPLEX64 = 13
};

/* What the processor offers and the user allows (MLX_ACCEL_ISA), one bit each. A kernel picks the best
 * body it has whose bits are all set; it always has a portable body for isa == 0. */
#define ACCEL_ISA_AVX2 (1ull << 0)        /* AVX2, FMA and F16C */
#define ACCEL_ISA_AVX512 (1ull << 1)      /* AVX-512 F, BW, DQ, VL (implies AVX2) */
#define ACCEL_ISA_AVX512_VBMI (1ull << 2)
#define ACCEL_ISA_AVX512_VNNI (1ull << 3)
#define ACCEL_ISA_AVX512_BF16 (1ull << 4)
#define ACCEL_ISA_AVX512_FP16 (1ull << 5)
#define ACCEL_ISA_AMX_INT8 (1ull << 6)
#define ACCEL_ISA_AMX_BF16 (1ull << 7)
#define ACCEL_ISA_NEON (1ull << 16)
#define ACCEL_ISA_NEON_FP16 (1ull << 17)
#define ACCEL_ISA_NEON_DOTPROD (1ull << 18)
#define ACCEL_ISA_NEON_I8MM (1ull << 19)

typedef struct accel_array {
  void* data;             /* first element; NULL only if size == 0 */
  const int64_t* shape;   /* ndim entries */
  const int64_t* strides; /* ndim entries, in elements; may be 0 (broadcast) or negative */
  int64_t size;           /* number of elements = product of shape */
  int32_t ndim;
  int32_t dtype;          /* enum accel_dtype */
} accel_array;

typedef union accel_param {
  int64_t i;
  double f;
} accel_param;

struct accel_call;

/* Does items [begin, end) of a parallel loop. */
typedef void (*accel_task)(void* arg, int64_t begin, int64_t end);

typedef struct accel_host {
  uint32_t struct_size;
  uint32_t abi_version;
  /* Runs task over [0, n) in pieces of `grain` items (the last may be shorter), on the pool's threads and
   * the caller's own; returns when all are done. Pieces start at multiples of grain whatever the number
   * of threads. Nested calls run on the calling thread. Before the caller's own tasks, another kernel may be entered
   * on its thread (the next one of a program): what belongs to a thread, as AMX tiles do, is set up inside tasks. */
  void (*parallel_for)(const struct accel_call* call, int64_t n, int64_t grain, accel_task task, void* arg);
  /* Uninitialised memory, 64-byte aligned, that lives until the kernel returns. Call it on the thread the
   * kernel was entered on, not inside a task. Repeated calls return distinct blocks. NULL: out of memory
   * (accel_fail has been called). */
  void* (*scratch)(const struct accel_call* call, size_t bytes);
  /* Reports that the outputs are not valid, from any thread; the first message of a call is kept (it is
   * copied). The host fills the outputs with NaN (floats) or zeros and raises the error where it next can. */
  void (*fail)(const struct accel_call* call, const char* message);
} accel_host;

typedef struct accel_call {
  uint32_t struct_size;
  uint32_t abi_version; /* of the host */
  const accel_host* host;
  const accel_array* const* inputs;
  accel_array* const* outputs; /* row-contiguous */
  int32_t n_inputs;
  int32_t n_outputs;
  const accel_param* params;
  int32_t n_params;
  int32_t threads; /* how many threads parallel_for may use, the caller's own included */
  uint64_t isa;    /* ACCEL_ISA_ bits */
} accel_call;

/* The version this library was built against, found by the host through the symbol's name. Weak, so that
 * several sources of one library may include the header. */
ACCEL_EXPORT __attribute__((weak)) uint32_t accel_library_abi_version(void);
__attribute__((weak)) uint32_t accel_library_abi_version(void) { return ACCEL_ABI_VERSION; }

static inline void accel_parallel_for(const accel_call* call, int64_t n, int64_t grain, accel_task task,
                                      void* arg) {
  call->host->parallel_for(call, n, grain, task, arg);
}
static inline void* accel_scratch(const accel_call* call, size_t bytes) { return call->host->scratch(call, bytes); }
static inline void accel_fail(const accel_call* call, const char* message) { call->host->fail(call, message); }
static inline int accel_has(const accel_call* call, uint64_t isa) { return (call->isa & isa) == isa; }

static inline size_t accel_itemsize(int32_t dtype) {
  switch (dtype) {
    case ACCEL_BOOL: case ACCEL_UINT8: case ACCEL_INT8: return 1;
    case ACCEL_UINT16: case ACCEL_INT16: case ACCEL_FLOAT16: case ACCEL_BFLOAT16: return 2;
    case ACCEL_UINT32: case ACCEL_INT32: case ACCEL_FLOAT32: return 4;
    default: return 8;
  }
}

/* 1 if elements lie in memory in row-major order without gaps. */
static inline int accel_is_row_contiguous(const accel_array* a) {
  int64_t expect = 1;
  for (int32_t i = a->ndim - 1; i >= 0; --i) {
    if (a->shape[i] != 1 && a->strides[i] != expect) return 0;
    expect *= a->shape[i];
  }
  return 1;
}

#ifdef __cplusplus
}
#endif
#endif /* ACCEL_KERNEL_H */
