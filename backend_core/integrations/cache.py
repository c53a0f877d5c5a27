"""The KV cache of an accelerated model: in which dtype keys and values are kept, and how they are put there.

**dtype.** Under ``activations=float32`` keys and values come as float32, and a cache that takes them as they are has
twice the bytes that stock's has. So they are cast to the checkpoint's dtype where they enter the cache, in
``update_and_fetch``, which is what stock stores; the attention kernel reads them as they are. This is done only for
shapes of which every call is served by an offer: stock's attention would widen the whole cache at every token. A cache
that already holds keys of another dtype, such as one that was loaded from a file, keeps it.

**Update.** Where an offer for ``kv_update`` was chosen, a ``KVCache`` with room left takes keys and values in one
operation. Growing stays the host's own code, and so does every other class of cache.

The methods of the host's cache classes are replaced while a model needs it, and act for calls that its attention
blocks make (see :mod:`.scope`).
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from .. import native
from ..probes_cache import UpdateSlot
from ..sites import AttentionSite
from . import scope

#: (owner, n_kv_heads, head_dim, value_dim) -> mx dtype.
_dtypes: dict[tuple[int, int, int, int], Any] = {}
#: (owner, dtype of new keys and values, dtype of the cache) -> chosen callable.
_updates: dict[tuple[int, Any, Any], Callable[..., Any]] = {}
#: class -> (its own method, ours).
_hooked: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install_dtype(site: AttentionSite, owner: int) -> None:
    """Keys and values that the model with id `owner` caches for calls of this shape have the site's `kv_dtype`."""
    import mlx.core as mx

    _dtypes[owner, site.n_kv_heads, site.head_dim, site.value_dim] = getattr(mx, site.kv_dtype)
    _hook(site.host)


def install_update(slot: UpdateSlot, owner: int) -> None:
    """The model with id `owner` updates its caches by the slot's callable."""
    import mlx.core as mx

    site = slot.probe.site
    if slot.function is not None:
        _updates[owner, getattr(mx, site.x_dtype), getattr(mx, site.out_dtype)] = slot.function
        _hook(site.host)


def uninstall(owner: int) -> int:
    """Undo all installations for a model; the classes get their methods back with the last one.

    Returns how many updates were removed.
    """
    for key in [key for key in _dtypes if key[0] == owner]:
        del _dtypes[key]
    mine = [key for key in _updates if key[0] == owner]
    for update in mine:
        del _updates[update]
    if not _dtypes and not _updates:
        for cls, (stock, ours) in _hooked.items():
            # Whoever replaced ours in the meantime may call it: without entries it is stock's.
            if vars(cls).get("update_and_fetch") is ours:
                cls.update_and_fetch = stock  # type: ignore[attr-defined]
        _hooked.clear()
    return len(mine)


def dtype_of(owner: int) -> str:
    """What the cache of a model is cast to, ``""`` if some or all of its shapes are left as they are."""
    names = {str(dtype).rpartition(".")[2] for key, dtype in _dtypes.items() if key[0] == owner}
    return names.pop() if len(names) == 1 else ""


def _hook(host: str) -> None:
    for cls in _classes(host):
        if cls not in _hooked:
            stock = vars(cls)["update_and_fetch"]
            _hooked[cls] = stock, _method(stock, cls.__name__ == "KVCache")
            cls.update_and_fetch = _hooked[cls][1]  # type: ignore[attr-defined]


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


def _method(stock: Callable[..., Any], plain: bool) -> Callable[..., Any]:
    """plain: the cache is a buffer of which `offset` positions are filled, under the names of ``KVCache``."""

    @functools.wraps(stock)
    def update_and_fetch(self: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        owner = scope.owner.get()
        if owner and rest:
            values, dtype = rest[0], keys.dtype
            wanted = _dtypes.get((owner, keys.shape[1], keys.shape[-1], values.shape[-1]))
            held = self.keys if plain else getattr(self, "keys", None)
            if plain and held is not None:
                update = _updates.get((owner, dtype, held.dtype))
                if update is not None and held.dtype == (wanted or dtype) and _has_room(self, keys, values):
                    return _update(self, update, keys, values)
            if wanted is not None and dtype != wanted and _takes(held, wanted):
                return stock(self, keys.astype(wanted), values.astype(wanted), *rest[1:], **options)
        return stock(self, keys, *rest, **options)

    return update_and_fetch


def _takes(held: Any, dtype: Any) -> bool:
    """Whether a cache that holds these keys is empty or has this dtype already."""
    if type(held) is tuple or type(held) is list:
        # Quantized: codes, scales, biases.
        held = held[1] if len(held) > 1 else None
    return held is None or getattr(held, "dtype", None) == dtype


def _has_room(cache: Any, keys: Any, values: Any) -> bool:
    """Whether an update is nothing but an assignment: arrays of the same form, and no need to grow."""
    offset, have, new = cache.offset, cache.keys.shape, keys.shape
    if type(offset) is not int or offset < 0 or len(new) != 4 or offset + new[2] > have[2]:
        return False
    stored, wide = cache.values.shape, values.shape
    return (
        have[:2] == new[:2]
        and have[3] == new[3]
        and stored == (*have[:3], wide[3])
        and wide[:3] == new[:3]
        and values.dtype == keys.dtype
        and cache.values.dtype == cache.keys.dtype
        # Gradients and compiled functions go through the host's own code.
        and not native.in_tracing()
    )


def _update(cache: Any, update: Callable[..., Any], keys: Any, values: Any) -> tuple[Any, Any]:
    begin = cache.offset
    end = cache.offset = begin + keys.shape[2]
    keys, values = cache.keys, cache.values = update(cache.keys, cache.values, keys, values, begin)
    if end == keys.shape[2]:
        return keys, values
    return keys[..., :end, :], values[..., :end, :]
