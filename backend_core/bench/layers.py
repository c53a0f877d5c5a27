"""Layers with random weights, as the core accelerates them: verified, raced, installed, and copied.

One layer is decided by the core as it decides for a model's layers. The copies hold the same values at other
addresses, so that what was verified holds for them too; the winner is built for each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..install import Slot, install
from ..policy import Policy
from ..probes import sliced
from ..probes_registry import probe_for
from ..report import STOCK, Report
from ..sites import LinearSite, itemsize
from ..verify import build
from ..walk import find_linears
from .decided import chosen, decide

#: What one sample of stock may take.
STOCK_SAMPLE_S = 0.15
#: Stock is not asked for more rows than this where that would take longer.
STOCK_ROWS = 16


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer to be made.

    n, k
        Output and input features.
    bits, group_size
        Of affine weights; bits 0 is a dense layer.
    dtype
        Of scales and biases, or of a dense layer's weights.
    sym
        True: biases are -scale * 2^(bits - 1), exactly, and need not be read.
    """

    n: int
    k: int
    bits: int = 0
    group_size: int = 0
    dtype: str = "float16"
    sym: bool = False

    @property
    def name(self) -> str:
        """``"2-bit g128 4096x4096"``."""
        form = f"{self.bits}-bit g{self.group_size}{' sym' if self.sym else ''}" if self.bits else self.dtype
        return f"{form} {self.n}x{self.k}"

    def weight_bytes(self, read_biases: bool = True) -> int:
        """Bytes of weights, scales and (if they are read) biases."""
        if not self.bits:
            return self.n * self.k * itemsize(self.dtype)
        groups = self.n * self.k // self.group_size
        return self.n * self.k * self.bits // 8 + groups * itemsize(self.dtype) * (2 if read_biases else 1)

    def call_bytes(self, rows: int, x_dtype: str, out_dtype: str, read_biases: bool = True) -> int:
        """Bytes that a call at `rows` rows reads and writes: weights once, activations in and out."""
        activations = rows * (self.k * itemsize(x_dtype) + self.n * itemsize(out_dtype))
        return self.weight_bytes(read_biases) + activations

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random weights, never zero: as many different codes as the format has, scales within a factor of 2."""
        rng = np.random.default_rng(seed)
        if not self.bits:
            values = rng.standard_normal((min(self.n, 256), self.k), dtype=np.float32) * 0.02
            return {"weight": np.resize(values, (self.n, self.k))}
        words = rng.integers(0, 1 << 32, (self.n, self.k * self.bits // 32), dtype=np.uint32)
        scales = (rng.random((self.n, self.k // self.group_size), dtype=np.float32) + 1.0) * 0.01
        # Exact in either half precision, so that the symmetric form is exact too.
        scales = (scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        factor = np.float32(2 ** (self.bits - 1) if self.sym else 1.37 * 2 ** (self.bits - 1))
        if self.sym and self.bits == 1:
            factor = np.float32(0.5)
        elif self.sym and self.bits == 2:
            factor = np.float32(1.0)
        return {"weight": words, "scales": scales, "biases": -scales * factor}

    def layer(self, arrays: dict[str, np.ndarray]) -> Any:
        """An mlx layer that holds its own copy of the arrays."""
        import mlx.core as mx
        import mlx.nn as nn

        dtype = getattr(mx, self.dtype)
        if not self.bits:
            module: Any = nn.Linear.__new__(nn.Linear)
            nn.Module.__init__(module)
            module.weight = mx.array(arrays["weight"]).astype(dtype)
        else:
            module = nn.QuantizedLinear.__new__(nn.QuantizedLinear)
            nn.Module.__init__(module)
            module.group_size, module.bits, module.mode = self.group_size, self.bits, "affine"
            module.weight = mx.array(arrays["weight"])
            module.scales = mx.array(arrays["scales"]).astype(dtype)
            module.biases = mx.array(arrays["biases"]).astype(dtype)
        module.freeze()
        mx.eval(module.parameters())
        return module


class Layers:
    """`copies` equal layers, accelerated, and what was decided for them.

    decision
        The core's decision for the first one.
    offers
        Offers by label.
    """

    def __init__(self, spec: LinearSpec, copies: int, x_dtype: str, policy: Policy) -> None:
        import mlx.core as mx

        self.spec = spec
        arrays = spec.arrays()
        self.modules = [spec.layer(arrays) for _ in range(copies)]
        [found] = find_linears(_holder(self.modules[0]), x_dtype)
        self.site: LinearSite = found.site
        self.report = Report(policy=policy.as_dict())
        self.decision, _, self.offers = decide(found, policy, self.report)
        probe = probe_for(self.site)
        labels = [b.chosen for b in self.decision.buckets]
        small, large = labels[0], labels[-1]
        for module in self.modules:
            made = {label: build(self.offers[label], module) for label in {small, large} - {STOCK}}
            if made:
                install(module, Slot(module, self.report, probe, made.get(small), made.get(large)))
        self.probe = probe
        mx.clear_cache()

    def chosen(self, rows: int) -> str:
        """Label of what runs at a number of rows."""
        return chosen(self.decision, rows)

    def bytes_moved(self, rows: int) -> int:
        """Exact bytes of a call of what runs at `rows` rows; biases count if the offer says it reads them."""
        spec, site = self.spec, self.site
        full = spec.call_bytes(1, site.x_dtype, site.out_dtype)
        offer = self.offers.get(self.chosen(rows))
        reads = offer is None or not spec.bits or not offer.bytes_moved or offer.bytes_moved >= full
        return spec.call_bytes(rows, site.x_dtype, site.out_dtype, read_biases=reads)


def _holder(layer: Any) -> Any:
    import mlx.nn as nn

    holder = nn.Module()
    holder.layer = layer
    return holder


class Rotation:
    """Calls of layers in turn, `calls` of them in one evaluation."""

    def __init__(self, call: Callable[[Any, Any], Any], modules: list[Any], x: Any, calls: int) -> None:
        self.call, self.modules, self.x, self.calls = call, modules, x, calls
        self._next = 0

    def run(self) -> float:
        """Seconds per call."""
        import mlx.core as mx

        count, modules = len(self.modules), self.modules
        begin = time.perf_counter()
        results = []
        for _ in range(self.calls):
            results.append(self.call(modules[self._next % count], self.x))
            self._next += 1
        mx.eval(results)
        return (time.perf_counter() - begin) / self.calls


def stock_sample(layers: Layers, rows: int, x: Any) -> tuple[Callable[[], float], str]:
    """(seconds per call of stock, how it was measured): whole where that is cheap, else a part, extrapolated."""
    spec, probe, modules = layers.spec, layers.probe, layers.modules
    part = min(64, spec.n)
    pieces = [sliced(m, 0, part) for m in modules[:4]]
    flat = x.reshape(-1, spec.k)

    def timed(layer_list: list[Any], m: int) -> float:
        return Rotation(probe.stock, layer_list, flat[:m], 1).run()

    timed(pieces, 1)
    cost = min(timed(pieces, 1) for _ in range(2)) / part  # per column of one row
    whole = cost * spec.n * rows
    if whole <= 2 * STOCK_SAMPLE_S:
        calls = max(1, min(20, int(STOCK_SAMPLE_S / max(whole, 1e-7))))
        return Rotation(probe.stock, modules, x, calls).run, ""
    m = rows if cost * part * rows <= STOCK_SAMPLE_S else min(rows, STOCK_ROWS)
    columns = min(spec.n, max(part, int(STOCK_SAMPLE_S / (cost * m)) // 64 * 64))
    pieces = [sliced(module, 0, columns) for module in modules]
    run = Rotation(probe.stock, pieces, flat[:m], 1).run
    factor = rows / m * (spec.n / columns)
    parts = ([f"{columns} of {spec.n} columns"] if columns < spec.n else []) + (
        [f"{m} of {rows} rows"] if m < rows else []
    )
    return lambda: run() * factor, ", ".join(parts)
