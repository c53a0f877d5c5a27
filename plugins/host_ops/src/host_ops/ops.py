"""The operations as callables on mlx arrays.

Each function here is given what does not change between calls and returns a callable for the rest. All of them are
lazy, take any float dtype and any strides, work under ``mx.compile``, and have stock's gradients and result dtypes.
They raise what :func:`backend_core.cpu_kernel` raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend_core import native
from backend_core.cpu_kernel import CpuKernel, cpu_kernel, like, result_type
from backend_core.cpu_kernel import dims as dims_of

from .library import library


def rms_norm(weight: mx.array | None, eps: float) -> Callable[[mx.array], mx.array]:
    """``mx.fast.rms_norm(x, weight, eps)`` as a function of x (..., n); weight (n,)."""
    return _bound_rms_norm(weight, eps, None)


def rms_norm_one_plus(weight: mx.array, eps: float, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    """``mx.fast.rms_norm(x, 1 + weight, eps)`` as a function of x: 1 + weight in float32, the result of `dtype`."""
    return _bound_rms_norm(1.0 + weight.astype(mx.float32), eps, dtype)


def _bound_rms_norm(weight: mx.array | None, eps: float, dtype: Any) -> Callable[[mx.array], mx.array]:
    fixed = [] if weight is None else [weight]
    result = result_type(*range(1 + len(fixed))) if dtype is None else dtype
    return _rms_norm(float(eps), dtype).bind(fixed, output_shape=like(0), output_dtype=result, params=[float(eps)])


@functools.cache
def _rms_norm(eps: float, dtype: Any) -> CpuKernel:
    def stock(x: mx.array, weight: mx.array | None = None) -> mx.array:
        y = mx.fast.rms_norm(x, weight, eps)
        return y if dtype is None else y.astype(dtype)

    return _kernel("rms_norm", stock)


def residual_rms_norm(weight: mx.array | None, eps: float) -> Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]:
    """``s = x + residual; s, mx.fast.rms_norm(s, weight, eps)`` as a function of x and residual, of one shape."""
    fixed = [] if weight is None else [weight]
    kernel, eps = _residual_rms_norm(float(eps)), float(eps)
    shapes, dtypes = [like(0), like(0)], [result_type(0, 1), result_type(*range(2 + len(fixed)))]

    def both(x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        total, normed = kernel(inputs=[x, residual, *fixed], output_shapes=shapes, output_dtypes=dtypes, params=[eps])
        return total, normed

    return both


@functools.cache
def _residual_rms_norm(eps: float) -> CpuKernel:
    def stock(x: mx.array, residual: mx.array, weight: mx.array | None = None) -> list[mx.array]:
        total = x + residual
        return [total, mx.fast.rms_norm(total, weight, eps)]

    return _kernel("residual_rms_norm", stock)


def layer_norm(weight: mx.array | None, bias: mx.array | None, eps: float) -> Callable[[mx.array], mx.array]:
    """``mx.fast.layer_norm(x, weight, bias, eps)`` as a function of x (..., n); weight and bias (n,)."""
    fixed = [a for a in (weight, bias) if a is not None]
    has_weight, has_bias = weight is not None, bias is not None
    # Without a weight, stock's result has the dtype of x, whatever the bias.
    dtype = result_type(*range(1 + len(fixed))) if has_weight else like(0)
    params = [float(eps), int(has_weight), int(has_bias)]
    kernel = _layer_norm(float(eps), has_weight, has_bias)
    return kernel.bind(fixed, output_shape=like(0), output_dtype=dtype, params=params)


@functools.cache
def _layer_norm(eps: float, has_weight: bool, has_bias: bool) -> CpuKernel:
    def stock(x: mx.array, *rest: mx.array) -> mx.array:
        weight = rest[0] if has_weight else None
        return mx.fast.layer_norm(x, weight, rest[-1] if has_bias else None, eps)

    return _kernel("layer_norm", stock)


def activation(variant: str) -> Callable[..., mx.array]:
    """One of :data:`ACTIVATIONS`: a function of one array, or of gate and x, two arrays of one shape.

    Raises KeyError for another variant.
    """
    inputs, _ = ACTIVATIONS[variant]
    dtype = result_type(*range(inputs))
    return _activation(variant).bind(output_shape=like(0), output_dtype=dtype, params=PARAMETERS.get(variant, ()))


@functools.cache
def _activation(variant: str) -> CpuKernel:
    return _kernel(variant, ACTIVATIONS[variant][1])


#: Number of inputs, and stock's function.
ACTIVATIONS: dict[str, tuple[int, Callable[..., mx.array]]] = {
    "silu": (1, nn.silu),
    "gelu": (1, nn.gelu),
    "gelu_approx": (1, nn.gelu_approx),
    "gelu_fast_approx": (1, nn.gelu_fast_approx),
    "relu2": (1, nn.relu2),
    "swiglu_oai": (2, lambda gate, x: _stock_swiglu_oai(gate, x, *PARAMETERS["swiglu_oai"])),
    "swiglu": (2, lambda gate, x: nn.silu(gate) * x),
    "geglu": (2, lambda gate, x: nn.gelu(gate) * x),
    "geglu_approx": (2, lambda gate, x: nn.gelu_approx(gate) * x),
}


#: Parameters of kernels: alpha and limit of GPT-OSS's activation.
PARAMETERS: dict[str, tuple[float, ...]] = {"swiglu_oai": (1.702, 7.0)}


def _stock_swiglu_oai(gate: mx.array, x: mx.array, alpha: float, limit: float) -> mx.array:
    gate, x = mx.minimum(gate, limit), mx.clip(x, -limit, limit)
    return (x + 1.0) * (gate * mx.sigmoid(alpha * gate))


def precise_swiglu() -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """``silu(gate) * x`` in float32 and in the dtype of h, as a function of h, gate and x; gate and x of one shape."""
    known: dict[Any, Callable[[mx.array, mx.array], mx.array]] = {}

    def gated(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
        bound = known.get(h.dtype)
        if bound is None:
            bound = known[h.dtype] = _activation("swiglu").bind(output_shape=like(0), output_dtype=h.dtype)
        return bound(gate, x)

    return gated


def softcap(cap: float) -> Callable[[mx.array], mx.array]:
    """``cap * mx.tanh(x / cap)`` as a function of x."""
    return _softcap(float(cap)).bind(output_shape=like(0), output_dtype=like(0), params=[float(cap)])


def logit_softcap() -> Callable[[Any, mx.array], mx.array]:
    """``cap * mx.tanh(x / cap)`` as a function of cap and x."""
    known: dict[Any, Callable[[mx.array], mx.array]] = {}

    def capped(cap: Any, x: mx.array) -> mx.array:
        bound = known.get(cap) if type(cap) is float else None
        if bound is None:
            if type(cap) not in (int, float) or cap <= 0:
                return mx.tanh(x / cap) * cap
            bound = softcap(cap)
            if len(known) < 16:
                known[float(cap)] = bound
        return bound(x)

    return capped


@functools.cache
def _softcap(cap: float) -> CpuKernel:
    return _kernel("softcap", lambda x: mx.tanh(x / cap) * cap)


def residual() -> Callable[[mx.array, mx.array], mx.array]:
    """``x + y`` for two arrays of one shape."""
    return _residual().bind(output_shape=like(0), output_dtype=result_type(0, 1))


@functools.cache
def _residual() -> CpuKernel:
    return _kernel("residual", lambda x, y: x + y)


def logsumexp() -> Callable[[mx.array], mx.array]:
    """``mx.logsumexp(x, axis=-1, keepdims=True)`` as a function of x."""
    return _logits("logsumexp").bind(output_shape=like(0, last=1), output_dtype=like(0))


def softmax() -> Callable[[mx.array], mx.array]:
    """``mx.softmax(x, axis=-1)`` as a function of x."""
    return _logits("softmax").bind(output_shape=like(0), output_dtype=like(0))


def argmax() -> Callable[[mx.array], mx.array]:
    """``mx.argmax(x, axis=-1)`` as a function of x: uint32, the first of equals, the first NaN if there is one."""
    return _logits("argmax").bind(output_shape=dims_of(0, 0, -1), output_dtype=mx.uint32)


@functools.cache
def _logits(variant: str) -> CpuKernel:
    return _kernel(variant, _STOCK_LOGITS[variant])


_STOCK_LOGITS: dict[str, Callable[[mx.array], mx.array]] = {
    "logsumexp": lambda x: mx.logsumexp(x, axis=-1, keepdims=True),
    "softmax": lambda x: mx.softmax(x, axis=-1),
    "argmax": lambda x: mx.argmax(x, axis=-1),
}


def lookup(
    weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int, dtype: mx.Dtype
) -> Callable[[mx.array], mx.array]:
    """``mx.dequantize`` of the rows ids of a table, in stock's bits: a function of ids (...), integers, -> (..., k).

    weight, scales, biases
        (V, k * bits / 32), (V, k / group_size) twice: mlx's affine format.
    dtype
        That of scales and biases, or float32: then they are widened first.
    """
    k = scales.shape[-1] * group_size
    return _lookup(bits, group_size).bind(
        [weight, scales, biases], output_shape=(dims_of(0, 0), k), output_dtype=dtype, params=[bits, group_size]
    )


@functools.cache
def _lookup(bits: int, group_size: int) -> CpuKernel:
    def stock(ids: mx.array, weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(weight[ids], scales[ids], biases[ids], group_size=group_size, bits=bits)

    return _kernel("lookup", stock)


def frequencies(dims: int, base: float, scale: float) -> np.ndarray:
    """What a position is multiplied with to get the angles of the dims / 2 pairs; float64."""
    return scale * np.float64(base) ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def rope(dims: int, traditional: bool, base: float, scale: float) -> Callable[..., mx.array]:
    """``mx.fast.rope`` as a function f(x, offset=0) of x (..., L, D), D >= dims.

    offset
        An int, or an array of integers: one, or one per sequence (x.shape[0]).

    Raises ValueError if dims is not a positive even number.
    """
    if dims <= 0 or dims % 2:
        raise ValueError(f"dims must be a positive even number, not {dims}")
    stock = functools.partial(_stock_rope, dims=dims, traditional=traditional, base=base, scale=scale)
    return _rotation(_rope(dims, traditional, base, scale), frequencies(dims, base, scale), traditional, stock)


def rope_by_frequencies(
    frequencies: np.ndarray, factor: float = 1.0, traditional: bool = False
) -> Callable[..., mx.array]:
    """Rotary positions with any frequencies as a function f(x, offset=0), as :func:`rope`.

    frequencies
        (dims / 2,): pair i of a row at position p turns by ``p * frequencies[i]``.
    factor
        The rotated elements are multiplied by it; those behind them are copied.

    Raises ValueError if there are no frequencies.
    """
    table = np.array(frequencies, np.float64)
    if table.ndim != 1 or not table.size:
        raise ValueError(f"frequencies must be a vector, not an array of shape {table.shape}")
    if factor != 1.0:
        table = np.stack([table, np.full_like(table, factor)])
    kernel = _rope_by_frequencies(traditional)
    stock = functools.partial(_stock_rope_by_frequencies, table=mx.array(table, dtype=mx.float64), way=traditional)
    return _rotation(kernel, table, traditional, stock)


def _rotation(
    kernel: CpuKernel, values: np.ndarray, traditional: bool, stock: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    table = mx.array(values, dtype=mx.float64)
    turn = kernel.bind([table], output_shape=like(0), output_dtype=like(0), params=[0, int(traditional)])
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

    # For who runs several kernels as one primitive: turn(x, params=[offset, way]).
    rotated.turn, rotated.way = turn, way  # type: ignore[attr-defined]
    return rotated


_OFFSETS = (mx.int32, mx.int64)


@functools.cache
def _rope(dims: int, traditional: bool, base: float, scale: float) -> CpuKernel:
    return _kernel(
        "rope",
        lambda x, *rest: _stock_rope(x, _offset(rest), dims=dims, traditional=traditional, base=base, scale=scale),
    )


@functools.cache
def _rope_by_frequencies(traditional: bool) -> CpuKernel:
    return _kernel(
        "rope",
        lambda x, *rest: _stock_rope_by_frequencies(x, _offset(rest), table=rest[-1], way=traditional),
    )


def _offset(inputs: Sequence[mx.array]) -> mx.array:
    """The offset among the kernel's inputs behind x."""
    if len(inputs) < 2:
        raise RuntimeError("host_ops/rope: the offset of this call is not known to its gradient")
    return inputs[0]


