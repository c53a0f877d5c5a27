"""Hooks: one offer, ``native``, for every op on the CPU that this library has a kernel for.

All offers take any number of rows, are of exactness ``rounding`` (``reference.py`` states the bounds) and
row-invariant, and read parameters where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

from .library import library

if TYPE_CHECKING:
    from backend_core.kernels_registry import Registry
    from backend_core.offers import Offer
    from backend_core.sites import OpSite

FLOATS = ("float32", "float16", "bfloat16")
GATED = ("swiglu", "swiglu_oai", "geglu", "geglu_approx")
ACTIVATIONS = ("silu", "gelu", "gelu_approx", "gelu_fast_approx", "relu2", *GATED)
LOGITS = ("logsumexp", "softmax", "argmax")
OTHERS = ("rms_norm", "residual_rms_norm", "layer_norm", "rope", "softcap", "residual", "lookup")
KERNELS = (*OTHERS, *ACTIVATIONS, *LOGITS)

Build = Callable[[Any], Callable[..., Any]]


@hookimpl
def register_kernels(registry: Registry) -> None:
    for name in KERNELS:
        registry.cpu(name=name, library=library(), symbol=f"host_ops_{name}", exactness="rounding")


@hookimpl
def select_op(site: OpSite) -> Offer | None:
    if site.device != "cpu" or site.x_dtype not in FLOATS or site.weight_dtype not in ("", *FLOATS):
        return None
    build = builder(site)
    if build is None:
        return None
    from backend_core.offers import Offer

    return Offer(
        name="native",
        build=build,
        exactness="bitwise" if site.op == "lookup" else "rounding",
        row_invariant=True,
        bytes_moved=_bytes_moved(site),
        copies=4 * site.rope_dims if site.op == "rope" else 4 * site.dims if site.variant == "one_plus" else 0,
        preference=10,
    )


def builder(site: OpSite) -> Build | None:
    """``build(module)`` for a site, or None if there is no kernel for it.

    The callables are f(x); f(gate, x) for gated activations, f(h, gate, x) for ``precise_swiglu``, f(x, y) for
    residual, f(x, offset) for rope. A softcap's variant is its cap; without one the callable is f(cap, x), as mlx-lm's
    ``logit_softcap``. The variant ``one_plus`` of rms_norm multiplies by 1 + weight. lookup is f(ids), rows of an
    affine quantized embedding as `out_dtype`.
    """
    if site.op == "rms_norm" and site.variant == "one_plus":
        return functools.partial(_rms_norm_one_plus, dtype=site.out_dtype)
    if site.op in ("rms_norm", "layer_norm") and not site.variant:
        return _rms_norm if site.op == "rms_norm" else _layer_norm
    if site.op == "rope" and site.rope_freqs:
        return _rope_by_frequencies
    if site.op == "rope":
        return _rope if site.rope_dims > 0 and site.rope_dims % 2 == 0 else None
    if site.op == "activation" and site.variant == "precise_swiglu":
        return lambda _: _ops().precise_swiglu()
    if site.op == "activation" and site.variant in ACTIVATIONS:
        return lambda _: _ops().activation(site.variant)
    if site.op == "logits" and site.variant in LOGITS:
        return lambda _: getattr(_ops(), site.variant)()
    if site.op == "residual":
        return lambda _: _ops().residual()
    if site.op == "lookup" and site.variant == "affine" and site.out_dtype in ("float32", site.weight_dtype):
        return functools.partial(_lookup, dtype=site.out_dtype)
    if site.op == "softcap" and not site.variant:
        return lambda _: _ops().logit_softcap()
    if site.op == "softcap":
        cap = _cap(site)
        return None if cap is None else lambda _: _ops().softcap(cap)
    return None


def _ops() -> Any:
    """Imported late: asking about sites that this plugin declines imports neither mlx nor numpy."""
    from . import ops

    return ops


def _rms_norm(module: Any) -> Callable[..., Any]:
    return _ops().rms_norm(module.get("weight"), module.eps)


def _rms_norm_one_plus(module: Any, *, dtype: str) -> Callable[..., Any]:
    import mlx.core as mx

    return _ops().rms_norm_one_plus(module["weight"], module.eps, getattr(mx, dtype))


def _layer_norm(module: Any) -> Callable[..., Any]:
    return _ops().layer_norm(module.get("weight"), module.get("bias"), module.eps)


def _lookup(module: Any, *, dtype: str) -> Callable[..., Any]:
    import mlx.core as mx

    arrays = (module["weight"], module["scales"], module["biases"])
    return _ops().lookup(*arrays, module.bits, module.group_size, getattr(mx, dtype))


def _rope(module: Any) -> Callable[..., Any]:
    return _ops().rope(module.dims, module.traditional, module.base, module.scale)


def _rope_by_frequencies(module: Any) -> Callable[..., Any]:
    from backend_core.rope import rotation_of

    rotation = rotation_of(module)
    if rotation is None:
        raise ValueError(f"{type(module).__name__} is no rotary embedding that is known")
    return _ops().rope_by_frequencies(rotation.frequencies, rotation.factor, rotation.traditional)


def _cap(site: OpSite) -> float | None:
    """The cap in a softcap's variant, or None if it is no positive number."""
    try:
        cap = float(site.variant)
    except ValueError:
        return None
    return cap if 0 < cap < float("inf") else None


def _bytes_moved(site: OpSite) -> int:
    from backend_core.sites import itemsize

    x = site.dims * itemsize(site.x_dtype)
    if site.op == "logits":
        return 2 * x if site.variant == "softmax" else x
    if site.op in ("rms_norm", "layer_norm"):
        parameters = 1 if site.op == "rms_norm" else 2
        return 2 * x + parameters * site.dims * (itemsize(site.weight_dtype) if site.weight_dtype else 0)
    return 3 * x if site.variant in GATED or site.op == "residual" else 2 * x
