"""``mlx-accel bench attention``: one attention call over a cache, ours, stock and ggml's flash attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import machine
from ..policy import Policy
from ..report import STOCK, Report
from ..sites import AttentionSite, itemsize
from ..walk import Found
from .decided import chosen, decide, why_stock
from .floors import Floors
from .linear import Options, copies_for
from .measure import Contender, Row, Series, rounds
from .peer import Arena, Ggml
from .peer_work import Work as PeerWork

_SAMPLE_S, _MAX_CALLS, _STOCK_SAMPLES = 0.02, 32, 3
#: Stock is left out where one call would take longer.
_STOCK_S = 1.0
#: The peer's unfused form is left out where the scores of one call need more memory.
_SCORE_BYTES = 256 << 20


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """``"16/8 heads of 128"``."""
        return f"{self.n_heads}/{self.n_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class Work:
    """`length` queries (L), the last of `depth` + L positions that see each other causally."""

    heads: Heads
    length: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.heads.name}, {self.depth} cached"

    @property
    def seen(self) -> int:
        """Keys seen by all queries together."""
        return self.length * self.depth + self.length * (self.length + 1) // 2

    @property
    def macs(self) -> int:
        """Multiply-adds of both products."""
        return 2 * self.seen * self.heads.n_heads * self.heads.head_dim

    def bytes_moved(self, q_dtype: str, kv_dtype: str) -> int:
        """Bytes of a call: keys and values once, queries in, result out."""
        h = self.heads
        cache = 2 * (self.depth + self.length) * h.n_kv_heads * h.head_dim * itemsize(kv_dtype)
        return cache + 2 * self.length * h.n_heads * h.head_dim * itemsize(q_dtype)


#: SmolLM2-135M, Qwen3-0.6B and 1.7B, Qwen3-8B.
DEFAULT_HEADS = (Heads(9, 3, 64), Heads(16, 8, 128), Heads(32, 8, 128))


@dataclass
class AttentionOptions(Options):
    """`kv_dtype`: of keys and values; stock gets them in x_dtype, since it would cast them at each call."""

    kv_dtype: str = "float16"


def bench_attention(work: Sequence[Work], options: AttentionOptions, policy: Policy, ggml: Ggml | None = None,
                    floors: Floors | None = None, progress: Callable[[Row], None] | None = None
                    ) -> list[Row]:  # fmt: skip
    """One row per piece of work."""
    import mlx_lm.models.base  # noqa: F401  (stock's attention function)

    result = []
    slots: dict[Heads, Any] = {}
    for item in work:
        if item.heads not in slots:
            slots[item.heads] = decide(Found(_site(item.heads, options), None), policy, Report(policy=policy.as_dict()))
        row = _measure(item, slots[item.heads], options, ggml, floors)
        result.append(row)
        if progress is not None:
            progress(row)
    return result


def _site(h: Heads, options: AttentionOptions) -> AttentionSite:
    return AttentionSite(
        path=f"attention {h.name}", device=machine.default_device(), host="mlx_lm", n_heads=h.n_heads,
        n_kv_heads=h.n_kv_heads, head_dim=h.head_dim, value_dim=h.head_dim, mask="any", q_dtype=options.x_dtype,
        kv_dtype=options.kv_dtype, scale=1 / math.sqrt(h.head_dim),
    )  # fmt: skip


def _measure(item: Work, decided: Any, options: AttentionOptions, ggml: Ggml | None, floors: Floors | None) -> Row:
    import mlx.core as mx
    from mlx_lm.models.base import scaled_dot_product_attention

    decision, slot, _ = decided
    h, total = item.heads, item.depth + item.length
    row = Row(item.name, item.length, item.macs, facts={
        "n_heads": h.n_heads, "n_kv_heads": h.n_kv_heads, "head_dim": h.head_dim, "depth": item.depth,
        "x_dtype": options.x_dtype, "kv_dtype": options.kv_dtype,
    })  # fmt: skip
    rng = np.random.default_rng(item.length)
    q = mx.array(rng.standard_normal((1, h.n_heads, item.length, h.head_dim), dtype=np.float32))
    q = q.astype(getattr(mx, options.x_dtype))
    scale = 1 / math.sqrt(h.head_dim)
    mask: Any = "causal" if item.length > 1 else None
    contenders, closing = [], []
    label = chosen(decision, item.length)
    if label != STOCK and slot is not None:
        caches = _caches(h, total, options.kv_dtype, options.weights_bytes)
        rotation = _Rotation(lambda k, v: slot.call(None, q, k, v, None, scale, mask, None), caches)
        moved = item.bytes_moved(options.x_dtype, options.kv_dtype)
        contenders.append(Contender(Series("ours", "ours", label, moved), rotation.run))
    if options.stock:
        caches = _caches(h, total, options.x_dtype, 2)
        stock = _Rotation(lambda k, v: scaled_dot_product_attention(q, k, v, None, scale, mask), caches, most=1)
        if stock.seconds < _STOCK_S:
            detail = "mlx" if label != STOCK else why_stock(decision)
            series = Series("stock", "stock", detail, item.bytes_moved(options.x_dtype, options.x_dtype))
            contenders.append(Contender(series, stock.run, _STOCK_SAMPLES))
    if ggml is not None:
        moved = item.bytes_moved("float32", "float16")
        scores = 4 * item.length * total * h.n_heads
        for name in ("flash_attn", "unfused") if scores <= _SCORE_BYTES else ("flash_attn",):
            work = _peer(ggml, item, options, fused=name == "flash_attn")
            work.run()
            contenders.append(Contender(Series(name, "peer", f"ggml {name}, f16 cache", moved), work.run))
            closing.append(work.close)
    row.series = [c.series for c in contenders]
    try:
        rounds(contenders, options.repeats, floors, row, options.settle)
    finally:
        for close in closing:
            close()
        mx.clear_cache()
    return row


def _caches(h: Heads, total: int, dtype: str, wanted: int) -> list[tuple[Any, Any]]:
    """Keys and values as slices of larger buffers, as a KV cache hands them out; enough to exceed caches."""
    import mlx.core as mx

    size = 2 * total * h.n_kv_heads * h.head_dim * itemsize(dtype)
    room = -(-total // 256) * 256
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1, h.n_kv_heads, room, h.head_dim), dtype=np.float32)
    made = []
    for _ in range(copies_for(size, wanted)):
        k, v = (mx.array(values).astype(getattr(mx, dtype)) for _ in range(2))
        mx.eval(k, v)
        made.append((k[:, :, :total], v[:, :, :total]))
    return made


class _Rotation:
    """Calls over caches in turn, some in one evaluation; `seconds` is about one call's time."""

    def __init__(self, call: Callable[[Any, Any], Any], caches: list[tuple[Any, Any]], most: int = _MAX_CALLS) -> None:
        self.call, self.caches, self.calls = call, caches, 1
        self._next = 0
        self.run()
        self.seconds = self.run()
        self.calls = max(1, min(most, int(_SAMPLE_S / max(self.seconds, 1e-7))))

    def run(self) -> float:
        """Seconds per call."""
        import mlx.core as mx

        begin = time.perf_counter()
        results = []
        for _ in range(self.calls):
            results.append(self.call(*self.caches[self._next % len(self.caches)]))
            self._next += 1
        mx.eval(results)
        return (time.perf_counter() - begin) / self.calls


