"""float64 references and bounds of the ops between linear layers.

Bounds are of the class ``rounding``: one step of the output dtype for the final rounding, plus what float32
arithmetic may lose on the way, stated per op.
"""

from __future__ import annotations

import math

import numpy as np

from .reference import ulp

_EPS = 2.0**-24


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def rms_norm_bound(y64: np.ndarray, dtype: str) -> np.ndarray:
    """1 ulp + 16 * 2^-24 |y|: a sum of squares has no cancellation, and its error is halved by the root."""
    return ulp(y64, dtype) + 16 * _EPS * np.abs(y64)


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """(x - mean) / sqrt(var + eps) * weight + bias along the last axis."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def layer_norm_bound(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float,
                     y64: np.ndarray, dtype: str) -> np.ndarray:  # fmt: skip
    """1 ulp + 16 * 2^-24 (|y| + |bias| + |weight| max|x| / sqrt(var + eps)): subtracting the mean cancels."""
    deviation = np.sqrt(np.var(x, axis=-1, keepdims=True) + eps)
    lost = np.max(np.abs(x), axis=-1, keepdims=True) / deviation
    lost = lost if weight is None else np.abs(weight) * lost
    lost = lost if bias is None else lost + np.abs(bias)
    return ulp(y64, dtype) + 16 * _EPS * (np.abs(y64) + lost)


def rope(x: np.ndarray, dims: int, traditional: bool, base: float, scale: float, offset: int) -> np.ndarray:
    """Rotary embedding of the first `dims` features at positions offset + index along axis -2."""
    frequencies = scale * base ** (-np.arange(dims // 2, dtype=np.float64) * 2.0 / dims)
    return rope_by_frequencies(x, frequencies, 1.0, traditional, offset)


def rope_by_frequencies(
    x: np.ndarray, frequencies: np.ndarray, factor: float, traditional: bool, offset: int
) -> np.ndarray:
    """Pair i of the row at position p turned by p * frequencies[i] and multiplied by a factor."""
    y, dims = x.copy(), 2 * len(frequencies)
    first, second = _pairs(x, dims, traditional)
    positions = offset + np.arange(x.shape[-2], dtype=np.float64)
    angles = positions[:, None] * frequencies
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    a, b = first * cos - second * sin, first * sin + second * cos
    if traditional:
        y[..., 0:dims:2], y[..., 1:dims:2] = a, b
    else:
        y[..., : dims // 2], y[..., dims // 2 : dims] = a, b
    return y


def rope_bound(x: np.ndarray, y64: np.ndarray, dims: int, traditional: bool, dtype: str,
               factor: float = 1.0) -> np.ndarray:  # fmt: skip
    """1 ulp + 8 * 2^-24 |factor| (|x1| + |x2|) for each rotated pair (x1, x2); the features behind them are copied."""
    lost = np.zeros_like(x)
    first, second = _pairs(np.abs(x), dims, traditional)
    if traditional:
        lost[..., 0:dims:2] = lost[..., 1:dims:2] = first + second
    else:
        lost[..., : dims // 2] = lost[..., dims // 2 : dims] = first + second
    return ulp(y64, dtype) + 8 * _EPS * abs(factor) * lost


def _pairs(x: np.ndarray, dims: int, traditional: bool) -> tuple[np.ndarray, np.ndarray]:
    if traditional:
        return x[..., 0:dims:2], x[..., 1:dims:2]
    return x[..., : dims // 2], x[..., dims // 2 : dims]


def swiglu(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    """silu(gate) * x."""
    return gate / (1.0 + np.exp(-gate)) * x


def swiglu_bound(gate: np.ndarray, y64: np.ndarray, dtype: str) -> np.ndarray:
    """1 ulp + (8 + 2 |gate|) 2^-24 |y| + 2^-120.

    An exponential, a quotient and two products; the exponential's relative error grows with its argument, since
    the argument is split in float32. 2^-120 is for where it underflows.
    """
    return ulp(y64, dtype) + (8 + 2 * np.abs(gate)) * _EPS * np.abs(y64) + 2.0**-120


def swiglu_oai(gate: np.ndarray, x: np.ndarray, alpha: float = 1.702, limit: float = 7.0) -> np.ndarray:
    """GPT-OSS's activation: g sigmoid(alpha g) (1 + u) with g = min(gate, limit) and u = x within [-limit, limit]."""
    g = np.minimum(gate, limit)
    return g / (1.0 + np.exp(-alpha * g)) * (1.0 + np.clip(x, -limit, limit))


def swiglu_oai_bound(gate: np.ndarray, y64: np.ndarray, dtype: str) -> np.ndarray:
    """As :func:`swiglu_bound`, where the argument of the exponential has a rounding of its own and so has the sum."""
    return ulp(y64, dtype) + (12 + 8 * np.abs(gate)) * _EPS * np.abs(y64) + 2.0**-120


