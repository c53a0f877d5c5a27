"""Random problems for every kernel, and the comparison with float64."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from host_ops import reference as ref
from host_ops.library import library

from backend_core.testing import cpu_kernels as h

FLOATS = ("float32", "float16", "bfloat16")
EPS = 1e-5
CAP = 30.0


@functools.cache
def isas() -> dict[str, int]:
    """The instruction sets of this machine that the kernels have bodies for, by name."""
    from backend_core import native

    here = native.status().isa_names
    known = {"portable": 0, "avx2": h.AVX2, "avx512": h.AVX2 | h.AVX512, "neon": h.NEON}
    return {name: mask for name, mask in known.items() if name == "portable" or name in here}


def best() -> int:
    return list(isas().values())[-1]


def promote(*dtypes: str) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def seed_of(*parts: object) -> int:
    """The same for the same parts in every process."""
    return zlib.crc32(repr(parts).encode())


@dataclass
class Op:
    """A kernel whose inputs are `arrays` arrays of one shape (..., n) and `vectors` vectors (n,).

    expect(array values, vector values, dtype) gives the references of all outputs.
    """

    symbol: str
    arrays: int
    vectors: int
    expect: Callable[[list[np.ndarray], list[np.ndarray], list[str]], list]
    params: list[int | float] = field(default_factory=list)
    outputs: int = 1
    last: int | None = -1  # length of the last dimension of results; -1: that of inputs; None: there is none
    index: bool = False


def _rms(arrays, vectors, dtypes):
    return [ref.rms_norm(arrays[0], vectors[0] if vectors else None, EPS, dtypes[0])]


def _residual_rms(arrays, vectors, dtypes):
    total = ref.residual(*arrays, dtypes[0])
    rounded = h.Typed.of(np.asarray(arrays[0] + arrays[1], np.float32), dtypes[0]).values
    return [total, ref.rms_norm(rounded, vectors[0] if vectors else None, EPS, dtypes[1])]


def _layer(weight, bias):
    def expect(arrays, vectors, dtypes):
        w = vectors[0] if weight else None
        return [ref.layer_norm(arrays[0], w, vectors[-1] if bias else None, EPS, dtypes[0])]

    return Op("layer_norm", 1, weight + bias, expect, [EPS, weight, bias])


def _gated(function):
    return lambda arrays, vectors, dtypes: [function(arrays[0], dtypes[0], arrays[1])]


def _plain(function):
    return lambda arrays, vectors, dtypes: [function(arrays[0], dtypes[0])]


OPS = {
    "rms_norm": Op("rms_norm", 1, 1, _rms, [EPS]),
    "rms_norm, no weight": Op("rms_norm", 1, 0, _rms, [EPS]),
    "residual_rms_norm": Op("residual_rms_norm", 2, 1, _residual_rms, [EPS], outputs=2),
    "layer_norm": _layer(1, 1),
    "layer_norm, weight": _layer(1, 0),
    "layer_norm, bias": _layer(0, 1),
    "layer_norm, plain": _layer(0, 0),
    "silu": Op("silu", 1, 0, _plain(ref.silu)),
    "gelu": Op("gelu", 1, 0, _plain(ref.gelu)),
    "gelu_approx": Op("gelu_approx", 1, 0, _plain(ref.gelu_approx)),
    "gelu_fast_approx": Op("gelu_fast_approx", 1, 0, _plain(ref.gelu_fast_approx)),
    "swiglu": Op("swiglu", 2, 0, _gated(ref.silu)),
    "geglu": Op("geglu", 2, 0, _gated(ref.gelu)),
    "geglu_approx": Op("geglu_approx", 2, 0, _gated(ref.gelu_approx)),
    "relu2": Op("relu2", 1, 0, _plain(ref.relu2)),
    "swiglu_oai": Op("swiglu_oai", 2, 0, lambda a, v, d: [ref.swiglu_oai(*a, d[0])], [1.702, 7.0]),
    "softcap": Op("softcap", 1, 0, lambda a, v, d: [ref.softcap(a[0], CAP, d[0])], [CAP]),
    "residual": Op("residual", 2, 0, lambda a, v, d: [ref.residual(*a, d[0])]),
    "logsumexp": Op("logsumexp", 1, 0, _plain(ref.logsumexp), last=1),
    "softmax": Op("softmax", 1, 0, _plain(ref.softmax)),
    "argmax": Op("argmax", 1, 0, lambda a, v, d: [ref.argmax(a[0])], last=None, index=True),
}
ELEMENTWISE = (
    "silu", "gelu", "gelu_approx", "gelu_fast_approx", "relu2",
    "swiglu", "swiglu_oai", "geglu", "geglu_approx", "softcap",
)  # fmt: skip
REDUCTIONS = ("logsumexp", "argmax")


@dataclass
class Case:
    """One call of an op's kernel."""

    op: Op
    arrays: list[h.Typed]
    vectors: list[h.Typed]

    @classmethod
    def random(cls, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = ("float32",) * 3, size=3.0) -> Case:
        """`dtypes` of the first array, of further arrays, and of vectors."""
        op = OPS[name]
        rng = np.random.default_rng(seed_of(name, shape))
        arrays = [h.Typed.of(rng.normal(0.5, size, shape), dtypes[min(i, 1)]) for i in range(op.arrays)]
        return cls(op, arrays, [h.Typed.of(rng.standard_normal(shape[-1]), dtypes[2]) for _ in range(op.vectors)])

    def with_arrays(self, *arrays: h.Typed) -> Case:
        return Case(self.op, list(arrays), self.vectors)

    def viewed(self, change) -> Case:
        return self.with_arrays(*(a.view(change) for a in self.arrays))

    @property
    def dtypes(self) -> list[str]:
        """Of the results."""
        if self.op.index:
            return ["uint32"]
        first = promote(*(a.dtype for a in self.arrays))
        every = promote(first, *(v.dtype for v in self.vectors))
        return [first, every][-self.op.outputs :] if self.op.outputs == 2 else [every]

    def run(self, isa: int | None = None, threads: int = 1) -> list[h.Typed]:
        shape = self.arrays[0].raw.shape
        if self.op.last is None:
            shape = shape[:-1]
        elif self.op.last >= 0:
            shape = (*shape[:-1], self.op.last)
        out = [h.Typed.blank(shape, dtype) for dtype in self.dtypes]
        isa = best() if isa is None else isa
        inputs = [*self.arrays, *self.vectors]
        h.call(str(library()), f"host_ops_{self.op.symbol}", inputs, out, self.op.params, threads=threads, isa=isa)
        return out

    def check(self, out: list[h.Typed], note: object = "") -> None:
        """`out` against the bounds of the reference."""
        arrays, vectors = [a.values for a in self.arrays], [v.values for v in self.vectors]
        expected = self.op.expect(arrays, vectors, self.dtypes)
        for y, want, dtype in zip(out, expected, self.dtypes, strict=True):
            if self.op.index:
                assert np.array_equal(y.values, want), note
                continue
            error = ref.errors(y.values, want, dtype)
            worst = error.max() if error.size else 0.0
            if not worst <= 1.0:
                at = np.unravel_index(error.argmax(), error.shape)
                raise AssertionError(f"{worst:.3g} times the bound: {y.values[at]} for {want[0][at]} {note}")


