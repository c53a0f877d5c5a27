"""The operations in numpy float64, and how far a kernel may be off.

Every function takes the exact values of its inputs, in any float dtype, and the name of the result's dtype, and returns
``(y64, allowed)``: what is to be computed and the largest allowed |y - y64| of the exactness class ``rounding``. The
allowance is one unit in the last place of the result's dtype, for the final rounding, and what float32 arithmetic may
lose on the way, in units of u = 2**-24 (half a unit in the last place of a float32).

Where y64 is not finite, or beyond the dtype's range, :func:`errors` asks for the same infinity or NaN.

Plain and slow on purpose; nothing here is used at run time.
"""

from __future__ import annotations

import math

import numpy as np

U = 2.0**-24

_FORMATS = {"float32": (24, -149, 2.0**128), "float16": (11, -24, 2.0**16), "bfloat16": (8, -133, 2.0**128)}

Result = tuple[np.ndarray, np.ndarray]


def ulp(y: np.ndarray, dtype: str) -> np.ndarray:
    """The distance between neighbours of `dtype` ("float32", "float16", "bfloat16") at |y|, float64."""
    digits, smallest, _ = _FORMATS[dtype]
    y = np.abs(np.asarray(y, np.float64))
    _, exponent = np.frexp(np.where((y > 0) & (y < np.inf), y, 2.0**smallest))
    return np.exp2(np.maximum(exponent - digits, smallest).astype(np.float64))


