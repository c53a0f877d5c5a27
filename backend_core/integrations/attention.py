"""Attention: one route per host package, from its one attention function to the offers that were chosen.

A hundred model files hold ``scaled_dot_product_attention`` by name, so the function object stays and its code
is replaced by a look-up: by the model whose block is calling (see :mod:`.scope`), shape and dtype. Calls of other
models, and all calls while no model is accelerated, run the function's own code.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

from .. import native
from ..probes_attention import AttentionProbe
from ..report import Report
from ..sites import AttentionSite
from ..walk import dtype_name
from . import cache, scope

_ROUTE, _STOCK = "_accel_route", "_accel_stock_attention"
_Pair = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
#: (owner, *key) -> (small, large).
_table: dict[tuple[Any, ...], _Pair] = {}
#: (owner, host, n_heads, n_kv_heads, head_dim) -> the slot of that shape, for caches that are quantized on the way.
_shapes: dict[tuple[Any, ...], AttentionSlot] = {}


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
    """Runs with the globals of the host's models.base."""
    return _accel_route(queries, keys, values, cache, scale, mask, sinks)  # type: ignore[name-defined]  # noqa: F821


class AttentionSlot:
    """The chosen callables of one attention shape; what :class:`backend_core.install.Slot` is for modules."""

    def __init__(self, report: Report, probe: AttentionProbe, small: Callable[..., Any] | None,
                 large: Callable[..., Any] | None, late: Callable[[AttentionSite], AttentionSlot | None] | None = None
                 ) -> None:  # fmt: skip
        self.report, self.probe, self.small, self.large, self.late = report, probe, small, large, late

    def call(self, module: Any, queries: Any, *rest: Any) -> Any:
        function = self.small if queries.shape[-2] <= 16 else self.large
        y = self.probe.stock(module, queries, *rest) if function is None else function(queries, *rest)
        return self.probe.stock(module, queries, *rest) if y is NotImplemented else y


def key_of(host: str, queries: Any, keys: Any, values: Any, sinks: Any) -> tuple[Any, ...]:
    """What a call is looked up by."""
    _, n_heads, _, head_dim = queries.shape
    return (host, n_heads, keys.shape[1], head_dim, values.shape[3], queries.dtype, keys.dtype, values.dtype,
            sinks is not None)  # fmt: skip


def install(slot: AttentionSlot, owner: int) -> None:
    """Route calls of the slot's shape to it, on behalf of the model with id `owner`."""
    import mlx.core as mx

    s = slot.probe.site
    q, kv = getattr(mx, s.q_dtype), getattr(mx, s.kv_dtype)
    key = (owner, s.host, s.n_heads, s.n_kv_heads, s.head_dim, s.value_dim, q, kv, kv, s.has_sinks)
    _table[key] = slot.small, slot.large
    _shapes.setdefault((owner, s.host, s.n_heads, s.n_kv_heads, s.head_dim), slot)
    _hook(s.host)
    if s.kv_dtype != s.q_dtype and slot.small and slot.large:
        cache.install_dtype(s, owner)


def uninstall(owner: int) -> int:
    """Remove the entries of a model; the hosts' functions get their code back with the last one."""
    mine = [key for key in _table if key[0] == owner]
    for key in mine:
        del _table[key]
    for shape in [shape for shape in _shapes if shape[0] == owner]:
        del _shapes[shape]
    for host in {"mlx_lm", "mlx_vlm"} - {key[1] for key in _table}:
        _unhook(host)
    return len(mine)


def stock_function(host: str) -> Callable[..., Any]:
    """The host's own attention function, also while it is routed."""
    module = sys.modules[f"{host}.models.base"]
    return getattr(module, _STOCK, None) or module.scaled_dot_product_attention


def _hook(host: str) -> None:
    module: Any = sys.modules.get(f"{host}.models.base")
    function = getattr(module, "scaled_dot_product_attention", None)
    if not isinstance(function, types.FunctionType) or function.__closure__ or hasattr(module, _STOCK):
        return
    stock = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    setattr(module, _STOCK, stock)

    def route(queries: Any, keys: Any, values: Any, kv: Any, scale: Any, mask: Any, sinks: Any) -> Any:
        model = scope.owner.get()
        if not model or queries.size == 0:
            return stock(queries, keys, values, kv, scale, mask, sinks)
        if hasattr(kv, "bits") or type(keys) is tuple:
            entry = _quantized(model, host, queries, keys, kv)
        elif keys.size == 0:
            return stock(queries, keys, values, kv, scale, mask, sinks)
        else:
            entry = _table.get((model, *key_of(host, queries, keys, values, sinks)))
        if entry is not None:
            function = entry[0] if queries.shape[2] <= 16 else entry[1]
            if function is not None:
                y = function(queries, keys, values, kv, scale, mask, sinks)
                if y is not NotImplemented:
                    return y
        return stock(queries, keys, values, kv, scale, mask, sinks)

    setattr(module, _ROUTE, route)
    function.__code__ = scaled_dot_product_attention.__code__


def _quantized(owner: int, host: str, queries: Any, keys: Any, cache: Any) -> _Pair | None:
    """The callables for a quantized cache; which one there will be is known when the first call comes."""
    bits, group_size = getattr(cache, "bits", None), getattr(cache, "group_size", None)
    if type(bits) is not int or type(group_size) is not int or not isinstance(keys, (tuple, list)) or len(keys) != 3:
        return None
    codes, scales, _ = keys
    if getattr(codes, "size", 0) == 0:
        return None
    _, n_heads, _, head_dim = queries.shape
    shape = (owner, host, n_heads, codes.shape[1], head_dim)
    key = (*shape, queries.dtype, scales.dtype, bits, group_size)
    if key in _table:
        return _table[key]
    slot = _shapes.get(shape)
    # A trace can be run again: nothing is decided inside.
    if slot is None or slot.late is None or native.in_tracing():
        return None
    _table[key] = None, None
    place = slot.probe.site.path.partition("[")[0]
    chosen = slot.late(dataclasses.replace(
        slot.probe.site, path=f"{place}[attention, quantized cache]", q_dtype=dtype_name(queries.dtype),
        kv_dtype=dtype_name(scales.dtype), kv_bits=bits, kv_group_size=group_size,
    ))  # fmt: skip
    if chosen is not None:
        _table[key] = chosen.small, chosen.large
    return _table[key]


def _unhook(host: str) -> None:
    module: Any = sys.modules.get(f"{host}.models.base")
    stock = getattr(module, _STOCK, None)
    if stock is not None:
        module.scaled_dot_product_attention.__code__ = stock.__code__
        delattr(module, _STOCK)
        delattr(module, _ROUTE)