def same_bits(a: list[h.Typed], b: list[h.Typed]) -> bool:
    return all(np.array_equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))


def _bits(a: h.Typed) -> np.ndarray:
    return np.ascontiguousarray(a.raw).view(np.uint8) if a.raw.ndim else a.raw


@dataclass
class Rope:
    """One call of the rope kernel: x (..., L, D)."""

    x: h.Typed
    dims: int
    traditional: bool
    offset: int = 0
    base: float = 10000.0
    scale: float = 1.0
    offsets: h.Typed | None = None
    factors: np.ndarray | None = None

    def frequencies(self) -> np.ndarray:
        return self.scale * np.float64(self.base) ** (-np.arange(0, self.dims, 2, dtype=np.float64) / self.dims)

    def run(self, isa: int | None = None, threads: int = 1, x: h.Typed | None = None) -> h.Typed:
        x = x or self.x
        out = h.Typed.blank(x.raw.shape, x.dtype)
        table = self.frequencies()
        table = h.Typed(table if self.factors is None else np.stack([table, self.factors]), "float64")
        inputs = [x, *([self.offsets] if self.offsets else []), table]
        isa = best() if isa is None else isa
        params = [self.offset, int(self.traditional)]
        h.call(str(library()), "host_ops_rope", inputs, [out], params, threads=threads, isa=isa)
        return out

    def check(self, y: h.Typed, x: h.Typed | None = None) -> None:
        x = x or self.x
        offset = self.offset + (self.offsets.values if self.offsets else 0)
        want = ref.rope(x.values, self.dims, self.traditional, self.base, self.scale, offset, x.dtype)
        if self.factors is not None:
            want = ref.rope_by_frequencies(
                x.values, self.frequencies(), self.factors, self.traditional, offset, x.dtype
            )
        error = ref.errors(y.values, want, x.dtype)
        assert error.size == 0 or error.max() <= 1.0, f"{error.max():.3g} times the bound at {error.argmax()}"


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
