"""The product with t5 weights on the CPU, as a lazy mlx operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .layout import group_size_of
from .plugin import EXPERTS, FACTS, SYMBOL, library
from .words import words


def build(module: Any, *, kind: str = "linear") -> Callable[[mx.array], mx.array]:
    """The layer's product as a callable ``f(x)``: x (..., k) -> (..., n), any float dtype, any rows.

    module
        Holds ``weight`` (n, columns) uint8, ``scales`` (n, groups), and for kind ``linear`` possibly ``bias`` (n,),
        which is then added.

    The result has the dtype that the layer's own product has. Raises ValueError if the arrays do not fit each other,
    and what :func:`backend_core.cpu_kernel` raises.
    """
    from backend_core.cpu_kernel import like, result_type

    weight, scales = module["weight"], module["scales"]
    size = group_size_of(weight.shape, scales.shape)
    if weight.ndim != 2 or not size:
        raise ValueError(f"weight {weight.shape} and scales {scales.shape} are not those of a t5 matrix")
    arrays = [weight, scales]
    if kind == "linear" and "bias" in module:
        arrays.append(module["bias"])
    return _kernel(size).bind(
        arrays,
        output_shape=like(0, last=int(weight.shape[0])),
        output_dtype=result_type(0, *range(2, 1 + len(arrays))),
        params=[size, *facts(weight, scales, size)],
    )


def build_experts(module: Any) -> Callable[..., mx.array]:
    """The products of a layer with one matrix per expert, as ``f(x, indices, sorted_indices=False)``.

    module
        Holds ``weight`` (experts, n, columns) uint8, ``scales`` (experts, n, groups), possibly ``bias`` (experts, n).

    x (..., m, k) and indices (...), whose dimensions are those of mlx's ``gather_qmm``, give (..., m, n). An index that
    is no expert's makes the result NaN and raises RuntimeError at the next call. Raises ValueError if the arrays do not
    fit each other, and what :func:`backend_core.cpu_kernel` raises.
    """
    from backend_core.cpu_kernel import dim, dims, result_type

    weight, scales = module["weight"], module["scales"]
    size = group_size_of(weight.shape, scales.shape)
    if weight.ndim != 3 or not size:
        raise ValueError(f"weight {weight.shape} and scales {scales.shape} are not those of t5 experts")
    arrays = [weight, scales, *([module["bias"]] if "bias" in module else [])]
    flat = [a.reshape(-1, a.shape[-1]) for a in arrays[:2]]
    call = _experts(size).bind(
        arrays,
        output_shape=(dims(1), dim(0, -2), int(weight.shape[1])),
        output_dtype=result_type(0, *range(3, 2 + len(arrays))),
        params=[size, *facts(flat[0], flat[1], size)],
    )

    def product(x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if indices.dtype != mx.uint32:
            indices = indices.astype(mx.uint32)
        if x.ndim != indices.ndim + 2 or any(a not in (1, b) for a, b in zip(x.shape, indices.shape, strict=False)):
            lead = np.broadcast_shapes(tuple(x.shape[:-2]), tuple(indices.shape))
            x, indices = mx.broadcast_to(x, (*lead, *x.shape[-2:])), mx.broadcast_to(indices, lead)
        return call(x, indices)

    return product


def facts(weight: mx.array, scales: mx.array, group_size: int) -> list[float]:
    """What the kernel may take for granted about these weights: [spread, zeros], or nothing.

    spread
        How much more rounding errors of x count than the size of the weights says (see ``kernels/facts.h``). Decides
        which rows of x may be taken as fixed point.
    zeros
        The share of weights of zero in the row that has most of them.

    Empty on processors without AVX-512 VNNI and VBMI, where nobody asks.
    """
    from backend_core import native

    if not {"avx512_vnni", "avx512_vbmi"} <= set(native.status().isa_names):
        return []
    (known,) = _facts()(
        inputs=[mx.zeros((1, scales.shape[-1] * group_size)), weight, scales],
        output_shapes=[(2,)],
        output_dtypes=[mx.float32],
        params=[group_size],
    )
    return [float(v) for v in known.tolist()]


@functools.cache
def _facts() -> Any:
    from backend_core.cpu_kernel import cpu_kernel

    return cpu_kernel(library(), FACTS, name="t5/facts", ensure_row_contiguous=False)


@functools.cache
def _kernel(group_size: int) -> Any:
    """One kernel object per group size, since the gradient has to know it."""
    from backend_core.cpu_kernel import cpu_kernel

    vjp = functools.partial(_vjp, group_size=group_size)
    return cpu_kernel(library(), SYMBOL, name="t5/packed", ensure_row_contiguous=False, vjp=vjp)


@functools.cache
def _experts(group_size: int) -> Any:
    from backend_core.cpu_kernel import cpu_kernel

    vjp = functools.partial(_experts_vjp, group_size=group_size)
    return cpu_kernel(library(), EXPERTS, name="t5/experts", ensure_row_contiguous=False, vjp=vjp)


def _experts_vjp(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], argnums: Sequence[int], *, group_size: int
) -> list[mx.array]:
    """Stock's gradients for x, scales and bias, as :func:`_vjp`."""

    def stock(*chosen: mx.array) -> mx.array:
        arrays = list(primals)
        for i, a in zip(argnums, chosen, strict=True):
            arrays[i] = a
        x, indices, weight, scales, *bias = arrays
        y = mx.gather_qmm(
            x, words(weight, group_size), scales, -scales, rhs_indices=indices, transpose=True,
            group_size=group_size, bits=2,
        )  # fmt: skip
        return y + mx.expand_dims(bias[0][indices], -2) if bias else y

    _, gradients = mx.vjp(stock, [primals[i] for i in argnums], list(cotangents))
    return gradients


def _vjp(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], argnums: Sequence[int], *, group_size: int
) -> list[mx.array]:
    """Stock's gradients for x, scales and bias; differentiating the codes is stock's error."""

    def stock(*chosen: mx.array) -> mx.array:
        arrays = list(primals)
        for i, a in zip(argnums, chosen, strict=True):
            arrays[i] = a
        x, weight, scales, *bias = arrays
        y = mx.quantized_matmul(x, words(weight, group_size), scales, -scales, True, group_size, 2)
        return y + bias[0] if bias else y

    _, gradients = mx.vjp(stock, [primals[i] for i in argnums], list(cotangents))
    return gradients
