"""float64 references and bounds of the ops between linear layers.

Bounds are of the class ``rounding``: one step of the output dtype for the final rounding, plus what float32
arithmetic may lose on the way, stated per op.
"""

from __future__ import annotations

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
    y = x.copy()
    first, second = _pairs(x, dims, traditional)
    positions = (offset + np.arange(x.shape[-2], dtype=np.float64)) * scale
    angles = positions[:, None] * base ** (-np.arange(dims // 2, dtype=np.float64) * 2.0 / dims)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = first * cos - second * sin, first * sin + second * cos
    if traditional:
        y[..., 0:dims:2], y[..., 1:dims:2] = a, b
    else:
        y[..., : dims // 2], y[..., dims // 2 : dims] = a, b
    return y


def rope_bound(x: np.ndarray, y64: np.ndarray, dims: int, traditional: bool, dtype: str) -> np.ndarray:
    """1 ulp + 8 * 2^-24 (|x1| + |x2|) for each rotated pair (x1, x2); the features behind them are copied."""
    lost = np.zeros_like(x)
    first, second = _pairs(np.abs(x), dims, traditional)
    if traditional:
        lost[..., 0:dims:2] = lost[..., 1:dims:2] = first + second
    else:
        lost[..., : dims // 2] = lost[..., dims // 2 : dims] = first + second
    return ulp(y64, dtype) + 8 * _EPS * lost


def _pairs(x: np.ndarray, dims: int, traditional: bool) -> tuple[np.ndarray, np.ndarray]:
    if traditional:
        return x[..., 0:dims:2], x[..., 1:dims:2]
    return x[..., : dims // 2], x[..., dims // 2 : dims]
