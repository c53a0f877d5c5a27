"""Hooks: offers for attention calls on the CPU over float and over quantized caches, and for updates of caches.

The offer for attention is ``cpu``: any number of rows, float32, float16 and bfloat16 in any combination, all masks that
stock takes, sinks, exactness ``rounding``, row-invariant. Keys and values are read where they lie, whatever their
strides.
"""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

if TYPE_CHECKING:
    import mlx.core as mx

    from backend_core.kernels_registry import Registry
    from backend_core.offers import Offer
    from backend_core.sites import AttentionSite, OpSite

FLOATS = ("float32", "float16", "bfloat16")

SYMBOL = "cider_attention"
#: What the kernel's third parameter says about the mask.
NO_MASK, CAUSAL, ARRAY = 0, 1, 2


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "cider_attention.dylib" if sys.platform == "darwin" else "cider_attention.so"
    return importlib.resources.files("cider_sdpa") / "kernels" / name


@hookimpl
def register_kernels(registry: Registry) -> None:
    registry.cpu(name="attention", library=library(), symbol=SYMBOL, exactness="rounding")
    registry.cpu(name="quantized", library=library(), symbol="cider_quantized_attention", exactness="rounding")
    registry.cpu(name="cache_write", library=library(), symbol="cider_cache_write", exactness="bitwise")


@hookimpl
def select_op(site: OpSite) -> Offer | None:
    if site.device != "cpu" or site.op != "kv_update" or site.x_dtype not in FLOATS or site.out_dtype not in FLOATS:
        return None
    from backend_core.offers import Offer

    from . import cache

    return Offer(
        name="cache",
        build=cache.build,
        exactness="bitwise",
        row_invariant=True,
        preference=10,
        note="keys and values are converted and written in one operation",
    )


@hookimpl
def select_attention(site: AttentionSite) -> Offer | None:
    if site.device != "cpu" or site.q_dtype not in FLOATS or site.kv_dtype not in FLOATS:
        return None
    if site.n_kv_heads and site.n_heads % site.n_kv_heads:
        return None
    from backend_core.offers import Offer

    from . import quantized

    if site.kv_bits:
        if not quantized.serves(site):
            return None
        return Offer(
            name="quantized",
            build=quantized.build,
            exactness="rounding",
            row_invariant=True,
            preference=10,
            note="the quantized cache is read as it is, once for all query heads and rows",
        )

    return Offer(
        name="cpu",
        build=build,
        exactness="rounding",
        row_invariant=True,
        preference=10,
        note="each key and value is read once for all query heads and rows",
    )


