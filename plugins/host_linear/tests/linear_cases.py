"""Random problems for the kernel, and the comparison with float64."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import zlib
from dataclasses import dataclass

import numpy as np
from host_linear import plugin, reference

from backend_core.testing import cpu_kernels as h

FLOATS = ("float32", "float16", "bfloat16")
MODES = ("mxfp4", "nvfp4", "mxfp8")
#: Every weight format: dense by dtype, or the mode.
FORMATS = (*FLOATS, *MODES)


@functools.cache
def library() -> str:
    return str(plugin.library())


@functools.cache
def isas() -> dict[str, int]:
    """The instruction sets of this machine that the kernel has bodies for, by name."""
    from backend_core import native

    here = native.status().isa_names
    known = {"portable": 0, "avx2": h.AVX2, "avx512": h.AVX2 | h.AVX512, "neon": h.NEON}
    known["amx_bf16"] = h.AVX2 | h.AVX512 | h.AMX_BF16
    return {name: mask for name, mask in known.items() if name == "portable" or name in here}


def best() -> int:
    return list(isas().values())[-1]


def promote(*dtypes: str) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def step_of(form: str) -> int:
    """What k must be a multiple of."""
    return 1 if form in FLOATS else reference.MODES[form][1]


@dataclass
class Case:
    """One product: x (rows, k), W (n, k) in the given format; ``bias`` may be None."""

    form: str
    x: h.Typed
    w: h.Typed
    scales: h.Typed | None = None
    bias: h.Typed | None = None

    @classmethod
    def random(cls, seed, form, rows, n, k, dtype="float32", bias=None):
        """`dtype` is that of x, `bias` None or that of the bias; k is rounded up to a whole group."""
        rng = np.random.default_rng(seed)
        k = -(-k // step_of(form)) * step_of(form)
        x = h.Typed.of(rng.standard_normal((rows, k)), dtype)
        extra = h.Typed.of(rng.standard_normal(n), bias) if bias else None
        if form in FLOATS:
            return cls(form, x, h.Typed.of(rng.standard_normal((n, k)) * 0.1, form), None, extra)
        bits, group = reference.MODES[form]
        codes = rng.integers(0, 1 << bits, (n, k))
        codes[(codes & 127) == 127] = 0  # no NaN
        low, high = (40, 70) if form == "nvfp4" else (120, 129)
        scales = rng.integers(low, high, (n, k // group)).astype(np.uint8)
        words = h.Typed(reference.pack(codes, bits), "uint32")
        return cls(form, x, words, h.Typed(scales, "uint8"), extra)

    @property
    def out_dtype(self) -> str:
        weight = [self.form] if self.form in FLOATS else []
        return promote(self.x.dtype, *weight, *([self.bias.dtype] if self.bias else []))

    def run(self, *, isa: int | None = None, threads: int = 1, x: h.Typed | None = None) -> h.Typed:
        x = x or self.x
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.out_dtype]
        y = h.Typed(np.full((*x.raw.shape[:-1], self.w.raw.shape[0]), 7, kind), self.out_dtype)
        inputs = [a for a in (x, self.w, self.scales, self.bias) if a is not None]
        number = plugin.FORMATS.get(self.form, 0)
        isa = best() if isa is None else isa
        h.call(library(), plugin.SYMBOL, inputs, y, [number], threads=threads, isa=isa)
        return y

    def weights(self) -> np.ndarray:
        if self.scales is None:
            return self.w.values.astype(np.float64)
        return reference.dequantize64(self.w.raw, self.scales.raw, self.form)

    def check(self, y: h.Typed, x: h.Typed | None = None) -> None:
        """`y` against the bound of ``rounding``."""
        bias = self.bias.values if self.bias else None
        y64, allowed = reference.bound((x or self.x).values, self.weights(), self.out_dtype, bias)
        error = np.abs(y.values - y64) / allowed
        assert error.shape == y.values.shape
        assert error.size == 0 or error.max() <= 1.0, f"{error.max():.3g} times the bound at {error.argmax()}"


def seed_of(*parts: object) -> int:
    """The same for the same parts in every process."""
    return zlib.crc32(repr(parts).encode())


def page_end(a: np.ndarray):
    """A copy of `a` that ends right before a page that faults on any access; and the mapping, to be kept."""
    size = os.sysconf("SC_PAGE_SIZE")
    pages = (a.nbytes + size - 1) // size
    memory = mmap.mmap(-1, (pages + 1) * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * size), ctypes.c_size_t(size), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(memory, a.dtype, a.size, pages * size - a.nbytes).reshape(a.shape)
    copy[...] = a
    return copy, memory
