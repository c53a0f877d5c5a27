"""Attention problems, and the comparison of a result with float64 and with mlx on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from upstream_kernels.affine import TYPES, rounded

from backend_core.reference import worst_ratio
from backend_core.reference_ops import attention
from backend_core.testing import lab


@dataclass(frozen=True)
class Case:
    """q (batch, heads, queries, d), k and v (batch, kv_heads, keys, d), all in the type `metal`; scale d^-1/2."""

    metal: str
    d: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    mask: str = ""  # "causal", "bool" or "float"
    sinks: bool = False
    transposed: bool = False  # the memory of q is (batch, queries, heads, d)

    @property
    def scale(self) -> float:
        return float(np.float32(self.d**-0.5))

    def arrays(self) -> dict[str, Any]:
        """q, k, v in the order of memory, and mask (1 or batch, heads, queries, keys) and sinks (heads,) if wanted."""
        rng = np.random.default_rng([self.d, self.heads, self.queries, self.keys])
        made: dict[str, Any] = {
            "q": rounded(2 * rng.standard_normal((self.batch, self.heads, self.queries, self.d)), self.metal),
            "k": rounded(rng.standard_normal((self.batch, self.kv_heads, self.keys, self.d)), self.metal),
            "v": rounded(rng.standard_normal((self.batch, self.kv_heads, self.keys, self.d)), self.metal),
        }
        shape = (self.batch, self.heads, self.queries, self.keys)
        visible = rng.random(shape) < 0.7
        visible[..., -1] = True
        if self.mask == "bool":
            made["mask"] = visible
        elif self.mask == "float":
            made["mask"] = rounded(np.where(visible, rng.standard_normal(shape), -np.inf), self.metal)
        if self.sinks:
            made["sinks"] = rounded(rng.standard_normal(self.heads), self.metal)
        return made

    def visible(self, arrays: dict[str, Any]) -> int:
        """Pairs of query and key of all heads that are not masked."""
        pairs = np.ones((self.batch, self.heads, self.queries, self.keys), dtype=bool)
        if self.mask == "causal":
            pairs &= np.tril(np.ones((self.queries, self.keys), dtype=bool), self.keys - self.queries)
        elif self.mask:
            pairs &= arrays["mask"] if self.mask == "bool" else np.isfinite(lab.to_float32(arrays["mask"]))
        return int(pairs.sum())


def plain(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: a if a.dtype == bool else lab.to_float32(a) for name, a in arrays.items()}


def check(out: np.ndarray, case: Case, arrays: dict[str, Any], in_parts: bool = False) -> None:
    """Asserts that `out` is the attention in float64, and as mlx computes it on the CPU in float32.

    in_parts: partial sums were stored in the type of the output, so each lost half a step of it.
    """
    a = plain(arrays)
    dtype, half_step = TYPES[case.metal]
    mask: Any = case.mask if case.mask == "causal" else a.get("mask")
    of_float = {n: v if v.dtype == bool else v.astype(np.float64) for n, v in a.items()}
    mask64: Any = mask if isinstance(mask, str) else of_float.get("mask")
    q, k, v = of_float["q"], of_float["k"], of_float["v"]
    y64, bound = attention(q, k, v, case.scale, mask64, of_float.get("sinks"), dtype)
    _, bound_of_stock = attention(q, k, v, case.scale, mask64, of_float.get("sinks"), "float32")
    if in_parts:
        sizes, _ = attention(q, k, np.abs(v), case.scale, mask64, of_float.get("sinks"), dtype)
        bound = bound + half_step * sizes
    actual = lab.to_float32(out).astype(np.float64)
    assert worst_ratio(actual, y64, bound, dtype) <= 1.0
    stock = mx.fast.scaled_dot_product_attention(
        *(mx.array(a[n]) for n in "qkv"), scale=case.scale, mask=mask if isinstance(mask, str) or mask is None
        else mx.array(mask), sinks=mx.array(a["sinks"]) if case.sinks else None,
    )  # fmt: skip
    assert worst_ratio(actual, np.array(stock, dtype=np.float64), bound + bound_of_stock, dtype) <= 1.0
