"""Hooks: one offer for every dense or microscaling linear layer and output embedding on the CPU.

The offer is ``dense`` or the name of the microscaling mode: any rows, any dtypes that stock accepts, exactness
``rounding``, row-invariant. The weights are used where they lie; nothing is copied or repacked.
"""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

if TYPE_CHECKING:
    import mlx.core as mx

    from backend_core.kernels_registry import Registry
    from backend_core.offers import Offer
    from backend_core.sites import LinearSite

FLOATS = ("float32", "float16", "bfloat16")
KINDS = ("linear", "embedding")
#: mode -> (bits, group_size) and the kernel's parameter `format`; see kernels/formats.h.
MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
FORMATS = {"dense": 0, "mxfp4": 3, "nvfp4": 4, "mxfp8": 5}

SYMBOL = "host_linear_matmul"


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "host_linear.dylib" if sys.platform == "darwin" else "host_linear.so"
    return importlib.resources.files("host_linear") / "kernels" / name


@hookimpl
def register_kernels(registry: Registry) -> None:
    registry.cpu(name="matmul", library=library(), symbol=SYMBOL, exactness="rounding")


@hookimpl
def select_linear(site: LinearSite) -> Offer | None:
    if site.device != "cpu" or site.kind not in KINDS or site.x_dtype not in FLOATS or site.out_dtype not in FLOATS:
        return None
    if site.mode == "dense":
        if site.weight_dtype not in FLOATS:
            return None
    elif MODES.get(site.mode) != (site.bits, site.group_size) or site.scales_dtype != "uint8":
        return None
    from backend_core.offers import Offer
    from backend_core.sites import itemsize

    # A site does not tell the bias's dtype; it is that of dense weights, or else of the result.
    bias = site.n * itemsize(site.weight_dtype if site.mode == "dense" else site.out_dtype) if site.has_bias else 0
    form = site.weight_dtype if site.mode == "dense" else site.mode
    return Offer(
        name=site.mode,
        build=functools.partial(build, mode=site.mode, n=site.n, k=site.k, kind=site.kind),
        exactness="rounding",
        row_invariant=True,
        bytes_moved=site.weight_bytes + bias + site.k * itemsize(site.x_dtype) + site.n * itemsize(site.out_dtype),
        preference=10,
        note=f"{form} weights widened in registers, sums in float32",
    )


def build(module: Any, *, mode: str, n: int, k: int, kind: str = "linear") -> Callable[[mx.array], mx.array]:
    """The layer's product as a callable ``f(x)``: x (..., k) -> (..., n), any float dtype, any rows.

    module
        Holds ``weight``: (n, k) float32, float16 or bfloat16 for mode ``dense``, else (n, k * bits // 32) uint32
        with ``scales`` (n, k // group_size) uint8; and for kind ``linear`` possibly ``bias`` (n,), which is added.

    The result has the dtype that stock's has. Raises ValueError if the arrays do not fit each other or if there is
    a ``global_scale``, which stock's product of a linear layer does not know either; KeyError for an unknown mode;
    and what :func:`backend_core.cpu_kernel` raises.
    """
    from backend_core.cpu_kernel import like, result_type

    arrays = [module["weight"]]
    if mode == "dense":
        wanted = (n, k)
    else:
        bits, group_size = MODES[mode]
        wanted = (n, k * bits // 32)
        arrays.append(module["scales"])
        if arrays[1].shape != (n, k // group_size):
            raise ValueError(f"scales are {arrays[1].shape}, not (n, k / group_size) = {(n, k // group_size)}")
        if module.get("global_scale") is not None:
            raise ValueError("a global_scale is not supported")
    if arrays[0].shape != wanted:
        raise ValueError(f"weight is {arrays[0].shape}, not {wanted}")
    # Inputs whose dtypes make stock's result: x, dense weights, bias.
    typed = [0, 1] if mode == "dense" else [0]
    if kind == "linear" and "bias" in module:
        if module["bias"].shape != (n,):
            raise ValueError(f"bias is {module['bias'].shape}, not {(n,)}")
        arrays.append(module["bias"])
        typed.append(len(arrays))
    return _kernel(mode).bind(
        arrays,
        output_shape=like(0, last=n),
        output_dtype=result_type(*typed),
        params=[FORMATS[mode]],
    )


@functools.cache
def _kernel(mode: str) -> Any:
    """One kernel object per mode, since the gradient has to know the format."""
    from backend_core.cpu_kernel import cpu_kernel

    return cpu_kernel(
        library(),
        SYMBOL,
        name=f"host_linear/{mode}",
        ensure_row_contiguous=False,
        vjp=functools.partial(_vjp, mode=mode),
    )


def _vjp(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], argnums: Sequence[int], *, mode: str
) -> list[mx.array]:
    """Stock's gradients for x, dense weights and bias; differentiating codes is stock's error."""
    import mlx.core as mx

    def stock(*chosen: mx.array) -> mx.array:
        arrays = list(primals)
        for i, a in zip(argnums, chosen, strict=True):
            arrays[i] = a
        if mode == "dense":
            x, weight, *bias = arrays
            y = x @ weight.T
        else:
            x, weight, scales, *bias = arrays
            bits, group_size = MODES[mode]
            y = mx.quantized_matmul(x, weight, scales, None, True, group_size, bits, mode)
        return y + bias[0] if bias else y

    _, gradients = mx.vjp(stock, [primals[i] for i in argnums], list(cotangents))
    return gradients
