"""The product with t5 weights on the CPU, as a lazy mlx operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .layout import group_size_of
from .plugin import FACTS, SYMBOL, library
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
