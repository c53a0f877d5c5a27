"""Whose call it is: routes for attention and activations serve the accelerated model alone.

The host's functions get arrays and nothing else. So the modules that call them (attention blocks, gated
feed-forward blocks) are re-classed like accelerated layers, and while one of them runs, its model is the owner of
the calls made on that thread. Calls from other models have no owner and run stock.
"""

from __future__ import annotations

import contextvars
from typing import Any

from ..walk import stock_class

#: id of the accelerated model whose block runs now on this thread, 0 for none.
owner: contextvars.ContextVar[int] = contextvars.ContextVar("mlx_accel_owner", default=0)

_KEY, _JOINED, _GATED = "_accel_owner", "_accel_joined", "_accel_gated"
_CLASSES: dict[type, type] = {}


def scoped_class(stock: type) -> type:
    """The subclass of a block's class that names the owner while it runs; one per class."""
    if stock not in _CLASSES:
        from ..install import stock_reduce

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            attributes = self.__dict__
            joined = attributes.get(_JOINED)
            if joined is not None:
                token = owner.set(joined[1])
                try:
                    result = joined[0](self, *args, **kwargs)
                finally:
                    owner.reset(token)
                if result is not NotImplemented:
                    return result
            gated = attributes.get(_GATED)
            if gated is not None:
                result = gated(self, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if _KEY not in attributes:
                return stock.__call__(self, *args, **kwargs)
            token = owner.set(attributes[_KEY])
            try:
                return stock.__call__(self, *args, **kwargs)
            finally:
                owner.reset(token)

        _CLASSES[stock] = type(stock.__name__, (stock,), {
            "_accel_stock": stock, "__module__": stock.__module__, "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__, "__call__": __call__, "__reduce_ex__": stock_reduce,
        })  # fmt: skip
    return _CLASSES[stock]


def install(module: Any, model: int) -> None:
    """Calls made by `module` belong to the model with id `model` from now on."""
    module.__dict__[_KEY] = model
    _change_class(module)


def join(module: Any, model: int, joined: Any) -> None:
    """Also ask `joined(module, *args)` first (see :mod:`..joined`)."""
    module.__dict__[_JOINED] = joined, model
    _change_class(module)


def gate(module: Any, gated: Any) -> None:
    """Ask `gated(module, *args)` where the block is not joined; NotImplemented leaves the call to the block's code."""
    module.__dict__[_GATED] = gated
    _change_class(module)


def gated_of(module: Any) -> Any:
    """What :func:`gate` was given, None without."""
    return module.__dict__.get(_GATED)


def uninstall(module: Any) -> bool:
    """Undo :func:`install`, :func:`join` and :func:`gate`. False if there is nothing to undo."""
    found = [module.__dict__.pop(key, None) for key in (_KEY, _JOINED, _GATED)]
    if all(value is None for value in found):
        return False
    module.__class__ = stock_class(module)
    return True


def _change_class(module: Any) -> None:
    cls = stock_class(module)
    if type(module) is cls:
        module.__class__ = scoped_class(cls)
