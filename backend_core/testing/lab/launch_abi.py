"""ctypes mirrors of the structures in kernels/lab/runtime/launch_abi.h and kernels/lab/include/lab/abi.h."""

from __future__ import annotations

import ctypes as c


class Param(c.Structure):
    """lab_param"""

    _fields_ = [
        ("kind", c.c_int), ("index", c.c_int), ("read_only", c.c_int), ("pointee_bytes", c.c_uint),
        ("padding", c.c_void_p),
    ]  # fmt: skip


class KernelEntry(c.Structure):
    """lab_kernel_entry"""

    _fields_ = [("name", c.c_char_p), ("run", c.c_void_p), ("params", c.POINTER(Param)), ("param_count", c.c_int)]


class FunctionConstant(c.Structure):
    """lab_function_constant"""

    _fields_ = [
        ("index", c.c_int), ("name", c.c_char_p), ("value", c.c_void_p), ("bytes", c.c_uint),
        ("defined", c.POINTER(c.c_bool)),
    ]  # fmt: skip


class Module(c.Structure):
    """lab_module"""

    _fields_ = [
        ("kernels", c.POINTER(KernelEntry)), ("kernel_count", c.c_int),
        ("constants", c.POINTER(FunctionConstant)), ("constant_count", c.c_int),
    ]  # fmt: skip


class Buffer(c.Structure):
    """lab_buffer"""

    _fields_ = [
        ("index", c.c_int32), ("itemsize", c.c_uint32), ("data", c.c_void_p), ("nbytes", c.c_uint64),
        ("initialised", c.c_uint32), ("read_only", c.c_uint32), ("skew", c.c_uint32),
        ("read_bytes", c.c_uint64), ("written_bytes", c.c_uint64),
        ("unique_read", c.c_uint64), ("unique_written", c.c_uint64),
        ("read_transactions", c.c_uint64), ("write_transactions", c.c_uint64), ("first_unwritten", c.c_int64),
        ("touched_lo", c.c_uint64), ("touched_hi", c.c_uint64),
    ]  # fmt: skip


class ThreadgroupArray(c.Structure):
    """lab_threadgroup_array"""

    _fields_ = [
        ("name", c.c_char * 64), ("nbytes", c.c_uint64), ("read_bytes", c.c_uint64), ("written_bytes", c.c_uint64),
    ]  # fmt: skip


class Fault(c.Structure):
    """lab_fault"""

    _fields_ = [
        ("kind", c.c_uint32), ("space", c.c_int32), ("buffer", c.c_int32), ("size", c.c_uint32),
        ("offset", c.c_int64), ("thread", c.c_uint32 * 3), ("other", c.c_uint32 * 3),
        ("write", c.c_uint32), ("other_write", c.c_uint32), ("count", c.c_uint64),
        ("pc", c.c_uint64), ("other_pc", c.c_uint64), ("stack", c.c_uint64 * 8), ("other_stack", c.c_uint64 * 8),
        ("value", c.c_uint64), ("file", c.c_char_p), ("line", c.c_uint32), ("column", c.c_uint32),
    ]  # fmt: skip


class Launch(c.Structure):
    """lab_launch"""

    _fields_ = [
        ("buffers", c.POINTER(Buffer)), ("buffer_count", c.c_int32), ("kernel", c.c_int32),
        ("threadgroup_bytes", c.POINTER(c.c_uint64)), ("threadgroup_count", c.c_int32),
        ("grid", c.c_uint32 * 3), ("threadgroup", c.c_uint32 * 3),
        ("groups", c.POINTER(c.c_uint32)), ("group_count", c.c_int64), ("timeout_s", c.c_double),
        ("faults", c.POINTER(Fault)), ("fault_capacity", c.c_int32), ("fault_count", c.c_int32),
        ("aborted", c.c_uint32), ("interrupted", c.c_uint32), ("arrays", ThreadgroupArray * 32),
        ("array_count", c.c_int32), ("threadgroup_total", c.c_uint64), ("threads", c.c_uint64),
    ]  # fmt: skip


#: lab_fault_kind, in its order.
FAULT_KINDS = (
    "out-of-bounds-read", "out-of-bounds-write", "write-to-input", "uninitialised-read", "race", "race-same-value",
    "barrier-divergence", "simd-divergence", "inactive-lane", "misaligned", "signed-overflow", "division-by-zero",
    "array-bounds", "crash", "timeout",
)  # fmt: skip
