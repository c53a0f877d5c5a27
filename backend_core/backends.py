"""Backends: what ``--backend NAME`` may name.

A backend is an object found through the entry-point group ``mlx_lm.backends``::

    [project.entry-points."mlx_lm.backends"]
    accel = "backend_core.backends:accel"

It has ``activate(options: list[str], command: str)``, called before a model is loaded with the
``--backend-option`` strings and the name of the running command (``"mlx_lm.generate"``, or ``""``), and
``deactivate()``. Bad options raise ValueError. ``mlx`` is always there and means stock.
"""

from __future__ import annotations

import importlib.metadata
from typing import Protocol

from .errors import UnknownBackend

ENTRY_POINT_GROUP = "mlx_lm.backends"
STOCK = "mlx"


class Backend(Protocol):
    """The interface of a backend object."""

    def activate(self, options: list[str], command: str) -> None:
        """Take effect for models loaded from now on."""

    def deactivate(self) -> None:
        """Undo :meth:`activate`."""


class Accel:
    """The backend of this project."""

    def activate(self, options: list[str], command: str) -> None:
        from .integrations import activate
        from .policy import Policy

        activate.enable(Policy.from_options(options), command=command)

    def deactivate(self) -> None:
        from .integrations import activate

        activate.disable()


class Stock:
    """mlx as it is."""

    def activate(self, options: list[str], command: str) -> None:
        if options:
            raise ValueError("--backend-option has no meaning with the stock backend mlx")

    def deactivate(self) -> None:
        pass


accel = Accel()
_active: tuple[str, Backend] | None = None


def names() -> list[str]:
    """All installed backends, ``mlx`` included."""
    return sorted({STOCK, *(e.name for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))})


def get(name: str) -> Backend:
    """The backend called `name`.

    Raises UnknownBackend, listing the names, if there is none, and quoting the cause if it cannot be
    imported.
    """
    if name == STOCK:
        return Stock()
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            try:
                return entry.load()  # type: ignore[no-any-return]
            except Exception as error:
                raise UnknownBackend(
                    f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
    raise UnknownBackend(f"unknown backend {name!r} (available: {', '.join(names())})")


def switch_to(name: str, options: list[str], command: str = "") -> None:
    """Make `name` the active backend; the one active before is deactivated.

    Raises UnknownBackend or ValueError; then nothing has changed.
    """
    global _active
    backend = get(name)
    previous = _active
    if previous is not None:
        previous[1].deactivate()
    try:
        backend.activate(options, command)
    except BaseException:
        if previous is not None:
            _active = None
        raise
    _active = (name, backend)


def active() -> str:
    """Name of the active backend."""
    return _active[0] if _active else STOCK
