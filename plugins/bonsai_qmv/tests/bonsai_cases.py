"""Random problems for the kernel, and the comparison with float64."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import numpy as np
from bonsai_qmv import plugin, reference

from backend_core.testing import cpu_kernels as h

FLOATS = ("float32", "float16", "bfloat16")


@functools.cache
def library() -> str:
    return str(plugin.library())


@functools.cache
def isas() -> dict[str, int]:
    """The instruction sets of this machine that the kernel has bodies for, by name."""
    from backend_core import native

    here = native.status().isa_names
    wide = h.AVX2 | h.AVX512
    known = {
        "portable": 0,
        "avx2": h.AVX2,
        "avx512": wide,
        "avx512_vnni": wide | h.AVX512_VNNI | h.AVX512_VBMI,
        "amx_int8": wide | h.AVX512_VNNI | h.AVX512_VBMI | h.AMX_INT8,
        "amx_bf16": wide | h.AVX512_VNNI | h.AVX512_VBMI | h.AMX_INT8 | h.AMX_BF16,
        "neon": h.NEON,
    }
    return {name: mask for name, mask in known.items() if name == "portable" or name in here}


def best() -> int:
    return list(isas().values())[-1]


def promote(*dtypes: str) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


@dataclass
class Case:
    """One product: x (rows, k), W (n, k), group by group; ``bias`` may be None."""

    x: h.Typed
    w: h.Typed
    scales: h.Typed
    biases: h.Typed
    bits: int
    group: int
    bias: h.Typed | None = None

    @classmethod
    def random(cls, seed, bits, group, rows, n, k, dtypes=("float32",) * 3, bias=False, center=0.0):
        """`center` is the mean of the biases in units of the scales: far from 0, weights cancel."""
        rng = np.random.default_rng(seed)
        x = h.Typed.of(rng.standard_normal((rows, k)), dtypes[0])
        w = h.Typed(reference.pack(rng.integers(0, 1 << bits, (n, k)), bits), "uint32")
        scales = h.Typed.of(rng.uniform(0.01, 0.1, (n, k // group)), dtypes[1])
        biases = h.Typed.of(rng.normal(center, 1, (n, k // group)) * 0.1, dtypes[2])
        extra = h.Typed.of(rng.standard_normal(n), dtypes[1]) if bias else None
        return cls(x, w, scales, biases, bits, group, extra)

    @property
    def out_dtype(self) -> str:
        extra = [self.bias.dtype] if self.bias else []
        return promote(self.x.dtype, self.scales.dtype, self.biases.dtype, *extra)

    def run(self, *, isa: int | None = None, threads: int = 1, x: h.Typed | None = None) -> h.Typed:
        x = x or self.x
        n = self.w.raw.shape[0]
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.out_dtype]
        y = h.Typed(np.full((*x.raw.shape[:-1], n), 7, kind), self.out_dtype)
        inputs = [x, self.w, self.scales, self.biases, *([self.bias] if self.bias else [])]
        isa = best() if isa is None else isa
        params = [self.bits, self.group, *self.facts(isa)]
        h.call(library(), plugin.SYMBOL, inputs, y, params, threads=threads, isa=isa)
        return y

    def facts(self, isa: int) -> list[int | float]:
        """What the plugin would say about the weights: [spread, symmetric, ratio, zeros]; nothing without VNNI."""
        if not isa & h.AVX512_VNNI or self.w.raw.shape[0] == 0:
            return []
        known = h.Typed(np.full(4, 7, np.float32), "float32")
        x = h.Typed(np.zeros((1, self.x.raw.shape[-1]), np.float32), "float32")
        h.call(library(), plugin.FACTS, [x, self.w, self.scales, self.biases], known, [self.bits, self.group], isa=isa)
        spread, symmetric, ratio, zeros = known.raw.tolist()
        return [spread, int(symmetric), ratio if symmetric else 0.0, zeros]

    def weights(self) -> np.ndarray:
        return reference.dequantize64(self.w.raw, self.scales.values, self.biases.values, self.bits)

    def check(self, y: h.Typed, x: h.Typed | None = None) -> None:
        """`y` against the bound of ``rounding``."""
        bias = self.bias.values if self.bias else None
        y64, allowed = reference.bound((x or self.x).values, self.weights(), self.out_dtype, bias)
        error = np.abs(y.values - y64) / allowed
        assert error.shape == y.values.shape
        assert error.size == 0 or error.max() <= 1.0, f"{error.max():.3g} times the bound at {error.argmax()}"


def seed_of(*parts: object) -> int:
    """The same for the same parts in every process."""
    import zlib

    return zlib.crc32(repr(parts).encode())


def page_end(a: np.ndarray):
    """A copy of `a` that ends right before a page that faults on any access; and the mapping, to be kept."""
    import ctypes
    import mmap

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
