"""Slots of sites that are not modules: installed for a model, removed with it."""

from __future__ import annotations

from typing import Any

from ..probes_cache import UpdateSlot
from . import attention, cache, functions, logits, scope


def install(slot: Any, callers: tuple[Any, ...], owner: int) -> None:
    """Put a slot into effect for the calls that `callers` make, modules of the model with id `owner`."""
    if isinstance(slot, attention.AttentionSlot):
        attention.install(slot, owner)
    elif isinstance(slot, UpdateSlot):
        cache.install_update(slot, owner)
    elif isinstance(slot, logits.LogitsSlot):
        logits.install(slot, owner)
    else:
        functions.install(slot, callers, owner)
    for module in callers:
        scope.install(module, owner)


def uninstall(owner: int) -> int:
    """Remove everything that was installed for a model. Returns how many sites that were."""
    installed = (attention, cache, functions, logits)
    return sum(part.uninstall(owner) for part in installed)
