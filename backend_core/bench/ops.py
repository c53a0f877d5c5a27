"""``mlx-accel bench ops``: what runs between the linear layers, ours, stock and ggml."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import machine
from ..policy import Policy
from ..report import STOCK, Report
from ..sites import OpSite, itemsize
from ..walk import Found, find_ops
from .decided import chosen, decide, why_stock
from .floors import Floors
from .linear import Options
from .measure import Contender, Row, Series, rounds
from .peer import Arena, Ggml
from .peer_work import Work as PeerWork

_CALLS, _SAMPLE_S, _STOCK_SAMPLES = 64, 0.02, 5
OFFSET = 1000


@dataclass(frozen=True)
class Work:
    """An op at a number of rows.

    op
        ``"rms_norm"``, ``"rope"`` or ``"swiglu"``.
    dims
        Width; for rope the head_dim.
    heads
        Heads of rope, else 1.
    """

    op: str
    rows: int
    dims: int
    heads: int = 1

    @property
    def name(self) -> str:
        return f"{self.op} {f'{self.heads} heads of ' if self.heads > 1 else ''}{self.dims}"

    def bytes_moved(self, dtype: str) -> int:
        """Bytes of a call: inputs and result, and the norm's weight (float16)."""
        arrays = {"rms_norm": 2, "rope": 2, "swiglu": 3}[self.op]
        weight = 2 * self.dims if self.op == "rms_norm" else 0
        return arrays * self.rows * self.heads * self.dims * itemsize(dtype) + weight


def default_work(rows: Sequence[int] = (1, 512)) -> list[Work]:
    """The ops of SmolLM2-135M, Qwen3-0.6B and Qwen3-8B."""
    kinds = (("rms_norm", 576, 1), ("rms_norm", 1024, 1), ("rms_norm", 4096, 1), ("rope", 64, 9), ("rope", 128, 16),
             ("rope", 128, 32), ("swiglu", 1536, 1), ("swiglu", 3072, 1), ("swiglu", 12288, 1))  # fmt: skip
    return [Work(op, m, dims, heads) for op, dims, heads in kinds for m in rows]


def bench_ops(work: Sequence[Work], options: Options, policy: Policy, ggml: Ggml | None = None,
              floors: Floors | None = None, progress: Callable[[Row], None] | None = None) -> list[Row]:  # fmt: skip
    """One row per piece of work. Inputs are hot, as they are in a model."""
    import mlx_lm.models.activations  # noqa: F401  (stock's function)

    result = []
    for item in work:
        row = _measure(item, options, policy, ggml, floors)
        result.append(row)
        if progress is not None:
            progress(row)
    return result


def _measure(item: Work, options: Options, policy: Policy, ggml: Ggml | None, floors: Floors | None) -> Row:
    import mlx.core as mx

    found, args = _found(item, options.x_dtype)
    decision, slot, _ = decide(found, policy, Report(policy=policy.as_dict()))
    label = chosen(decision, item.rows)
    moved = item.bytes_moved(options.x_dtype)
    row = Row(item.name, item.rows, facts={"op": item.op, "dims": item.dims, "heads": item.heads,
                                           "x_dtype": options.x_dtype})  # fmt: skip
    contenders = []
    if label != STOCK and slot is not None:
        run = _repeated(lambda: slot.call(found.module, *args))
        contenders.append(Contender(Series("ours", "ours", label, moved), run))
    if options.stock:
        from ..probes_registry import probe_for

        probe = probe_for(found.site)
        run = _repeated(lambda: probe.stock(found.module, *args))
        detail = "mlx" if label != STOCK else why_stock(decision)
        contenders.append(Contender(Series("stock", "stock", detail, moved), run, _STOCK_SAMPLES))
    closing = []
    if ggml is not None:
        work = _peer(ggml, item)
        work.run()
        contenders.append(Contender(Series(item.op, "peer", "ggml, float32", item.bytes_moved("float32")), work.run))
        closing.append(work.close)
    row.series = [c.series for c in contenders]
    try:
        rounds(contenders, options.repeats, floors, row, options.settle)
    finally:
        for close in closing:
            close()
        mx.clear_cache()
    return row


def _found(item: Work, x_dtype: str) -> tuple[Found, tuple[Any, ...]]:
    """The site as the core sees it in a model, and the arguments of a call."""
    import mlx.core as mx
    import mlx.nn as nn

    dtype = getattr(mx, x_dtype)
    rng = np.random.default_rng(0)

    def values(*shape: int) -> Any:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    if item.op == "swiglu":
        site = OpSite(path="swiglu()", op="activation", variant="swiglu", x_dtype=x_dtype, out_dtype=x_dtype,
                      host="mlx_lm", dims=item.dims, device=machine.default_device())  # fmt: skip
        args: tuple[Any, ...] = values(1, item.rows, item.dims), values(1, item.rows, item.dims)
        mx.eval(args)
        return Found(site, None), args
    holder = nn.Module()
    if item.op == "rms_norm":
        holder.layer = nn.RMSNorm(item.dims)
        holder.layer.weight = mx.ones((item.dims,), mx.float16)
        args = (values(1, item.rows, item.dims),)
    else:
        holder.layer = nn.RoPE(item.dims, traditional=False, base=1e6)
        args = (values(1, item.heads, item.rows, item.dims), OFFSET)
    mx.eval(holder.parameters(), args[0])
    [found] = find_ops(holder, x_dtype)
    return found, args


def _repeated(call: Callable[[], Any]) -> Callable[[], float]:
    """Many calls in one evaluation."""
    import mlx.core as mx

    def run(calls: int) -> float:
        begin = time.perf_counter()
        mx.eval([call() for _ in range(calls)])
        return (time.perf_counter() - begin) / calls

    run(1)
    calls = max(2, min(_CALLS, int(_SAMPLE_S / max(run(2), 1e-7))))
    return lambda: run(calls)


def _peer(ggml: Ggml, item: Work) -> PeerWork:
    shape = (item.dims, item.rows) if item.heads == 1 else (item.dims, item.heads, item.rows)
    tensors: list[Any] = []

    def inputs(arena: Arena) -> None:
        tensors.extend(arena.tensor("f32", *shape) for _ in range(2))
        tensors.append(arena.tensor("f32", item.dims))
        tensors.append(arena.tensor("i32", item.rows))

    def make(arena: Arena, i: int) -> Any:
        a, b, weight, positions = tensors
        if item.op == "rms_norm":
            return ggml.mul(arena.context, ggml.rms_norm(arena.context, a, 1e-5), weight)
        if item.op == "swiglu":
            return ggml.swiglu_split(arena.context, a, b)
        neox = 2
        return ggml.rope_ext(arena.context, a, positions, None, item.dims, neox, 0, 1e6, 1.0, 0.0, 1.0, 32.0, 1.0)

    work = PeerWork(ggml, make, _CALLS if item.rows <= 64 else 8, _CALLS if item.rows <= 64 else 8, inputs)
    rng = np.random.default_rng(0)
    for tensor in tensors[:2]:
        work.fill(tensor, rng.standard_normal(shape[::-1], dtype=np.float32))
    work.fill(tensors[2], np.ones(item.dims, np.float32))
    work.fill(tensors[3], np.arange(OFFSET, OFFSET + item.rows, dtype=np.int32))
    return work