def _stock_rope(
    x: mx.array, offset: int | mx.array, *, dims: int, traditional: bool, base: float, scale: float
) -> mx.array:
    return mx.fast.rope(x, dims, traditional=traditional, base=base, scale=scale, offset=offset)


def _stock_rope_by_frequencies(x: mx.array, offset: int | mx.array, *, table: mx.array, way: bool) -> mx.array:
    # Stock is given periods, and multiplies x before it turns it.
    frequencies = table if table.ndim == 1 else table[0]
    dims = 2 * frequencies.size
    with mx.stream(mx.cpu):
        periods = (1.0 / frequencies).astype(mx.float32)
        factor = None if table.ndim == 1 else table[1, :1].astype(x.dtype)
    if factor is not None:
        x = mx.concatenate([x[..., :dims] * factor, x[..., dims:]], axis=-1)
    return mx.fast.rope(x, dims, traditional=way, base=None, scale=1.0, offset=offset, freqs=periods)


def _kernel(name: str, stock: Callable[..., Any]) -> CpuKernel:
    """The kernel ``host_ops_<name>`` with the gradients of `stock`, a function of the kernel's inputs."""
    return cpu_kernel(
        library(),
        f"host_ops_{name}",
        name=f"host_ops/{name}",
        ensure_row_contiguous=False,
        vjp=functools.partial(_vjp, stock),
    )


def _vjp(
    stock: Callable[..., Any],
    primals: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    argnums: Sequence[int],
) -> list[mx.array]:
    def chosen(*arrays: mx.array) -> Any:
        inputs = list(primals)
        for i, a in zip(argnums, arrays, strict=True):
            inputs[i] = a
        return stock(*inputs)

    _, gradients = mx.vjp(chosen, [primals[i] for i in argnums], list(cotangents))
    return gradients