def _peer(ggml: Ggml, item: Work, options: AttentionOptions, fused: bool) -> PeerWork:
    """ggml's attention in the layouts llama.cpp keeps its cache in.

    fused
        True: flash_attn_ext, heads side by side for each token (``llama-bench -fa on``). False: two products and a
        softmax, values transposed (``-fa off``), which is the faster one on some processors.
    """
    h, total = item.heads, item.depth + item.length
    room = -(-total // 256) * 256  # llama.cpp rounds the cache it looks at up, and masks the rest
    size = 4 * room * h.n_kv_heads * h.head_dim
    copies = copies_for(size, options.weights_bytes)
    scores = 8 * room * item.length * h.n_heads
    if not fused:
        copies = max(1, min(copies, (2 * _SCORE_BYTES) // scores))
    calls = 1 if item.length > 64 else min(_MAX_CALLS, max(1, copies // 4))
    rows = -(-item.length // 64) * 64  # older ggml wants the mask padded
    scale = 1 / math.sqrt(h.head_dim)
    tensors: dict[str, Any] = {}
    cached: list[tuple[Any, Any]] = []

    def inputs(arena: Arena) -> None:
        tensors["q"] = arena.tensor("f32", h.head_dim, h.n_heads, item.length, 1)
        tensors["mask"] = arena.tensor("f16", room, rows, 1, 1)
        for _ in range(copies // calls * calls):
            k = arena.tensor("f16", h.head_dim, h.n_kv_heads, room, 1)
            shape = (h.head_dim, h.n_kv_heads, room, 1) if fused else (room, h.head_dim, h.n_kv_heads, 1)
            v = arena.tensor("f16", *shape)
            cached.append((k, v))

    def make(arena: Arena, i: int) -> Any:
        context = arena.context
        q, k = (ggml.permute(context, t, 0, 2, 1, 3) for t in (tensors["q"], cached[i][0]))
        if fused:
            v = ggml.permute(context, cached[i][1], 0, 2, 1, 3)
            return ggml.flash_attn_ext(context, q, k, v, tensors["mask"], scale, 0.0, 0.0)
        weights = ggml.soft_max_ext(context, ggml.mul_mat(context, k, q), tensors["mask"], scale, 0.0)
        return ggml.mul_mat(context, cached[i][1], weights)

    work = PeerWork(ggml, make, copies, calls, inputs)
    rng = np.random.default_rng(0)
    work.fill(tensors["q"], rng.standard_normal((item.length, h.n_heads, h.head_dim), dtype=np.float32))
    values = rng.standard_normal((room, h.n_kv_heads, h.head_dim), dtype=np.float32).astype(np.float16)
    for k, v in cached:
        work.fill(k, values)
        work.fill(v, values if fused else values.transpose(1, 2, 0))
    visible = np.arange(room)[None] <= item.depth + np.arange(rows)[:, None]
    work.fill(tensors["mask"], np.where(visible, 0, -np.inf).astype(np.float16))
    return work
