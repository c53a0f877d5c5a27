"""Functions that models import by name: found by identity, rebound, and given back.

``mlx_lm.models.activations.swiglu`` is an ``mx.compile`` object, so it has no code to replace. What can be done
is to find every module global of the hosts that is that very object and put a :class:`Rebound` there. It looks
at whose call it is (see :mod:`.scope`) and at the dtype, and passes on what was not decided for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..probe_base import Probe
from ..report import Report
from ..walk import dtype_name, stock_class
from ..walk_blocks import MLPForm, form_of
from . import scope


@dataclass(frozen=True)
class Function:
    """A stock function that models hold by name.

    module, attribute
        Where it is defined.
    op, variant
        Of its site.
    first
        Position of the first array among its arguments; numbers come before.
    options
        Keywords with which offers are made; a call with others is stock's.
    """

    module: str
    attribute: str
    op: str
    variant: str
    first: int = 0
    options: tuple[tuple[str, float], ...] = ()


def _times(name: str, gate: Any, x: Any) -> Any:
    import mlx.nn as nn

    return getattr(nn, name)(gate) * x


_OAI = (("alpha", 1.702), ("limit", 7.0))
#: (host, path of the site) -> stock function.
FUNCTIONS = {
    ("mlx_lm", "swiglu()"): Function("mlx_lm.models.activations", "swiglu", "activation", "swiglu"),
    ("mlx_lm", "precise_swiglu()"): Function(
        "mlx_lm.models.activations", "precise_swiglu", "activation", "precise_swiglu"
    ),
    ("mlx_lm", "swiglu_oai()"): Function(
        "mlx_lm.models.activations", "swiglu_oai", "activation", "swiglu_oai", options=_OAI
    ),
    ("mlx_lm", "gemma4.geglu()"): Function("mlx_lm.models.gemma4_text", "geglu", "activation", "geglu_approx"),
    ("mlx_lm", "gemma4.logit_softcap()"): Function("mlx_lm.models.gemma4_text", "logit_softcap", "softcap", "", 1),
    ("mlx_lm", "gemma3n.logit_softcap()"): Function("mlx_lm.models.gemma3n", "logit_softcap", "softcap", "", 1),
    ("mlx_vlm", "swiglu()"): Function("mlx_vlm.models.activations", "swiglu", "activation", "swiglu"),
}


#: (host, path of the site) -> variant and stock of activations that blocks write out; see :class:`Gated`.
WRITTEN_OUT: dict[tuple[str, str], tuple[str, Callable[[Any, Any], Any]]] = {
    (host, f"{name}() * x"): (variant, functools.partial(_times, name))
    for host in ("mlx_lm", "mlx_vlm")
    for name, variant in (("gelu_approx", "geglu_approx"), ("gelu", "geglu"))
}


class Gated:
    """Runs a feed-forward block whose code writes its activation out: its layers around the chosen callable."""

    def __init__(self, form: MLPForm, function: Callable[..., Any], dtype: str) -> None:
        self.form, self.function, self.dtype = form, function, dtype

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return NotImplemented
        gate, up = module[self.form.gate](args[0]), module[self.form.up](args[0])
        if dtype_name(gate.dtype) != self.dtype or gate.dtype != up.dtype or gate.shape != up.shape or not gate.size:
            return NotImplemented
        return module[self.form.down](self.function(gate, up))


class FunctionSlot:
    """The chosen callable of one function and dtype."""

    def __init__(self, report: Report, probe: Probe, function: Callable[..., Any] | None) -> None:
        self.report, self.probe, self.function = report, probe, function

    def call(self, module: Any, *args: Any) -> Any:
        return self.probe.stock(module, *args) if self.function is None else self.function(*args)


class Rebound:
    """Stands where a stock function stood; `stock` is that function."""

    def __init__(self, stock: Callable[..., Any], first: int = 0, options: Any = ()) -> None:
        self.stock, self.first, self.options = stock, first, dict(options)
        self.by_owner: dict[tuple[int, str], Callable[..., Any]] = {}
        self.__doc__ = getattr(stock, "__doc__", None)
        self.__name__ = getattr(stock, "__name__", "function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at = self.first
        if len(args) > at and kwargs == self.options:
            first = args[at]
            model = scope.owner.get()
            function = self.by_owner.get((model, dtype_name(first.dtype))) if model else None
            if (
                function is not None
                and first.size
                and all(getattr(a, "shape", None) == first.shape and a.dtype == first.dtype for a in args[at:])
            ):
                return function(*args)
        return self.stock(*args, **kwargs)


_rebound: dict[tuple[str, str], Rebound] = {}
_written_out: set[tuple[int, str, str]] = set()  # the blocks themselves hold what runs
_places: dict[tuple[str, str], list[tuple[str, str]]] = {}


def stock_function(host: str, path: str) -> Callable[..., Any]:
    """The host's own function, also while it is rebound. Raises KeyError if there is none."""
    rebound = _rebound.get((host, path))
    if rebound is not None:
        return rebound.stock
    known = FUNCTIONS[host, path]
    return getattr(sys.modules[known.module], known.attribute)


def stock_call(host: str, path: str) -> Callable[..., Any]:
    """The host's own function with the keywords that offers are made for."""
    if (host, path) in WRITTEN_OUT:
        return WRITTEN_OUT[host, path][1]
    options = dict(FUNCTIONS[host, path].options)
    return functools.partial(stock_function(host, path), **options) if options else stock_function(host, path)


def users(host: str, path: str) -> list[tuple[str, str]]:
    """(module, global) of every place that holds the function now."""
    stock = stock_function(host, path)
    return [
        (name, attribute)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == host and module is not None
        for attribute, value in list(vars(module).items())
        if value is stock or (isinstance(value, Rebound) and value.stock is stock)
    ]


def install(slot: FunctionSlot, callers: tuple[Any, ...], owner: int) -> None:
    """Rebind every place that holds the slot's function, on behalf of the model with id `owner`.

    Of activations that blocks write out, `callers` are the blocks; they run :class:`Gated`.
    """
    site = slot.probe.site
    key = (site.host, site.path)
    if slot.function is None:
        return
    if key in WRITTEN_OUT:
        _written_out.add((owner, *key))
        for module in callers:
            form = form_of(stock_class(module))
            if isinstance(form, MLPForm):
                scope.gate(module, Gated(form, slot.function, site.x_dtype))
        return
    if key not in _rebound:
        places = users(*key)
        known = FUNCTIONS[key]
        rebound = _rebound[key] = Rebound(stock_function(*key), known.first, known.options)
        _places[key] = places
        for module, attribute in places:
            setattr(sys.modules[module], attribute, rebound)
    _rebound[key].by_owner[owner, site.x_dtype] = slot.function


def uninstall(owner: int) -> int:
    """Remove what was installed for a model; places get their function back with the last one."""
    mine_written = {entry for entry in _written_out if entry[0] == owner}
    _written_out.difference_update(mine_written)
    count = len(mine_written)
    for key in list(_rebound):
        rebound = _rebound[key]
        mine = [k for k in rebound.by_owner if k[0] == owner]
        for k in mine:
            del rebound.by_owner[k]
        count += len(mine)
        if not rebound.by_owner:
            for module, attribute in _places.pop(key):
                if getattr(sys.modules.get(module), attribute, None) is rebound:
                    setattr(sys.modules[module], attribute, rebound.stock)
            del _rebound[key]
    return count
