"""Calls a CPU kernel through the C ABI of accel/kernel.h, without mlx: any strides, threads and ISA bits.

For the tests of plugins: ``call(library, "my_kernel", [Typed.of(x, "float16")], y, [bits])`` runs the kernel with a
thread pool that takes pieces of a loop from the back, and scratch memory full of NaN.
"""

from __future__ import annotations

import ctypes as c
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: mlx's dtype names and their numbers in the ABI.
DTYPES = {
    "bool": 0, "uint8": 1, "uint16": 2, "uint32": 3, "uint64": 4, "int8": 5, "int16": 6, "int32": 7, "int64": 8,
    "float16": 9, "float32": 10, "float64": 11, "bfloat16": 12,
}  # fmt: skip
AVX2, AVX512, AVX512_VBMI, AVX512_VNNI = 1 << 0, 1 << 1, 1 << 2, 1 << 3
AMX_INT8, AMX_BF16 = 1 << 6, 1 << 7
NEON = 1 << 16


class _Array(c.Structure):
    _fields_ = [
        ("data", c.c_void_p), ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)),
        ("size", c.c_int64), ("ndim", c.c_int32), ("dtype", c.c_int32),
    ]  # fmt: skip


class _Param(c.Union):
    _fields_ = [("i", c.c_int64), ("f", c.c_double)]


_TASK = c.CFUNCTYPE(None, c.c_void_p, c.c_int64, c.c_int64)
_PARALLEL_FOR = c.CFUNCTYPE(None, c.c_void_p, c.c_int64, c.c_int64, c.c_void_p, c.c_void_p)
_SCRATCH = c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.c_size_t)
_FAIL = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p)


class _Host(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32), ("abi_version", c.c_uint32),
        ("parallel_for", _PARALLEL_FOR), ("scratch", _SCRATCH), ("fail", _FAIL),
    ]  # fmt: skip


class _Call(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32), ("abi_version", c.c_uint32), ("host", c.POINTER(_Host)),
        ("inputs", c.POINTER(c.POINTER(_Array))), ("outputs", c.POINTER(c.POINTER(_Array))),
        ("n_inputs", c.c_int32), ("n_outputs", c.c_int32), ("params", c.POINTER(_Param)),
        ("n_params", c.c_int32), ("threads", c.c_int32), ("isa", c.c_uint64),
    ]  # fmt: skip


@dataclass
class Typed:
    """An array with an mlx dtype name; bfloat16 values are held as uint16."""

    raw: np.ndarray
    dtype: str

    @classmethod
    def of(cls, values: np.ndarray, dtype: str) -> Typed:
        """`values` rounded to `dtype` (to nearest, ties to even)."""
        if dtype != "bfloat16":
            with np.errstate(over="ignore"):
                return cls(np.ascontiguousarray(values, dtype=dtype), dtype)
        u = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
        return cls(np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values)), dtype)

    @classmethod
    def blank(cls, shape: tuple[int, ...], dtype: str) -> Typed:
        """For results: full of a number that no test expects."""
        return cls(np.full(shape, 7, np.uint16 if dtype == "bfloat16" else dtype), dtype)

    @property
    def values(self) -> np.ndarray:
        """The exact values; float16 and bfloat16 as float32."""
        if self.dtype not in ("float16", "bfloat16"):
            return self.raw
        if self.dtype != "bfloat16":
            return self.raw.astype(np.float32)
        return (self.raw.astype(np.uint32) << 16).view(np.float32)

    def view(self, change: Callable[[np.ndarray], np.ndarray]) -> Typed:
        """The same memory seen through a numpy view, e.g. ``lambda a: a[:, ::2]``."""
        return Typed(change(self.raw), self.dtype)


def _describe(a: Typed, keep: list) -> _Array:
    shape = (c.c_int64 * max(a.raw.ndim, 1))(*a.raw.shape)
    strides = (c.c_int64 * max(a.raw.ndim, 1))(*(s // a.raw.itemsize for s in a.raw.strides))
    keep += [shape, strides, a.raw]
    return _Array(a.raw.ctypes.data, shape, strides, a.raw.size, a.raw.ndim, DTYPES[a.dtype])


@functools.lru_cache
def _function(library: str, symbol: str):
    function = getattr(c.CDLL(library), symbol)
    function.restype = None
    return function


def call(
    library: str,
    symbol: str,
    inputs: Sequence[Typed],
    output: Typed | Sequence[Typed],
    params: Sequence[int | float],
    *,
    threads: int = 1,
    isa: int = 0,
) -> int:
    """Run the kernel; `output`, one or several, is written in place. Returns how many pieces of parallel loops ran.

    Raises ValueError with the kernel's message.
    """
    outputs = [output] if isinstance(output, Typed) else output
    keep: list = []
    messages: list[str] = []
    ran: list[int] = []

    @_PARALLEL_FOR
    def parallel_for(_call, n, grain, task, arg):
        work = _TASK(task)
        pieces = [(i, min(i + grain, n)) for i in range(0, n, grain)]
        ran.append(len(pieces))
        if threads == 1:
            for begin, end in pieces:
                work(arg, begin, end)
            return
        lock = threading.Lock()

        def drain():
            while True:
                with lock:
                    if not pieces:
                        return
                    begin, end = pieces.pop()  # back to front: order must not matter
                work(arg, begin, end)

        workers = [threading.Thread(target=drain) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    @_SCRATCH
    def scratch(_call, size):
        block = c.create_string_buffer(size + 64)
        keep.append(block)
        c.memset(block, 0xFF, size + 64)  # NaN, so that reading what was not written shows
        return (c.addressof(block) + 63) & ~63

    @_FAIL
    def fail(_call, message):
        messages.append(message.decode())

    host = _Host(c.sizeof(_Host), 1, parallel_for, scratch, fail)
    ins, outs = [_describe(a, keep) for a in inputs], [_describe(a, keep) for a in outputs]
    in_pointers = (c.POINTER(_Array) * len(ins))(*(c.pointer(a) for a in ins))
    out_pointers = (c.POINTER(_Array) * len(outs))(*(c.pointer(a) for a in outs))
    values = (_Param * max(len(params), 1))(*(_Param(f=p) if isinstance(p, float) else _Param(i=p) for p in params))
    record = _Call(
        c.sizeof(_Call), 1, c.pointer(host), in_pointers, out_pointers, len(ins), len(outs), values, len(params),
        threads, isa,
    )  # fmt: skip
    _function(str(library), symbol)(c.byref(record))
    if messages:
        raise ValueError(messages[0])
    return sum(ran)