def geglu(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    """gate Phi(gate) x, Phi the distribution function of the normal distribution."""
    erfc = np.vectorize(math.erfc, otypes=[np.float64])
    return gate * erfc(-gate / math.sqrt(2.0)) / 2.0 * x


def geglu_bound(gate: np.ndarray, y64: np.ndarray, dtype: str) -> np.ndarray:
    """1 ulp + (24 + 2 gate^2) 2^-24 |y| + 2^-120: for negative gates Phi is an exponential of gate^2 / 2."""
    return ulp(y64, dtype) + (24 + 2 * gate * gate) * _EPS * np.abs(y64) + 2.0**-120


def geglu_approx(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    """gate sigmoid(w) x with w = 2 sqrt(2 / pi) (gate + 0.044715 gate^3): gelu with tanh, times x."""
    # Beyond 700 the exponential is no double, and the result is 0 as far as any dtype can tell.
    return gate / (1.0 + np.exp(-np.maximum(_gelu_argument(gate), -700.0))) * x


def geglu_approx_bound(gate: np.ndarray, y64: np.ndarray, dtype: str) -> np.ndarray:
    """1 ulp + (12 + 8 |w|) 2^-24 |y| + 2^-120, with w as in :func:`geglu_approx`."""
    return ulp(y64, dtype) + (12 + 8 * np.abs(_gelu_argument(gate))) * _EPS * np.abs(y64) + 2.0**-120


def _gelu_argument(gate: np.ndarray) -> np.ndarray:
    return 2.0 * np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)


def softcap(cap: float, x: np.ndarray) -> np.ndarray:
    """cap tanh(x / cap)."""
    return cap * np.tanh(x / cap)


def softcap_bound(y64: np.ndarray, dtype: str) -> np.ndarray:
    """1 ulp + 8 * 2^-24 |y|: tanh makes relative errors smaller."""
    return ulp(y64, dtype) + 8 * _EPS * np.abs(y64)


def logsumexp(x: np.ndarray) -> np.ndarray:
    """log(sum(exp(x))) along the last axis, which is kept."""
    top = np.max(x, axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True)))


def logsumexp_bound(y64: np.ndarray, n: int, dtype: str) -> np.ndarray:
    """1 ulp + 2^-24 (16 + 2 log n + |y|): exponentials have relative errors, and the sum has positive terms only."""
    return ulp(y64, dtype) + _EPS * (16 + 2 * np.log(n) + np.abs(y64))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: object, sinks: np.ndarray | None,
              dtype: str, terms: tuple[np.ndarray, np.ndarray] | None = None
              ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(result, bound) of scaled dot-product attention.

    q (B, H, L, D), k (B, G, S, D), v (B, G, S, Dv) with H a multiple of G; mask None, ``"causal"``, a bool
    array (True: visible) or an additive one; sinks (H,) are one more score per head without a value.

    A score is a sum of D products in float32, off by at most 4 sqrt(D) 2^-24 sum|scale q k|; that is a relative
    error of its weight. The weights' sum and the sum over values add 4 sqrt(S) and a few roundings:
    1 ulp + 2^-24 (16 + 4 sqrt(S) + 8 sqrt(D) max sum|scale q k|) sum p |v|.

    terms: for quantized k and v, arrays of their shapes, |scale code| + |bias| of each element. An element is made of
    two terms that may cancel, and is off by at most 2 * 2^-24 of them.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = scale * (q @ k.swapaxes(-1, -2))
    sizes = abs(scale) * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    rows, keys = scores.shape[-2:]
    if isinstance(mask, str):
        scores = np.where(np.tril(np.ones((rows, keys), dtype=bool), keys - rows), scores, -np.inf)
    elif isinstance(mask, np.ndarray):
        if mask.dtype == bool:
            scores = np.where(mask, scores, -np.inf)
        else:
            scores, sizes = scores + mask, sizes + np.where(np.isfinite(mask), np.abs(mask), 0.0)
    top = np.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None, None])
    weights = np.exp(scores - top)
    total = np.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None, None] - top)
    p = weights / total
    seen = np.max(np.where(np.isfinite(scores), sizes, 0.0), axis=-1, keepdims=True)
    seen = 8 * np.sqrt(q.shape[-1]) * seen
    made: np.ndarray | float = 0.0
    if terms is not None:
        of_k, of_v = (np.repeat(a, groups, axis=1) for a in terms)
        seen = seen + 4 * np.max(abs(scale) * (np.abs(q) @ of_k.swapaxes(-1, -2)), axis=-1, keepdims=True)
        made = 2 * _EPS * (p @ of_v)
    lost = _EPS * (16 + 4 * np.sqrt(keys) + seen) * (p @ np.abs(v)) + made
    y64 = p @ v
    return y64, ulp(y64, dtype) + lost
