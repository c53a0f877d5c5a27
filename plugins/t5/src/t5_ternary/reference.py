"""The t5 format and its product in numpy float64: what kernels and conversions are measured against.

Written out digit by digit from the definition in :mod:`t5_ternary.layout`; plain and slow on purpose, and used by
nothing at run time.
"""

from __future__ import annotations

import numpy as np


def pack(trits: np.ndarray, group_size: int) -> np.ndarray:
    """Trits (n, k) of 0, 1, 2 -> bytes (n, k / group_size * ceil(group_size / 5)) uint8.

    Raises ValueError if k is no multiple of the group or a trit is none.
    """
    trits = np.asarray(trits)
    n, k = trits.shape
    if k % group_size:
        raise ValueError(f"k = {k} is not a multiple of {group_size}")
    if trits.size and (trits.min() < 0 or trits.max() > 2):
        raise ValueError("a trit is 0, 1 or 2")
    size = -(-group_size // 5)
    out = np.zeros((n, k // group_size * size), np.uint8)
    for g in range(k // group_size):
        for b in range(size):
            value = np.zeros(n, np.int64)
            for i in range(5):
                inside = 5 * b + i < group_size
                value += 3**i * (trits[:, g * group_size + 5 * b + i].astype(np.int64) if inside else 1)
            out[:, g * size + b] = value
    return out


def unpack(packed: np.ndarray, group_size: int) -> np.ndarray:
    """Bytes as in :func:`pack` -> trits (n, k) uint8. Raises ValueError for bytes above 242."""
    size = -(-group_size // 5)
    n, groups = packed.shape[0], packed.shape[1] // size
    if packed.size and packed.max() > 242:
        raise ValueError("a byte above 242 is not five trits")
    out = np.zeros((n, groups * group_size), np.uint8)
    for g in range(groups):
        for j in range(group_size):
            byte = packed[:, g * size + j // 5].astype(np.int64)
            out[:, g * group_size + j] = byte // 3 ** (j % 5) % 3
    return out


def dequantize64(packed: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """Weights (n, k) float64, exact: scales (n, k / group_size) of any float dtype."""
    scale = np.repeat(np.asarray(scales, np.float32).astype(np.float64), group_size, axis=1)
    return scale * (unpack(packed, group_size).astype(np.float64) - 1.0)


def matmul64(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x (..., k) and weights (n, k) as given, bias (n,) or None -> (..., n) float64."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    return y if bias is None else y + np.asarray(bias, np.float64)


def ulp(y: np.ndarray, dtype: str) -> np.ndarray:
    """The distance between neighbours of `dtype` ("float32", "float16", "bfloat16") at |y|, float64."""
    digits, smallest = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[dtype]
    y = np.abs(np.asarray(y, np.float64))
    _, exponent = np.frexp(np.where(y > 0, y, 2.0**smallest))
    return np.exp2(np.maximum(exponent - digits, smallest).astype(np.float64))


def bound(
    x: np.ndarray, w: np.ndarray, dtype: str = "float32", bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(y64, largest allowed |y - y64|) of the exactness class ``rounding``.

    x (..., k), weights (n, k), bias (n,) or None; both results have shape (..., n). The allowance is one unit in the
    last place of `dtype` plus 4 * sqrt(k) * 2**-24 * sum |w * x| (and |bias| in that sum).
    """
    y = matmul64(x, w, bias)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    if bias is not None:
        size = size + np.abs(np.asarray(bias, np.float64))
    return y, ulp(y, dtype) + 4.0 * np.sqrt(w.shape[1]) * 2.0**-24 * size
