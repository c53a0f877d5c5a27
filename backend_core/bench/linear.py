"""``mlx-accel bench linear``: one linear layer, ours, stock, ggml and the limits of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import AccelError
from ..policy import Policy
from .decided import why_stock
from .floors import Floors
from .layers import Layers, LinearSpec, Rotation, stock_sample
from .measure import Contender, Row, Series, rounds
from .peer import TYPES, Ggml
from .peer_work import best_mul_mat

#: What ggml has for a number of bits, the closest first.
PEERS_BY_BITS = {
    1: ("q1_0",), 2: ("tq2_0",), 3: ("q3_K",), 4: ("q4_K", "q4_0"), 5: ("q5_K",), 6: ("q6_K",), 8: ("q8_0",),
}  # fmt: skip
PEERS_BY_DTYPE = {"float16": ("f16",), "bfloat16": ("bf16",), "float32": ("f32",)}
#: A sample lasts about this long, and has at least and at most so many calls.
_SAMPLE_S, _MIN_CALLS, _MAX_CALLS = 0.02, 4, 64
_STOCK_SAMPLES = 3
_MAX_COPIES = 1024


@dataclass(frozen=True)
class Work:
    """One line of the benchmark: a layer at a number of rows, and the peer's types for it."""

    spec: LinearSpec
    rows: int
    peers: tuple[str, ...] = ()
    #: Whose layer this is, for presets.
    layer: str = ""

    @property
    def name(self) -> str:
        return f"{self.layer} {self.spec.name}".strip()


def specs(shapes: Sequence[tuple[int, int]], bits: Sequence[int] | None = None,
          group_sizes: Sequence[int] | None = None, dense: Sequence[str] = (), scales: str = "float16",
          sym: bool = False) -> list[LinearSpec]:  # fmt: skip
    """Layers of each shape in each format; without `bits` and `dense` the five formats of the documentation.

    Raises AccelError for a format that mlx does not have or a shape that does not fit it.
    """
    if bits is None and not dense:
        formats = [(b, g) for b, default in ((2, 128), (1, 128), (4, 64)) for g in group_sizes or (default,)]
        dense = ("float16", "bfloat16")
    else:
        formats = [(b, g) for b in bits or () for g in group_sizes or (128 if b <= 2 else 64,)]
    found = []
    for n, k in shapes:
        for b, g in formats:
            if b not in (1, 2, 3, 4, 5, 6, 8) or g not in (32, 64, 128):
                raise AccelError(f"{b}-bit weights in groups of {g}: mlx has 1..6 and 8 bits, groups of 32, 64 and 128")
            if k % g:
                raise AccelError(f"{n}x{k}: {k} input features are not a multiple of the group size {g}")
            found.append(LinearSpec(n, k, b, g, scales, sym))
        found += [LinearSpec(n, k, dtype=dtype) for dtype in dense]
    return found


def peer_types(text: str | None) -> tuple[str, ...] | None:
    """ggml types from a list; None if none was given. Raises AccelError for an unknown one."""
    if text is None:
        return None
    names = tuple(t.strip() for t in text.split(",") if t.strip())
    if unknown := [t for t in names if t not in TYPES]:
        raise AccelError(f"--peer-types: {unknown[0]!r} is none of {', '.join(TYPES)}")
    return names


def peers_of(spec: LinearSpec) -> tuple[str, ...]:
    """The peer's types that stand against a layer."""
    return PEERS_BY_BITS.get(spec.bits, ()) if spec.bits else PEERS_BY_DTYPE[spec.dtype]


@dataclass
class Options:
    """How to measure.

    weights_bytes
        Weights of all copies together; must exceed what caches hold.
    repeats
        Rounds.
    x_dtype
        dtype of the activations.
    stock
        False leaves stock out.
    """

    repeats: int = 9
    weights_bytes: int = 512 << 20
    x_dtype: str = "float32"
    stock: bool = True
    settle: float = 0.02


