"""The affine format and its matrix product in numpy float64: what the kernels are measured against.

Codes of one row form a little-endian bit stream: code j occupies bits [j*bits, (j+1)*bits) of the row, bit b
of the row is bit b % 32 of word b // 32. This holds for every number of bits, also where a code straddles
two words. Value j is ``scale[j // group_size] * code + bias[j // group_size]``.

Plain and slow on purpose; nothing here is used at run time.
"""

from __future__ import annotations

import numpy as np

#: Code widths and group sizes of the format.
BITS = (1, 2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (n, k) of any integer dtype, 0 <= code < 2**bits -> words (n, k * bits // 32) uint32.

    Raises ValueError if k is not a multiple of 32 or a code does not fit.
    """
    codes = np.asarray(codes)
    n, k = codes.shape
    if k % 32:
        raise ValueError(f"k = {k} is not a multiple of 32")
    if codes.size and (codes.min() < 0 or codes.max() >= 1 << bits):
        raise ValueError(f"codes do not fit in {bits} bits")
    stream = (codes.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(stream.reshape(n, k * bits), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.uint32).reshape(n, k * bits // 32)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Words (n, k * bits // 32) uint32 -> codes (n, k) uint8."""
    words = np.ascontiguousarray(words, dtype="<u4")
    n = words.shape[0]
    k = words.shape[1] * 32 // bits
    stream = np.unpackbits(words.view(np.uint8).reshape(n, k * bits // 8), axis=1, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (stream.reshape(n, k, bits) * weights).sum(axis=-1, dtype=np.uint8)


def dequantize64(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """Weights (n, k) float64, exact: words as in :func:`unpack`, scales and biases (n, k // group_size)."""
    codes = unpack(words, bits).astype(np.float64)
    group = codes.shape[1] // scales.shape[1]
    scale = np.repeat(np.asarray(scales, np.float32).astype(np.float64), group, axis=1)
    bias = np.repeat(np.asarray(biases, np.float32).astype(np.float64), group, axis=1)
    return scale * codes + bias


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

    x (..., k), weights (n, k), bias (n,) or None; both results have shape (..., n). The allowance is one unit
    in the last place of `dtype` plus 4 * sqrt(k) * 2**-24 * sum |w * x| (and |bias| in that sum).
    """
    y = matmul64(x, w, bias)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    if bias is not None:
        size = size + np.abs(np.asarray(bias, np.float64))
    return y, ulp(y, dtype) + 4.0 * np.sqrt(w.shape[1]) * 2.0**-24 * size
