"""The KV cache of a model whose activations are float32: keys and values stay in the checkpoint's dtype.

Under ``activations=float32`` keys and values come as float32, and a cache that takes them as they are has twice the
bytes that stock's has. So they are cast to the checkpoint's dtype where they enter the cache, in
``update_and_fetch``, which is what stock stores; the attention kernel reads them as they are. This is done only for
shapes of which every call is served by an offer: stock's attention would widen the whole cache at every token.

The methods of the host's cache classes are replaced while a model needs it, and act for calls that its attention
blocks make (see :mod:`.scope`). A cache that already holds keys of another dtype, such as one that was loaded from a
file, keeps it.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from ..sites import AttentionSite
from . import scope

#: (owner, n_kv_heads, head_dim, value_dim) -> mx dtype.
_dtypes: dict[tuple[int, int, int, int], Any] = {}
#: class -> (its own method, ours).
_hooked: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install(site: AttentionSite, owner: int) -> None:
    """Keys and values that the model with id `owner` caches for calls of this shape have the site's `kv_dtype`."""
    import mlx.core as mx

    _dtypes[owner, site.n_kv_heads, site.head_dim, site.value_dim] = getattr(mx, site.kv_dtype)
    for cls in _classes(site.host):
        if cls not in _hooked:
            stock = vars(cls)["update_and_fetch"]
            _hooked[cls] = stock, _method(stock)
            cls.update_and_fetch = _hooked[cls][1]  # type: ignore[attr-defined]


def uninstall(owner: int) -> None:
    """Undo every :func:`install` for a model; the classes get their methods back with the last one."""
    for key in [key for key in _dtypes if key[0] == owner]:
        del _dtypes[key]
    if _dtypes:
        return
    for cls, (stock, ours) in _hooked.items():
        # Whoever replaced ours in the meantime may call it: without entries it is stock's.
        if vars(cls).get("update_and_fetch") is ours:
            cls.update_and_fetch = stock  # type: ignore[attr-defined]
    _hooked.clear()


def dtype_of(owner: int) -> str:
    """What the cache of a model is cast to, ``""`` if some or all of its shapes are left as they are."""
    names = {str(dtype).rpartition(".")[2] for key, dtype in _dtypes.items() if key[0] == owner}
    return names.pop() if len(names) == 1 else ""


def _classes(host: str) -> list[type]:
    """The host's cache classes that have an ``update_and_fetch`` of their own."""
    try:
        module = importlib.import_module(f"{host}.models.cache")
    except ImportError:
        return []
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and cls.__module__ == module.__name__
        and isinstance(vars(cls).get("update_and_fetch"), types.FunctionType)
    ]


def _method(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def update_and_fetch(self: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        owner = scope.owner.get()
        if owner and rest:
            values = rest[0]
            dtype = _dtypes.get((owner, keys.shape[1], keys.shape[-1], values.shape[-1]))
            if dtype is not None and keys.dtype != dtype and _takes(self, dtype):
                return stock(self, keys.astype(dtype), values.astype(dtype), *rest[1:], **options)
        return stock(self, keys, *rest, **options)

    return update_and_fetch


def _takes(cache: Any, dtype: Any) -> bool:
    """Whether a cache is empty or holds this dtype already."""
    held = getattr(cache, "keys", None)
    if type(held) is tuple or type(held) is list:
        # Quantized: codes, scales, biases.
        held = held[1] if len(held) > 1 else None
    return held is None or getattr(held, "dtype", None) == dtype