def copies_for(weight_bytes: int, wanted: int) -> int:
    """How many copies of a matrix make `wanted` bytes, within a quarter of the free memory; at most 1024."""
    return max(2, min(_MAX_COPIES, -(-min(wanted, free_memory() // 4) // weight_bytes)))


def free_memory() -> int:
    """Bytes of memory that are free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2


def bench_linear(work: Sequence[Work], options: Options, policy: Policy, ggml: Ggml | None = None,
                 floors: Floors | None = None, progress: Callable[[Row], None] | None = None) -> list[Row]:  # fmt: skip
    """One row per piece of work. `progress` sees each as it is done."""
    result: list[Row] = []
    layers: Layers | None = None
    for item in work:
        if layers is None or layers.spec != item.spec:
            layers = None  # free the weights before the next ones are made
            copies = copies_for(item.spec.weight_bytes(), options.weights_bytes)
            layers = Layers(item.spec, copies, options.x_dtype, policy)
        row = _measure(item, layers, options, ggml, floors)
        result.append(row)
        if progress is not None:
            progress(row)
    return result


def _measure(item: Work, layers: Layers, options: Options, ggml: Ggml | None, floors: Floors | None) -> Row:
    import mlx.core as mx

    spec, rows, site = item.spec, item.rows, layers.site
    x = np.random.default_rng(rows).standard_normal((rows, spec.k), dtype=np.float32)
    device_x = mx.array(x)[None].astype(getattr(mx, options.x_dtype))
    mx.eval(device_x)
    row = Row(item.name, rows, rows * spec.n * spec.k, facts={
        "layer": item.layer or item.name,
        "n": spec.n, "k": spec.k, "bits": spec.bits, "group_size": spec.group_size, "dtype": spec.dtype,
        "sym": spec.sym, "x_dtype": site.x_dtype, "out_dtype": site.out_dtype, "copies": len(layers.modules),
    })  # fmt: skip
    contenders = []
    label = layers.chosen(rows)
    if label != "stock":
        series = Series("ours", "ours", label, layers.bytes_moved(rows))
        contenders.append(_ours(series, layers, device_x))
    if options.stock:
        run, how = stock_sample(layers, rows, device_x)
        full = spec.call_bytes(rows, site.x_dtype, site.out_dtype)
        series = Series("stock", "stock", "mlx", full, note=how)
        contenders.append(Contender(series, run, _STOCK_SAMPLES))
        if label == "stock":
            series.detail = why_stock(layers.decision)
    closing = []
    for kind in item.peers if ggml is not None else ():
        assert ggml is not None
        contender, close = _peer(ggml, kind, spec, rows, x, options)
        if contender is not None:
            contenders.append(contender)
            closing.append(close)
    row.series = [c.series for c in contenders]
    try:
        rounds(contenders, options.repeats, floors, row, options.settle)
    finally:
        for close in closing:
            close()
        mx.clear_cache()
    return row


def _ours(series: Series, layers: Layers, x: Any) -> Contender:
    def call(module: Any, x: Any) -> Any:
        return module(x)

    probe = Rotation(call, layers.modules, x, 2)
    probe.run()
    calls = max(_MIN_CALLS, min(_MAX_CALLS, int(_SAMPLE_S / max(probe.run(), 1e-7))))
    if x.shape[1] > 64:
        calls = max(1, min(calls, 2))
    rotation = Rotation(call, layers.modules, x, calls)
    return Contender(series, rotation.run)


def _peer(ggml: Ggml, kind: str, spec: LinearSpec, rows: int, x: np.ndarray, options: Options
          ) -> tuple[Contender | None, Callable[[], None]]:  # fmt: skip
    if spec.k % ggml.block(kind):
        return None, lambda: None
    values = np.random.default_rng(7).standard_normal((min(spec.n, 64), spec.k), dtype=np.float32)
    size = ggml.matrix_bytes(kind, spec.n, spec.k)
    copies = copies_for(size, options.weights_bytes)
    calls = 1 if rows > 64 else min(_MAX_CALLS, max(_MIN_CALLS, copies // 4))
    work, layout = best_mul_mat(ggml, kind, spec.n, spec.k, rows, copies, calls, ggml.quantized(kind, values), x)
    work.run()
    moved = size + rows * 4 * (spec.k + spec.n)
    return Contender(Series(kind, "peer", f"ggml {kind}, {layout} layout", moved), work.run), work.close
