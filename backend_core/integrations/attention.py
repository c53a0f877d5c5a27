"""Attention: one route per host package, from its one attention function to the offers that were chosen.

A hundred model files hold ``scaled_dot_product_attention`` by name, so the function object stays and its code
is replaced by a look-up: by the model whose block is calling (see :mod:`.scope`), shape and dtype. Calls of other
models, and all calls while no model is accelerated, run the function's own code.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from ..probes_attention import AttentionProbe
from ..report import Report
from . import cache, scope

_ROUTE, _STOCK = "_accel_route", "_accel_stock_attention"
#: (owner, *key) -> (small, large).
_table: dict[tuple[Any, ...], tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {}


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
    """Runs with the globals of the host's models.base."""
    return _accel_route(queries, keys, values, cache, scale, mask, sinks)  # type: ignore[name-defined]  # noqa: F821


class AttentionSlot:
    """The chosen callables of one attention shape; what :class:`backend_core.install.Slot` is for modules."""

    def __init__(self, report: Report, probe: AttentionProbe, small: Callable[..., Any] | None,
                 large: Callable[..., Any] | None) -> None:  # fmt: skip
        self.report, self.probe, self.small, self.large = report, probe, small, large

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
    _hook(s.host)
    if s.kv_dtype != s.q_dtype and slot.small and slot.large:
        cache.install_dtype(s, owner)


def uninstall(owner: int) -> int:
    """Remove the entries of a model; the hosts' functions get their code back with the last one."""
    mine = [key for key in _table if key[0] == owner]
    for key in mine:
        del _table[key]
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
        # Quantized caches hand over tuples.
        if not model or type(keys) is tuple or hasattr(kv, "bits") or queries.size == 0 or keys.size == 0:
            return stock(queries, keys, values, kv, scale, mask, sinks)
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


def _unhook(host: str) -> None:
    module: Any = sys.modules.get(f"{host}.models.base")
    stock = getattr(module, _STOCK, None)
    if stock is not None:
        module.scaled_dot_product_attention.__code__ = stock.__code__
        delattr(module, _STOCK)
        delattr(module, _ROUTE)
