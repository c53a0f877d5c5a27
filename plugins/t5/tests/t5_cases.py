"""Random problems for the kernel, and the comparison with float64."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np
from t5_ternary import plugin, reference

from backend_core.testing import cpu_kernels as h

FLOATS = ("float32", "float16", "bfloat16")


@functools.cache
def library() -> str:
    return str(plugin.library())


@functools.cache
def isas() -> dict[str, int]:
    """The instruction sets of this machine that the kernel has bodies for, by name."""
    from backend_core import native

    here = set(native.status().isa_names)
    wide = h.AVX2 | h.AVX512
    known = {
        "portable": (0, set()),
        "avx2": (h.AVX2, {"avx2"}),
        "avx512": (wide, {"avx512"}),
        "avx512_vnni": (wide | h.AVX512_VNNI | h.AVX512_VBMI, {"avx512_vnni", "avx512_vbmi"}),
        "amx": (wide | h.AVX512_VNNI | h.AVX512_VBMI | h.AMX_INT8, {"avx512_vnni", "avx512_vbmi", "amx_int8"}),
        "neon": (h.NEON, {"neon"}),
    }
    return {name: mask for name, (mask, needs) in known.items() if needs <= here}


def best() -> int:
    return list(isas().values())[-1]


def seed_of(*parts: object) -> int:
    """The same for the same parts in every process."""
    return zlib.crc32(repr(parts).encode())


@dataclass
class Case:
    """One product: x (rows, k), W (n, k) in groups; ``bias`` may be None."""

    x: h.Typed
    w: h.Typed
    scales: h.Typed
    group: int
    bias: h.Typed | None = None

    @classmethod
    def random(cls, seed, group, rows, n, k, dtypes=("float32", "float16"), bias=False, zeros=1 / 3):
        """zeros: share of weights of zero."""
        rng = np.random.default_rng(seed)
        x = h.Typed.of(rng.standard_normal((rows, k)), dtypes[0])
        rest = (1 - zeros) / 2
        trits = rng.choice(3, (n, k), p=(rest, zeros, rest))
        w = h.Typed(reference.pack(trits, group), "uint8")
        scales = h.Typed.of(rng.uniform(0.01, 0.1, (n, k // group)), dtypes[1])
        extra = h.Typed.of(rng.standard_normal(n), dtypes[1]) if bias else None
        return cls(x, w, scales, group, extra)

    @property
    def out_dtype(self) -> str:
        return self.x.dtype if self.x.dtype == self.scales.dtype else "float32"

    def params(self, isa: int) -> list[int | float]:
        """What the plugin would hand over."""
        known = self.facts() if isa & h.AVX512_VNNI and self.w.raw.shape[0] else []
        return [self.group, *known]

    def facts(self) -> list[float]:
        known = h.Typed.blank((2,), "float32")
        x = h.Typed(np.zeros((1, self.x.raw.shape[-1]), np.float32), "float32")
        h.call(library(), plugin.FACTS, [x, self.w, self.scales], known, [self.group])
        return known.raw.tolist()

    def run(self, *, isa: int | None = None, threads: int = 1, x: h.Typed | None = None) -> h.Typed:
        x, isa = x or self.x, best() if isa is None else isa
        y = h.Typed.blank((*x.raw.shape[:-1], self.w.raw.shape[0]), self.out_dtype)
        inputs = [x, self.w, self.scales, *([self.bias] if self.bias else [])]
        h.call(library(), plugin.SYMBOL, inputs, y, self.params(isa), threads=threads, isa=isa)
        return y

    def weights(self) -> np.ndarray:
        return reference.dequantize64(self.w.raw, self.scales.values, self.group)

    def check(self, y: h.Typed, x: h.Typed | None = None) -> None:
        """`y` against the bound of ``rounding``."""
        bias = self.bias.values if self.bias else None
        y64, allowed = reference.bound((x or self.x).values, self.weights(), self.out_dtype, bias)
        error = np.abs(y.values - y64) / allowed
        assert error.shape == y.values.shape
        assert error.size == 0 or error.max() <= 1.0, f"{error.max():.3g} times the bound at {error.argmax()}"