def errors(y: np.ndarray, result: Result, dtype: str) -> np.ndarray:
    """|y - y64| / allowed for a kernel's y; 0 where y is the NaN or infinity that it must be, inf where it is not."""
    y64, allowed = result
    y = np.asarray(y, np.float64)
    beyond = _FORMATS[dtype][2]
    y64, allowed = np.broadcast_to(y64, y.shape), np.broadcast_to(allowed, y.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(y - y64) / allowed
        # Numbers from half a unit below the first one that the dtype does not have round to infinity.
        clipped = np.where(np.abs(y64) + allowed >= beyond, np.copysign(np.inf, y64), np.nan)
    error = np.where((y == y64) | (y == clipped), 0.0, error)
    return np.where(np.isnan(y64), np.where(np.isnan(y), 0.0, np.inf), np.where(np.isnan(error), np.inf, error))


def _double(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in arrays]


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float, dtype: str) -> Result:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis. 1 ulp + 16 u |y64|."""
    (x,) = _double(x)
    with np.errstate(all="ignore"):
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        if weight is not None:
            y = y * np.asarray(weight, np.float64)
        return y, ulp(y, dtype) + 16 * U * np.abs(y)


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float, dtype: str) -> Result:
    """(x - mean) / sqrt(var + eps) * weight + bias along the last axis.

    1 ulp + 16 u (|(y64 - bias)| + |bias|): the difference to the mean is as exact as the result's other factors.
    """
    (x,) = _double(x)
    with np.errstate(all="ignore"):
        d = x - np.mean(x, axis=-1, keepdims=True)
        scaled = d / np.sqrt(np.mean(d * d, axis=-1, keepdims=True) + eps)
        if weight is not None:
            scaled = scaled * np.asarray(weight, np.float64)
        shift = np.zeros(x.shape[-1:]) if bias is None else np.asarray(bias, np.float64)
        y = scaled + shift
        return y, ulp(y, dtype) + 16 * U * (np.abs(scaled) + np.abs(shift))


def rope(
    x: np.ndarray,
    dims: int,
    traditional: bool,
    base: float,
    scale: float,
    offset: int | np.ndarray,
    dtype: str,
) -> Result:
    """x (..., L, D) with pair i of a row at position p turned by p * scale * base**(-2 i / dims).

    p is offset + index along L; offset is one number or one per x.shape[0]. 1 ulp + 8 u (|x1| + |x2|) for a pair
    (x1, x2); elements from dims on are copied.
    """
    frequency = scale * np.float64(base) ** (-2.0 * np.arange(dims // 2) / dims)
    return rope_by_frequencies(x, frequency, 1.0, traditional, offset, dtype)


def rope_by_frequencies(
    x: np.ndarray,
    frequency: np.ndarray,
    factor: float | np.ndarray,
    traditional: bool,
    offset: int | np.ndarray,
    dtype: str,
) -> Result:
    """As :func:`rope`, with pair i turned by p * frequency[i] and multiplied by `factor`, one number or one per pair.

    1 ulp + 8 u |factor| (|x1| + |x2|).
    """
    (x,) = _double(x)
    half = len(frequency)
    dims = 2 * half
    start = np.asarray(offset, np.float64).reshape((-1,) + (1,) * (x.ndim - 1))
    angle = (start + np.arange(x.shape[-2]).reshape(-1, 1)) * frequency
    cosine, sine = np.cos(angle), np.sin(angle)
    first, second = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(0, half), slice(half, dims))
    a, b = x[..., first], x[..., second]
    y, lost = x.copy(), np.zeros_like(x)
    with np.errstate(all="ignore"):
        y[..., first], y[..., second] = factor * (a * cosine - b * sine), factor * (a * sine + b * cosine)
        lost[..., first] = lost[..., second] = np.abs(factor) * (np.abs(a) + np.abs(b))
        return y, ulp(y, dtype) + 8 * U * lost


def _sigmoid(w: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(w))
    return np.where(w < 0, e / (1 + e), 1 / (1 + e))


def _gated(y: np.ndarray, lost: np.ndarray, x: np.ndarray | None, dtype: str) -> Result:
    """An activation with |error| <= lost in float32, times x."""
    with np.errstate(all="ignore"):
        # As a float32 the activation itself is at least half the smallest float32 off.
        lost = lost + 2.0**-149
        if x is not None:
            x = np.asarray(x, np.float64)
            y, lost = y * x, lost * np.abs(x) + U * np.abs(y * x)
        return y, ulp(y, dtype) + lost


def silu(gate: np.ndarray, dtype: str, x: np.ndarray | None = None) -> Result:
    """gate * sigmoid(gate), times x if given. 1 ulp + 4 u |y64| (5 with x), and 2**-149 |x| where silu is subnormal.

    -inf gives NaN, as in stock.
    """
    (g,) = _double(gate)
    with np.errstate(all="ignore"):
        y = g * _sigmoid(g)
    return _gated(y, 4 * U * np.abs(y), x, dtype)


def gelu(gate: np.ndarray, dtype: str, x: np.ndarray | None = None) -> Result:
    """gate * Phi(gate), Phi the normal distribution function, times x if given. 1 ulp + 16 u |y64| (17 with x)."""
    (g,) = _double(gate)
    erfc = np.vectorize(math.erfc, otypes=[np.float64])
    with np.errstate(all="ignore"):
        y = g * erfc(-g / math.sqrt(2)) / 2 if g.size else g
    return _gated(y, 16 * U * np.abs(y), x, dtype)


def gelu_approx(gate: np.ndarray, dtype: str, x: np.ndarray | None = None) -> Result:
    """gate * sigmoid(w), w = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), times x if given; see :func:`_times_sigmoid`."""
    (g,) = _double(gate)
    with np.errstate(all="ignore"):
        w = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return _times_sigmoid(g, w, dtype, x)


def gelu_fast_approx(gate: np.ndarray, dtype: str) -> Result:
    """gate * sigmoid(1.702 gate); see :func:`_times_sigmoid`."""
    (g,) = _double(gate)
    return _times_sigmoid(g, 1.702 * g, dtype, None)


def _times_sigmoid(g: np.ndarray, w: np.ndarray, dtype: str, x: np.ndarray | None) -> Result:
    """1 ulp + 8 u |y64| (1 + |w| (1 - sigmoid(w))): w is a float32 with an error of its own, and the relative error it
    makes is that times |w| (1 - sigmoid(w))."""
    with np.errstate(all="ignore"):
        y = g * _sigmoid(w)
        sensitivity = np.abs(w) * _sigmoid(-w)
        lost = 8 * U * np.abs(y) * (1 + np.where(np.isfinite(sensitivity), sensitivity, 0))
    return _gated(y, np.where(np.isfinite(lost), lost, 0), x, dtype)


def relu2(x: np.ndarray, dtype: str) -> Result:
    """max(x, 0)^2. 1 ulp, and what squares below the smallest float32 lose."""
    (x,) = _double(x)
    with np.errstate(all="ignore"):
        y = np.where(x < 0, 0.0, x) ** 2
        return y, ulp(y, dtype) + 2.0**-149


def swiglu_oai(gate: np.ndarray, x: np.ndarray, dtype: str, alpha: float = 1.702, limit: float = 7.0) -> Result:
    """g sigmoid(alpha g) (1 + u), g = min(gate, limit), u = x within [-limit, limit]; alpha and limit as float32.

    The bound is that of :func:`_times_sigmoid` times |1 + u|, and 2 u |y64| for the sum and the product.
    """
    g, u = _double(gate, x)
    a, c = (np.float64(np.float32(v)) for v in (alpha, limit))
    with np.errstate(all="ignore"):
        g, u = np.minimum(g, c), np.clip(u, -c, c) + 1.0
        y, allowed = _times_sigmoid(g, a * g, "float32", None)
        lost = allowed - ulp(y, "float32")
        y, lost = y * u, lost * np.abs(u) + 2 * U * np.abs(y * u)
        return y, ulp(y, dtype) + lost


def softcap(x: np.ndarray, cap: float, dtype: str) -> Result:
    """cap * tanh(x / cap), cap as a float32. 1 ulp + 8 u |y64|, and what x / cap loses where it is subnormal."""
    (x,) = _double(x)
    c = np.float64(np.float32(cap))
    y = c * np.tanh(x / c)
    return y, ulp(y, dtype) + 8 * U * np.abs(y) + c * 2.0**-149


def residual(x: np.ndarray, y: np.ndarray, dtype: str) -> Result:
    """x + y. 1 ulp."""
    x, y = _double(x, y)
    with np.errstate(all="ignore"):
        return x + y, ulp(x + y, dtype)


def _shift(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        top = np.max(x, axis=-1, keepdims=True)
    return np.where(np.isfinite(top), top, 0)


def logsumexp(x: np.ndarray, dtype: str) -> Result:
    """log(sum(exp(x))) along the last axis, which is kept with length 1. 1 ulp + u (8 + 2 log n).

    n is the length of the axis: the difference to the maximum is a float32, and its error, weighted, is at most
    u times the entropy of the distribution.
    """
    (x,) = _double(x)
    shift = _shift(x)
    with np.errstate(all="ignore"):
        y = shift + np.log(np.sum(np.exp(x - shift), axis=-1, keepdims=True))
        y = np.where(np.any(np.isnan(x), axis=-1, keepdims=True), np.nan, y)
    return y, ulp(y, dtype) + U * (8 + 2 * math.log(x.shape[-1]))


def softmax(x: np.ndarray, dtype: str) -> Result:
    """exp(x) / sum(exp(x)) along the last axis. 1 ulp + u |y64| (8 + 2 log n + d), d the distance to the maximum."""
    (x,) = _double(x)
    with np.errstate(all="ignore"):
        d = x - np.max(x, axis=-1, keepdims=True) if x.shape[-1] else x
        e = np.exp(d)
        y = e / np.sum(e, axis=-1, keepdims=True)
        factor = 8 + 2 * math.log(max(x.shape[-1], 1)) + np.where(np.isfinite(d), np.abs(d), 0)
        return y, ulp(y, dtype) + U * np.abs(y) * factor


def argmax(x: np.ndarray) -> np.ndarray:
    """Where x is largest along the last axis: the first of equals, and the first NaN if there is one. Exact."""
    return np.argmax(np.asarray(x, np.float32), axis=-1).astype(np.uint32)


def lookup(
    ids: np.ndarray, weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, dtype: str
) -> Result:
    """scale * code + bias of the rows ids of a table in mlx's affine format. 1 ulp, and 1/2 ulp of the product.

    weight (V, k * bits / 32) uint32: the codes of a row as a little-endian bit stream; scales, biases (V, groups).
    """
    stream = np.unpackbits(np.ascontiguousarray(weight[ids]).view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*stream.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    groups = codes.reshape(*codes.shape[:-1], scales.shape[-1], -1).astype(np.float64)
    with np.errstate(all="ignore"):
        product = groups * np.asarray(scales[ids], np.float64)[..., None]
        y = (product + np.asarray(biases[ids], np.float64)[..., None]).reshape(codes.shape)
        return y, ulp(y, dtype) + ulp(product, dtype).reshape(codes.shape) / 2
