"""The weight formats and their matrix product in numpy float64: what the kernels are measured against.

Dense weights are what they are. In the microscaling formats (Open Compute Project, *OCP Microscaling Formats (MX)
Specification* 1.0; NVIDIA's nvfp4) code j of a row occupies bits [j * bits, (j + 1) * bits) of the row, bit b of
the row being bit b % 32 of word b // 32, and each group of codes along k has one scale of one byte:

====== ==== ===== ======== =====
mode   bits group elements scale
====== ==== ===== ======== =====
mxfp4  4    32    E2M1     E8M0
nvfp4  4    16    E2M1     E4M3
mxfp8  8    32    E4M3     E8M0
====== ==== ===== ======== =====

E2M1: sign, 2 exponent bits (bias 1), 1 mantissa bit. E4M3: sign, 4 exponent bits (bias 7), 3 mantissa bits, no
infinities, NaN where the lower 7 bits are all ones. E8M0: 2**(code - 127); for code 255, which the specification
calls NaN, mlx 0.32 has infinity, and so has this module: the value is then infinite, and NaN for a zero element.

Plain and slow on purpose; nothing here is used at run time.
"""

from __future__ import annotations

import numpy as np

#: mode -> (bits, group_size).
MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Words (n, k * bits // 32) uint32 -> codes (n, k) uint8, for 4 or 8 bits."""
    octets = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (n, k), 0 <= code < 2**bits, for 4 or 8 bits -> words (n, k * bits // 32) uint32.

    Raises ValueError if k is not a multiple of 32 // bits or a code does not fit.
    """
    codes = np.asarray(codes)
    if codes.shape[1] % (32 // bits):
        raise ValueError(f"k = {codes.shape[1]} is not a multiple of {32 // bits}")
    if codes.size and (codes.min() < 0 or codes.max() >= 1 << bits):
        raise ValueError(f"codes do not fit in {bits} bits")
    octets = codes.astype(np.uint8)
    if bits == 4:
        octets = octets[:, ::2] | (octets[:, 1::2] << 4)
    return np.ascontiguousarray(octets).view("<u4").astype(np.uint32)


def e2m1(code: np.ndarray) -> np.ndarray:
    """4-bit codes -> values, float64."""
    code = np.asarray(code, np.int64)
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
    return np.where(code & 8, -size, size)


def e4m3(code: np.ndarray) -> np.ndarray:
    """8-bit codes -> values, float64."""
    code = np.asarray(code, np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where((code & 127) == 127, np.nan, size)
    return np.where(code & 128, -size, size)


def e8m0(code: np.ndarray) -> np.ndarray:
    """8-bit codes -> powers of two, float64; infinity for 255, as mlx has it."""
    code = np.asarray(code, np.int64)
    return np.where(code == 255, np.inf, 2.0 ** (code - 127.0))


def dequantize64(words: np.ndarray, scales: np.ndarray, mode: str) -> np.ndarray:
    """Weights (n, k) float64, exact.

    words (n, k * bits // 32) uint32, scales (n, k // group_size) uint8. Raises KeyError for an unknown mode.
    """
    bits, group = MODES[mode]
    codes = unpack(words, bits)
    scale = e4m3(scales) if mode == "nvfp4" else e8m0(scales)
    with np.errstate(invalid="ignore"):
        return (e2m1(codes) if bits == 4 else e4m3(codes)) * np.repeat(scale, group, axis=1)


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
