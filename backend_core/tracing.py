"""Whether mlx is tracing right now (``mx.compile``, ``mx.grad``, export).

Python cannot see this; the native module can. Without it both answers are False, and a layer whose table
depends on the number of rows must not be traced with ``shapeless=True``.
"""

from __future__ import annotations

from typing import Any

from . import native


def in_tracing(array: Any) -> bool:
    """True if `array` is a placeholder of a trace, so that it has no value yet."""
    state = native.status()
    return bool(native.get().in_tracing(array)) if state.available else False


def in_dynamic_tracing() -> bool:
    """True inside a shapeless trace, where the shapes seen now are not those of later calls."""
    state = native.status()
    return bool(native.get().in_dynamic_tracing()) if state.available else False
