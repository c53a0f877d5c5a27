"""Model code that calls mlx's quantized operations itself, on weights that are t5.

A few models read ``layer.weight`` and ``layer.scales`` and call ``mx.quantized_matmul``, ``mx.gather_qmm`` or
``mx.dequantize``, past the layer. mlx refuses weights that are bytes, so that telling them apart costs one comparison
and changes no call that is right. Put in place when a checkpoint with t5 weights in such layers is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .layout import GROUP_BYTES
from .words import words

#: Positional parameters of each operation from the weights on.
_PARAMETERS = {
    "quantized_matmul": ("w", "scales", "biases", "transpose", "group_size", "bits", "mode"),
    "gather_qmm": (
        "w", "scales", "biases", "lhs_indices", "rhs_indices", "transpose", "group_size", "bits", "mode",
    ),
    "dequantize": ("w", "scales", "biases", "group_size", "bits", "mode", "global_scale", "dtype"),
}  # fmt: skip


def install() -> None:
    """Let the operations take t5 weights. Idempotent."""
    for name in _PARAMETERS:
        function = getattr(mx, name)
        if not hasattr(function, "_t5_original"):
            setattr(mx, name, _routed(name, function))


def uninstall() -> None:
    """Give mlx its own operations back."""
    for name in _PARAMETERS:
        if (original := getattr(getattr(mx, name), "_t5_original", None)) is not None:
            setattr(mx, name, original)


def _routed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    names = _PARAMETERS[name]
    before = 0 if name == "dequantize" else 1  # x

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        # Weights are positional only.
        if len(args) <= before or args[before].dtype != mx.uint8:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args[before:], strict=False)), **kwargs}
        w, scales = given.pop("w"), given.pop("scales", None)
        size = _group_size(w, scales)
        if not size or given.get("mode", "affine") != "affine":
            return original(*args, **kwargs)
        given.update(biases=-scales, group_size=size, bits=2)
        return original(*args[:before], words(w, size), scales, **given)

    function._t5_original = original  # type: ignore[attr-defined]
    return function


def _group_size(w: Any, scales: Any) -> int:
    """Any number of dimensions: rows may have been picked."""
    if scales is None or w.shape[:-1] != scales.shape[:-1] or not scales.shape[-1]:
        return 0
    return next((s for s, size in GROUP_BYTES.items() if w.shape[-1] == size * scales.shape[-1]), 0)
