"""Model code that calls mlx's quantized operations itself, on weights that are t5.

A few models read ``layer.weight`` and ``layer.scales`` and call ``mx.quantized_matmul``, ``mx.gather_qmm`` or
``mx.dequantize``, past the layer. mlx refuses weights that are bytes, so that telling them apart costs one comparison
and changes no call that is right. Put in place when a checkpoint with t5 weights in such layers is loaded.
"""

from __future__ import annotations

import functools
import weakref
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
        if name == "quantized_matmul" and given.get("transpose", True) and "stream" not in given:
            product = _product(args[0], w, scales)
            if product is not None:
                return product(args[0])
        given.update(biases=-scales, group_size=size, bits=2)
        return original(*args[:before], words(w, size), scales, **given)

    function._t5_original = original  # type: ignore[attr-defined]
    return function


#: Modules whose products a kernel may compute, and those that were built: id of the weights and dtype of x, which says
#: something on GPUs only -> (module, product).
_watched: list[weakref.ref[Any]] = []
_products: dict[tuple[int, mx.Dtype | None], tuple[weakref.ref[Any], Callable[[mx.array], mx.array] | None]] = {}


def watch(module: Any) -> None:
    """Let products with this module's weights be computed by the kernel, as long as it lives and holds them."""
    _watched[:] = [r for r in _watched if r() is not None]
    _watched.append(weakref.ref(module))


def _product(x: mx.array, w: mx.array, scales: mx.array) -> Callable[[mx.array], mx.array] | None:
    """The kernel's product with the weights of a watched module; None where there is no kernel for it."""
    from backend_core.machine import default_device

    if w.ndim != 2:
        return None
    device = default_device()
    key = (id(w), None if device == "cpu" else x.dtype)
    found = _products.get(key)
    if found is not None and (module := found[0]()) is not None and _holds(module, w, scales):
        return found[1]
    module = next((m for r in _watched if (m := r()) is not None and _holds(m, w, scales)), None)
    if module is None:
        return None
    product = _on_cpu(w, scales) if device == "cpu" else _on_gpu(device, x, w, scales)
    _products[key] = (weakref.ref(module), product)
    weakref.finalize(module, _products.pop, key, None)
    return product


def _on_cpu(w: mx.array, scales: mx.array) -> Callable[[mx.array], mx.array] | None:
    from backend_core import native

    if not native.available():
        return None
    from .product import build

    return build({"weight": w, "scales": scales})


def _on_gpu(device: str, x: mx.array, w: mx.array, scales: mx.array) -> Callable[[mx.array], mx.array] | None:
    from backend_core import simt

    from . import gpu_offers

    size, names = _group_size(w, scales), [str(d).rpartition(".")[2] for d in (x.dtype, scales.dtype)]
    facts = {
        "rows": 1, "n": w.shape[0], "k": scales.shape[1] * size, "group_size": size, "x_dtype": names[0],
        "scales_dtype": names[1], "out_dtype": names[0] if names[0] == names[1] else "float32", "has_bias": False,
        "device": device,
    }  # fmt: skip
    family = simt.family_for(gpu_offers.FAMILIES, facts)
    product = None if family is None else gpu_offers.product(family, facts, (w, scales, scales))
    return product if product is not None and _agrees(product, x.dtype, w, scales, size) else None


def _agrees(product: Callable[[mx.array], mx.array], dtype: mx.Dtype, w: mx.array, scales: mx.array, size: int) -> bool:
    """Whether a product of one row is what mlx's is. Nobody else verifies what direct callers get."""
    x = mx.random.normal((1, scales.shape[1] * size), key=mx.random.key(0)).astype(dtype)
    codes, wide = words(w, size), scales.astype(mx.float32)
    want = mx.quantized_matmul(x.astype(mx.float32), codes, wide, -wide, True, size, 2)
    try:
        have = product(x).astype(mx.float32)
        # A unit in the last place of bfloat16 at the largest result, and as much for sums.
        return bool((mx.abs(have - want).max() <= mx.abs(want).max() / 64).item())
    except Exception:  # what a compiler or a driver says is a no
        return False


def _holds(module: Any, w: mx.array, scales: mx.array) -> bool:
    return module.get("weight") is w and module.get("scales") is scales


def _group_size(w: Any, scales: Any) -> int:
    """Any number of dimensions: rows may have been picked."""
    if scales is None or w.shape[:-1] != scales.shape[:-1] or not scales.shape[-1]:
        return 0
    return next((s for s, size in GROUP_BYTES.items() if w.shape[-1] == size * scales.shape[-1]), 0)
