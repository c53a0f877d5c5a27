"""mlx-vlm's short-block projections.

``mlx_vlm.models.linear.native_batch_linear`` makes a block of 2..8 positions round as single positions do. It
reads the weights of any ``nn.QuantizedLinear`` and runs stock kernels on them, past the layer's own
``__call__``: an accelerated layer would answer at one position and stock at five, and drafts would be verified
against other bits than they were made with. Accelerated layers keep the promise by themselves (rows 1..16 are
row-invariant), so for them the function is routed to the layer.

Other modules hold the function by name, therefore its code is replaced and not the name.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_MODULE = "mlx_vlm.models.linear"
_ORIGINAL = "_accel_native_batch_linear"


def native_batch_linear(module, x):
    """Runs with the globals of mlx_vlm.models.linear."""
    slot = module.__dict__.get("_accel")
    if slot is None or slot.small is None:
        return _accel_native_batch_linear(module, x)  # type: ignore[name-defined]  # noqa: F821
    if x.ndim != 3 or x.size <= 16 * x.shape[-1]:
        return module(x)
    return tokenwise(module, x)  # type: ignore[name-defined]  # noqa: F821


def install() -> bool:
    """Route the function once; False if mlx-vlm's module is not imported or has no such function."""
    host: Any = sys.modules.get(_MODULE)
    function = getattr(host, "native_batch_linear", None)
    if not isinstance(function, types.FunctionType) or function.__closure__ or not hasattr(host, "tokenwise"):
        return False
    if not hasattr(host, _ORIGINAL):
        original = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        setattr(host, _ORIGINAL, original)
        function.__code__ = native_batch_linear.__code__
    return True


def uninstall() -> None:
    """Give the function its own code back."""
    host: Any = sys.modules.get(_MODULE)
    original = getattr(host, _ORIGINAL, None)
    if original is not None:
        host.native_batch_linear.__code__ = original.__code__
        delattr(host, _ORIGINAL)
