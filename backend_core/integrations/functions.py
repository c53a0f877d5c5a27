"""Functions that models import by name: found by identity, rebound, and given back.

``mlx_lm.models.activations.swiglu`` is an ``mx.compile`` object, so it has no code to replace. What can be done
is to find every module global of the hosts that is that very object and put a :class:`Rebound` there. It looks
at whose call it is (see :mod:`.scope`) and at the dtype, and passes on what was not decided for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..probe_base import Probe
from ..report import Report
from ..walk import dtype_name
from . import scope

#: variant -> (module, attribute) of the stock function, per host.
FUNCTIONS = {
    ("mlx_lm", "swiglu"): ("mlx_lm.models.activations", "swiglu"),
    ("mlx_vlm", "swiglu"): ("mlx_vlm.models.activations", "swiglu"),
}


class FunctionSlot:
    """The chosen callable of one function and dtype."""

    def __init__(self, report: Report, probe: Probe, function: Callable[..., Any] | None) -> None:
        self.report, self.probe, self.function = report, probe, function

    def call(self, module: Any, *args: Any) -> Any:
        return self.probe.stock(module, *args) if self.function is None else self.function(*args)


class Rebound:
    """Stands where a stock function stood; `stock` is that function."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock
        self.by_owner: dict[tuple[int, str], Callable[..., Any]] = {}
        self.__doc__ = getattr(stock, "__doc__", None)
        self.__name__ = getattr(stock, "__name__", "function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and not kwargs:
            first = args[0]
            model = scope.owner.get()
            function = self.by_owner.get((model, dtype_name(first.dtype))) if model else None
            if (
                function is not None
                and first.size
                and all(a.shape == first.shape and a.dtype == first.dtype for a in args)
            ):
                return function(*args)
        return self.stock(*args, **kwargs)


_rebound: dict[tuple[str, str], Rebound] = {}
_places: dict[tuple[str, str], list[tuple[str, str]]] = {}


def stock_function(host: str, variant: str) -> Callable[..., Any]:
    """The host's own function, also while it is rebound. Raises KeyError if there is none."""
    rebound = _rebound.get((host, variant))
    if rebound is not None:
        return rebound.stock
    module, attribute = FUNCTIONS[host, variant]
    return getattr(sys.modules[module], attribute)


def users(host: str, variant: str) -> list[tuple[str, str]]:
    """(module, global) of every place that holds the function now."""
    stock = stock_function(host, variant)
    return [
        (name, attribute)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == host and module is not None
        for attribute, value in list(vars(module).items())
        if value is stock or (isinstance(value, Rebound) and value.stock is stock)
    ]


def install(slot: FunctionSlot, owner: int) -> None:
    """Rebind every place that holds the slot's function, on behalf of the model with id `owner`."""
    site = slot.probe.site
    key = (site.host, site.variant)
    if slot.function is None:
        return
    if key not in _rebound:
        places = users(*key)
        rebound = _rebound[key] = Rebound(stock_function(*key))
        _places[key] = places
        for module, attribute in places:
            setattr(sys.modules[module], attribute, rebound)
    _rebound[key].by_owner[owner, site.x_dtype] = slot.function


def uninstall(owner: int) -> int:
    """Remove what was installed for a model; places get their function back with the last one."""
    count = 0
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
