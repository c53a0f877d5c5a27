"""The operations as callables on mlx arrays.

Each function here is given what does not change between calls and returns a callable for the rest. All of them are
lazy, take any float dtype and any strides, work under ``mx.compile``, and have stock's gradients and result dtypes.
They raise what :func:`backend_core.cpu_kernel` raises.
"""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from backend_core import native
from backend_core.cpu_kernel import CpuKernel, cpu_kernel, like, result_type


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "host_ops.dylib" if sys.platform == "darwin" else "host_ops.so"
    return importlib.resources.files("host_ops") / "kernels" / name


def rms_norm(weight: mx.array | None, eps: float) -> Callable[[mx.array], mx.array]:
    """``mx.fast.rms_norm(x, weight, eps)`` as a function of x (..., n); weight (n,)."""
    fixed = [] if weight is None else [weight]
    return _norm("rms_norm", eps).bind(
        fixed, output_shape=like(0), output_dtype=result_type(*range(1 + len(fixed))), params=[float(eps)]
    )


@functools.cache
def _norm(name: str, eps: float) -> CpuKernel:
    stock = {"rms_norm": _stock_rms_norm}[name]
    return _kernel(name, functools.partial(stock, eps=eps))


def _stock_rms_norm(x: mx.array, weight: mx.array | None = None, *, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)


def frequencies(dims: int, base: float, scale: float) -> mx.array:
    """What a position is multiplied with to get the angles of the dims / 2 pairs; float64."""
    import numpy as np

    return _float64(scale * np.power(np.float64(base), -np.arange(0, dims, 2, dtype=np.float64) / dims))


def _float64(values: Any) -> mx.array:
    return mx.array(values, dtype=mx.float64)


def rope(dims: int, traditional: bool, base: float, scale: float) -> Callable[..., mx.array]:
    """``mx.fast.rope`` as a function f(x, offset=0) of x (..., L, D), D >= dims.

    offset
        An int, or an array of integers: one, or one per sequence (x.shape[0]).

    Raises ValueError if dims is not a positive even number.
    """
    if dims <= 0 or dims % 2:
        raise ValueError(f"dims must be a positive even number, not {dims}")
    table = frequencies(dims, base, scale)
    kernel = _rope(dims, traditional, base, scale)
    turn = kernel.bind([table], output_shape=like(0), output_dtype=like(0), params=[0, int(traditional)])
    stock = functools.partial(_stock_rope, dims=dims, traditional=traditional, base=base, scale=scale)
    in_tracing, way = native.in_tracing, int(traditional)

    def rotated(x: mx.array, offset: Any = 0) -> mx.array:
        # As a parameter the offset costs nothing, but gradients see inputs only.
        if type(offset) is int and not in_tracing(x):
            return turn(x, params=[offset, way])
        if not isinstance(offset, mx.array):
            offset = mx.array(int(offset))
        if offset.dtype not in _OFFSETS or offset.ndim > 1 or x.ndim < 3:
            return stock(x, offset)  # which raises, or knows better
        return turn(x, offset)

    return rotated


_OFFSETS = (mx.int32, mx.int64)


@functools.cache
def _rope(dims: int, traditional: bool, base: float, scale: float) -> CpuKernel:
    def stock(x: mx.array, *rest: mx.array) -> mx.array:
        if len(rest) < 2:
            raise RuntimeError("host_ops/rope: the offset of this call is not known to its gradient")
        return _stock_rope(x, rest[0], dims=dims, traditional=traditional, base=base, scale=scale)

    return _kernel("rope", stock)


def _stock_rope(
    x: mx.array, offset: int | mx.array, *, dims: int, traditional: bool, base: float, scale: float
) -> mx.array:
    return mx.fast.rope(x, dims, traditional=traditional, base=base, scale=scale, offset=offset)


def _kernel(name: str, stock: Callable[..., mx.array]) -> CpuKernel:
    """The kernel ``host_ops_<name>`` with the gradients of `stock`, a function of the kernel's inputs."""
    return cpu_kernel(
        library(),
        f"host_ops_{name}",
        name=f"host_ops/{name}",
        ensure_row_contiguous=False,
        vjp=functools.partial(_vjp, stock),
    )


def _vjp(
    stock: Callable[..., mx.array],
    primals: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    argnums: Sequence[int],
) -> list[mx.array]:
    def chosen(*arrays: mx.array) -> mx.array:
        inputs = list(primals)
        for i, a in zip(argnums, arrays, strict=True):
            inputs[i] = a
        return stock(*inputs)

    _, gradients = mx.vjp(chosen, [primals[i] for i in argnums], list(cotangents))
    return gradients
