"""Random attention problems for the kernel, and the comparison with float64."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cider_sdpa import plugin, reference

from backend_core.testing import cpu_kernels as h

FLOATS = ("float32", "float16", "bfloat16")
RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@functools.cache
def library() -> str:
    return str(plugin.library())


@functools.cache
def isas() -> dict[str, int]:
    """The instruction sets of this machine that the kernel has bodies for, by name."""
    from backend_core import native

    here = native.status().isa_names
    known = {"portable": 0, "avx2": h.AVX2, "avx512": h.AVX2 | h.AVX512, "neon": h.NEON}
    return {name: mask for name, mask in known.items() if name == "portable" or name in here}


def best() -> int:
    return list(isas().values())[-1]


def promote(*dtypes: str) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


@dataclass
class Case:
    """One call. mask: None, "causal" or an array; sinks: (Hq,) or None."""

    q: h.Typed
    k: h.Typed
    v: h.Typed
    scale: float
    mask: h.Typed | str | None = None
    sinks: h.Typed | None = None

    @classmethod
    def random(
        cls, seed, b, hq, hkv, rows, keys, d, dv=None, dtypes=("float32",) * 3, mask=None, sinks=False, spread=1.0
    ):  # fmt: skip
        """mask: as in the kernel, or "bool", "additive", "window", which make an array; `spread` widens the scores."""
        rng = np.random.default_rng(seed)
        dv = d if dv is None else dv
        q = h.Typed.of(rng.standard_normal((b, hq, rows, d)) * spread, dtypes[0])
        k = h.Typed.of(rng.standard_normal((b, hkv, keys, d)), dtypes[1])
        v = h.Typed.of(rng.standard_normal((b, hkv, keys, dv)), dtypes[2])
        made: Any = mask
        if mask == "bool":
            made = h.Typed(rng.random((b, 1, rows, keys)) < 0.6, "bool")
        elif mask == "window":
            i, j = np.arange(rows)[:, None] + keys - rows, np.arange(keys)
            made = h.Typed((j <= i) & (j > i - max(1, keys // 5)), "bool")
        elif mask == "additive":
            extra = rng.standard_normal((hq, rows, keys)) * 2
            extra[rng.random(extra.shape) < 0.2] = -np.inf
            made = h.Typed.of(extra, promote(*dtypes))
        s = h.Typed.of(rng.standard_normal(hq), promote(*dtypes)) if sinks else None
        return cls(q, k, v, float(d**-0.5), made, s)

    @property
    def out_dtype(self) -> str:
        return promote(self.q.dtype, self.k.dtype, self.v.dtype)

    def run(self, *, isa: int | None = None, threads: int = 1) -> h.Typed:
        shape = (*self.q.raw.shape[:3], self.v.raw.shape[3])
        y = h.Typed(np.full(shape, 7, RAW[self.out_dtype]), self.out_dtype)
        inputs = [self.q, self.k, self.v]
        kind = plugin.NO_MASK if self.mask is None else plugin.CAUSAL if isinstance(self.mask, str) else plugin.ARRAY
        if kind == plugin.ARRAY:
            inputs.append(self.mask)
        if self.sinks is not None:
            inputs.append(self.sinks)
        isa = best() if isa is None else isa
        params = [float(self.scale), kind, int(self.sinks is not None)]
        h.call(library(), plugin.SYMBOL, inputs, y, params, threads=threads, isa=isa)
        return y

    def change(self, **parts) -> Case:
        return replace(self, **parts)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        mask: Any = self.mask
        if isinstance(mask, h.Typed):
            mask = mask.raw if mask.dtype == "bool" else mask.values
        sinks = None if self.sinks is None else self.sinks.values
        return reference.bound(
            self.q.values, self.k.values, self.v.values, np.float32(self.scale), mask, sinks, self.out_dtype
        )

    def check(self, y: h.Typed) -> float:
        """`y` against the bound; NaN only where the reference has it. Returns the largest share of the bound."""
        y64, allowed = self.expected()
        assert np.array_equal(np.isnan(y.values), np.isnan(y64))
        with np.errstate(invalid="ignore"):
            error = np.where(np.isnan(y64) | (y.values == y64), 0.0, np.abs(y.values - y64) / allowed)
        assert error.shape == y.values.shape
        worst = float(error.max(initial=0.0))
        assert worst <= 1.0, f"{worst:.3g} times the bound at {np.unravel_index(error.argmax(), error.shape)}"
        return worst

    def row(self, i: int, keys: int | None = None) -> Case:
        """Row i alone, with the keys it sees if the mask is causal, else the first `keys`."""
        rows, n = self.q.raw.shape[2], self.k.raw.shape[2]
        keys = n if keys is None else keys
        mask: Any = self.mask
        if mask == "causal":
            keys = n - rows + i + 1
        elif isinstance(mask, h.Typed):
            mask = mask.view(lambda a: a[..., min(i, a.shape[-2] - 1) :, :][..., :1, :keys])
        return Case(
            self.q.view(lambda a: a[:, :, i : i + 1]),
            self.k.view(lambda a: a[:, :, :keys]),
            self.v.view(lambda a: a[:, :, :keys]),
            self.scale,
            mask,
            self.sinks,
        )


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
