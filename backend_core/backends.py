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
from typing import NamedTuple, Protocol

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


class _Active(NamedTuple):
    name: str
    backend: Backend
    options: list[str]
    command: str


accel = Accel()
_active: _Active | None = None


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
                backend = entry.load()
            except (Exception, SystemExit) as error:
                raise UnknownBackend(f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
            for method in ("activate", "deactivate"):
                if not callable(getattr(backend, method, None)):
                    raise UnknownBackend(f"backend {name!r} cannot be used: {entry.value} has no {method}()")
            return backend
    raise UnknownBackend(f"unknown backend {name!r} (available: {', '.join(names())})")


def switch_to(name: str, options: list[str], command: str = "") -> None:
    """Make `name` the active backend; the one active before is deactivated.

    Raises UnknownBackend or ValueError; then the one active before is active again.
    """
    global _active
    backend = get(name)
    previous, _active = _active, None
    if previous is not None:
        previous.backend.deactivate()
    try:
        backend.activate(options, command)
    except BaseException:
        if previous is not None:
            previous.backend.activate(previous.options, previous.command)
            _active = previous
        raise
    _active = _Active(name, backend, options, command)


def active() -> str:
    """Name of the active backend."""
    return _active.name if _active else STOCK
