"""Slots of sites that are not modules: installed for a model, removed with it."""

from __future__ import annotations

from . import attention, functions


def install(slot: attention.AttentionSlot | functions.FunctionSlot, owner: int) -> None:
    """Put a slot into effect on behalf of the model with id `owner`."""
    if isinstance(slot, attention.AttentionSlot):
        attention.install(slot, owner)
    else:
        functions.install(slot, owner)


def uninstall(owner: int) -> int:
    """Remove everything that was installed for a model. Returns how many sites that were."""
    return attention.uninstall(owner) + functions.uninstall(owner)
