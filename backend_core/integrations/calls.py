"""Slots of sites that are not modules: installed for a model, removed with it."""

from __future__ import annotations

from typing import Any

from . import attention, functions, scope


def install(slot: attention.AttentionSlot | functions.FunctionSlot, callers: tuple[Any, ...], owner: int) -> None:
    """Put a slot into effect for the calls that `callers` make, modules of the model with id `owner`."""
    if isinstance(slot, attention.AttentionSlot):
        attention.install(slot, owner)
    else:
        functions.install(slot, owner)
    for module in callers:
        scope.install(module, owner)


def uninstall(owner: int) -> int:
    """Remove everything that was installed for a model. Returns how many sites that were."""
    return attention.uninstall(owner) + functions.uninstall(owner)