def build(module: Any = None) -> Callable[..., Any]:
    """``f(queries, keys, values, cache, scale, mask, sinks=None)``, as
    ``mlx_lm.models.base.scaled_dot_product_attention``.

    It returns NotImplemented, having done nothing, for whatever it does not compute: quantized keys and values, a
    cache with ``bits``, dtypes other than float32, float16 and bfloat16, a mask that is neither ``"causal"`` nor
    bool nor float, and arguments that stock refuses. Raises what :func:`backend_core.cpu_kernel` raises if the
    library cannot be used.
    """
    import mlx.core as mx

    array = mx.array
    operations: dict[Any, Any] = {}
    #: Shapes and dtypes of the last call without arrays beside q, k, v: the other layers' calls are like it.
    served: tuple[Any, ...] = (None,) * 6
    _kernel(1.0, NO_MASK, False)

    def attention(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        nonlocal served
        if type(queries) is not array or type(keys) is not array or type(values) is not array:
            return NotImplemented
        if cache is not None and hasattr(cache, "bits"):
            return NotImplemented
        if sinks is None and (mask is None or (type(mask) is str and mask == "causal")):
            q, k, v, qd, kd, vd = served
            if not (
                queries.shape == q
                and keys.shape == k
                and values.shape == v
                and queries.dtype == qd
                and keys.dtype == kd
                and values.dtype == vd
            ):
                if not _is_served(queries, keys, values, mask, sinks):
                    return NotImplemented
                served = (*(a.shape for a in (queries, keys, values)), *(a.dtype for a in (queries, keys, values)))
            key = (scale, mask)
            operation = operations.get(key)
            if operation is None:
                operation = operations[key] = _operation(float(scale), CAUSAL if mask else NO_MASK, False)
            return operation(queries, keys, values)

        if not _is_served(queries, keys, values, mask, sinks):
            return NotImplemented
        kind = NO_MASK if mask is None else CAUSAL if isinstance(mask, str) else ARRAY
        arrays = [queries, keys, values]
        if kind == ARRAY:
            arrays.append(mask)
        if sinks is not None:
            arrays.append(sinks)
        return _operation(float(scale), kind, sinks is not None)(*arrays)

    # For who runs several kernels as one primitive: the bound kernel f(queries, keys, values) without a mask.
    attention.kernel = lambda scale: _operation(float(scale), NO_MASK, False)  # type: ignore[attr-defined]
    return attention


def _is_served(queries: mx.array, keys: mx.array, values: mx.array, mask: Any, sinks: Any) -> bool:
    """Whether the kernel computes this call, and stock would not refuse it."""
    import mlx.core as mx

    floats = tuple(getattr(mx, name) for name in FLOATS)
    q, k, v = queries.shape, keys.shape, values.shape
    if len(q) != 4 or len(k) != 4 or k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3] or not k[1] or q[1] % k[1]:
        return False
    dtypes = [a.dtype for a in (queries, keys, values)]
    if any(d not in floats for d in dtypes):
        return False
    wide = any(d != dtypes[0] for d in dtypes) or dtypes[0] == mx.float32

    # As stock: what is added must not be wider than the result.
    def adds(a: mx.array) -> bool:
        return a.dtype in floats and (wide or a.dtype == dtypes[0])

    if isinstance(mask, str):
        if mask != "causal":
            return False
    elif mask is not None:
        if type(mask) is not mx.array or not _fits(mask.shape, (q[0], q[1], q[2], k[2])):
            return False
        if mask.dtype != mx.bool_ and not adds(mask):
            return False
    return sinks is None or (type(sinks) is mx.array and sinks.shape == (q[1],) and adds(sinks))


def _fits(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Whether a mask of this shape broadcasts to that of the scores."""
    return len(shape) <= 4 and all(m in (1, s) for m, s in zip(reversed(shape), reversed(scores), strict=False))


@functools.lru_cache(maxsize=256)
def _operation(scale: float, kind: int, sinks: bool) -> Callable[..., mx.array]:
    from backend_core.cpu_kernel import dim, dims, result_type

    return _kernel(scale, kind, sinks).bind(
        output_shape=(dims(0, 0, 3), dim(2, 3)),
        output_dtype=result_type(0, 1, 2),
        params=[scale, kind, int(sinks)],
    )


@functools.lru_cache(maxsize=256)
def _kernel(scale: float, kind: int, sinks: bool) -> Any:
    """One kernel object per meaning of the arguments, since the gradient has to know it."""
    from backend_core.cpu_kernel import cpu_kernel

    return cpu_kernel(
        library(),
        SYMBOL,
        name="cider_sdpa/cpu",
        ensure_row_contiguous=False,
        vjp=functools.partial(_vjp, scale=scale, kind=kind, sinks=sinks),
    )


def _vjp(
    primals: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    argnums: Sequence[int],
    *,
    scale: float,
    kind: int,
    sinks: bool,
) -> list[mx.array]:
    """Stock's gradients."""
    import mlx.core as mx

    def stock(*chosen: mx.array) -> mx.array:
        arrays = list(primals)
        for i, a in zip(argnums, chosen, strict=True):
            arrays[i] = a
        q, k, v, *rest = arrays
        mask = rest[0] if kind == ARRAY else "causal" if kind == CAUSAL else None
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=rest[-1] if sinks else None)

    _, gradients = mx.vjp(stock, [primals[i] for i in argnums], list(cotangents))
    return gradients
