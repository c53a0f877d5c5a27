"""What the start-up hook calls around the import of a host package."""

from __future__ import annotations

import os
import sys


def before_import(host: str) -> None:
    """Parsers may be built while the package's own code runs, so the options come first."""
    from . import arguments

    arguments.install()


def after_import(host: str) -> None:
    """For programs that use the package as a library: the environment turns the backend on."""
    from .. import backends
    from . import activate, hints

    hints.install(host)
    if activate.enabled():
        activate.patch(host)
        return
    name = os.environ.get("MLX_ACCEL_BACKEND", "")
    if name in ("", backends.STOCK) or backends.active() != backends.STOCK:
        return
    try:
        backends.switch_to(name, [])
    except Exception as error:
        sys.stderr.write(f"[accel] MLX_ACCEL_BACKEND={name}: {error}\n")
