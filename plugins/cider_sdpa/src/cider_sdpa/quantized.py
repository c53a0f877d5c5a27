"""Attention over a quantized KV cache (``mlx_lm.models.cache.QuantizedKVCache``), which is read as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from backend_core.sites import AttentionSite

SYMBOL = "cider_quantized_attention"
BITS = (1, 2, 3, 4, 5, 6, 8)


def serves(site: AttentionSite) -> bool:
    """Whether the kernel reads caches of this site."""
    return (
        site.kv_bits in BITS
        and site.kv_group_size >= 16
        and site.kv_group_size % 16 == 0
        and site.head_dim == site.value_dim
        and site.head_dim % site.kv_group_size == 0
        and not site.has_sinks
    )


def build(module: Any = None) -> Callable[..., Any]:
    """``f(queries, keys, values, cache, scale, mask, sinks=None)``, as
    ``mlx_lm.models.base.scaled_dot_product_attention`` for a cache with ``bits`` and ``group_size``.

    queries (B, n_heads, L, head_dim); keys and values are (codes, scales, biases) as ``mx.quantize`` makes them of
    (B, n_kv_heads, S, head_dim). Returns (B, n_heads, L, head_dim) in what the dtypes of queries and scales promote to.

    It returns NotImplemented, having done nothing, for whatever it does not compute: sinks, other dtypes, a mask that
    has neither two dimensions nor the same values for all heads, and arguments that stock refuses.
    """
    _kernel()

    def attention(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        bits, group_size = getattr(cache, "bits", None), getattr(cache, "group_size", None)
        if type(bits) is not int or type(group_size) is not int or bits not in BITS or sinks is not None:
            return NotImplemented
        if not _is_served(queries, keys, values, mask, bits, group_size):
            return NotImplemented
        from .plugin import ARRAY, CAUSAL, NO_MASK

        kind = NO_MASK if mask is None else CAUSAL if isinstance(mask, str) else ARRAY
        arrays = (queries, *keys, *values)
        operation = _operation(float(scale), kind, bits, group_size)
        return operation(*arrays, mask) if kind == ARRAY else operation(*arrays)

    return attention


def _is_served(queries: Any, keys: Any, values: Any, mask: Any, bits: int, group_size: int) -> bool:
    import mlx.core as mx

    from .plugin import FLOATS, _fits

    floats = tuple(getattr(mx, name) for name in FLOATS)
    if type(queries) is not mx.array or queries.ndim != 4 or queries.dtype not in floats or group_size % 16:
        return False
    batch, heads, rows, head_dim = queries.shape
    if len(keys) != 3 or len(values) != 3 or head_dim % group_size:
        return False
    if any(type(a) is not mx.array or a.ndim != 4 for a in (*keys, *values)):
        return False
    kv_heads, length = keys[0].shape[1:3]
    if not kv_heads or heads % kv_heads:
        return False
    form = (batch, kv_heads, length)
    dtype = keys[1].dtype
    for codes, scales, biases in (keys, values):
        if codes.dtype != mx.uint32 or codes.shape != (*form, head_dim * bits // 32):
            return False
        if scales.shape != (*form, head_dim // group_size) or biases.shape != scales.shape:
            return False
        if scales.dtype != dtype or biases.dtype != dtype or dtype not in floats:
            return False
    if isinstance(mask, str):
        return mask == "causal"
    if mask is None:
        return True
    # Stock puts an axis into masks of four dimensions, after that of the KV heads: only what broadcasts over all heads
    # means the same there and here.
    if type(mask) is not mx.array or not (mask.ndim <= 2 or (mask.ndim == 4 and mask.shape[1] == 1)):
        return False
    if not _fits(mask.shape, (batch, heads, rows, length)):
        return False
    wide = queries.dtype == mx.float32 or dtype == mx.float32 or queries.dtype != dtype
    return mask.dtype == mx.bool_ or (mask.dtype in floats and (wide or mask.dtype == dtype))


@functools.lru_cache(maxsize=256)
def _operation(scale: float, kind: int, bits: int, group_size: int) -> Callable[..., mx.array]:
    from backend_core.cpu_kernel import like, result_type

    return _kernel().bind(output_shape=like(0), output_dtype=result_type(0, 2), params=[scale, kind, bits, group_size])


@functools.cache
def _kernel() -> Any:
    from backend_core.cpu_kernel import cpu_kernel

    from .plugin import library

    return cpu_kernel(library(), SYMBOL, name="cider_sdpa/quantized", ensure_row_contiguous=False)
