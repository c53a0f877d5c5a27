"""The float64 reference that every offer is compared with.

Weights are decoded in float64 from what the checkpoint holds: value = float32(scale) * q + float32(bias) for
affine, the published tables of E2M1, E4M3 and E8M0 for the microscaling formats. Nothing of mlx's own
arithmetic is used. The native module computes the affine product several hundred times faster with the same
meaning; without it numpy does the work in slices.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import native
from .layer_classes import format_named
from .machine import affinity, default_device

#: Decoded weights that a thread holds at once, in elements, so that verification never doubles a model's memory.
_SLICE = 500_000
_MOST_THREADS = 8


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of rows of a little-endian bit stream.

    words: (rows, n_words) uint32. Returns (rows, count) uint8; code i of a row is at bits
    [bits*i, bits*(i+1)).
    """
    if 8 % bits == 0:
        octets = np.ascontiguousarray(words).view(np.uint8)
        return _codes_of_octets(bits)[octets].reshape(len(words), -1)[:, :count]
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    stream = stream[:, : count * bits].reshape(words.shape[0], count, bits)
    return np.packbits(stream, axis=2, bitorder="little")[:, :, 0]


@functools.cache
def _codes_of_octets(bits: int) -> np.ndarray:
    """(256, 8 / bits) uint8: the codes in each byte, lowest first."""
    return (np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1).astype(np.uint8)


@functools.cache
def _e2m1() -> np.ndarray:
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return np.concatenate([magnitudes, -magnitudes])


@functools.cache
def _e4m3() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8.0
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code >> 7, -value, value)


def decode(mode: str, bits: int, group_size: int, weight: np.ndarray, scales: np.ndarray | None,
           biases: np.ndarray | None) -> np.ndarray:  # fmt: skip
    """Rows of a weight matrix as float64.

    weight (rows, words) uint32 or (rows, k) floats for ``"dense"``; scales and biases (rows, k / group_size),
    float32 for affine, uint8 for the microscaling modes. Raises ValueError for an unknown mode.
    """
    if mode == "dense":
        return weight.astype(np.float64)
    assert scales is not None
    k = weight.shape[1] * 32 // bits
    codes = unpack(weight, bits, k)
    if mode == "affine":
        assert biases is not None
        q = codes.reshape(*scales.shape, group_size)
        w = scales.astype(np.float64)[..., None] * q + biases.astype(np.float64)[..., None]
        return w.reshape(len(weight), k)
    values = _e2m1()[codes] if bits == 4 else _e4m3()[codes]
    if mode == "nvfp4":
        scale = _e4m3()[scales]
    elif mode in ("mxfp4", "mxfp8"):
        # Code 255 is E8M0's NaN.
        scale = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127.0))
    else:
        raise ValueError(f"unknown quantization mode {mode!r}")
    return values * np.repeat(scale, group_size, axis=1)


class Reference:
    """Float64 products with one layer's weights.

    arrays
        ``weight``, and where present ``scales``, ``biases``, ``bias``, ``global_scale``, as mlx arrays.
    expert
        Index into the leading axis for ``switch`` and ``multi`` layers.
    """

    def __init__(self, arrays: dict[str, Any], mode: str, bits: int, group_size: int,
                 expert: int | None = None) -> None:  # fmt: skip
        pick = _apart if expert is None else (lambda a: _apart(a[expert]))
        self.mode, self.bits, self.group_size = mode, bits, group_size
        self.weight = as_numpy(pick(arrays["weight"]))
        scales, biases = arrays.get("scales"), arrays.get("biases")
        self.scales = None if scales is None else as_numpy(pick(scales))
        self.biases = None if biases is None else as_numpy(pick(biases))
        bias, factor = arrays.get("bias"), arrays.get("global_scale")
        if (form := format_named(mode)) is not None:
            assert self.scales is not None
            self.weight, self.scales, self.biases = form.as_affine(self.weight, self.scales)
            self.mode, self.bits = "affine", form.bits
        self.bias = None if bias is None else as_numpy(pick(bias)).astype(np.float64)
        # nvfp4's tensor scale: stock stores max|w|, the code's unit is that over (448 * 6).
        self.factor = 1.0 if factor is None else as_numpy(pick(factor)).item() / (448.0 * 6.0)
        self.n = self.weight.shape[0]

    def weights(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of the decoded matrix, float64."""
        s = slice(begin, self.n if end is None else end)
        w = decode(self.mode, self.bits, self.group_size, self.weight[s],
                   None if self.scales is None else self.scales[s],
                   None if self.biases is None else self.biases[s])  # fmt: skip
        return w * self.factor

    def product(self, x: np.ndarray, begin: int = 0, end: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(y64, magnitude) for output features [begin, end).

        x: (m, k) float64. y64 = x @ W.T + bias, magnitude = |x| @ |W|.T + |bias|; both (m, end - begin).
        """
        end = self.n if end is None else end
        if self.mode == "affine" and native.status().available:
            y, magnitude = native.get().affine_reference(
                np.ascontiguousarray(x), self.weight, self.scales, self.biases, self.bits, self.group_size,
                begin, end)  # fmt: skip
        else:
            step = max(1, _SLICE // max(x.shape[1], 1))

            def part(at: int) -> tuple[np.ndarray, np.ndarray]:
                w = self.weights(at, min(at + step, end))
                return x @ w.T, np.abs(x) @ np.abs(w, out=w).T

            places = range(begin, end, step)
            with ThreadPoolExecutor(max(1, min(len(places), len(affinity()), _MOST_THREADS))) as pool:
                parts = list(pool.map(part, places))
            y = np.concatenate([p[0] for p in parts], axis=1) if parts else np.zeros((len(x), 0))
            magnitude = np.concatenate([p[1] for p in parts], axis=1) if parts else np.zeros((len(x), 0))
        if self.bias is not None:
            y, magnitude = y + self.bias[begin:end], magnitude + np.abs(self.bias[begin:end])
        return y, magnitude


def _apart(array: Any) -> Any:
    """A copy, where reading an array on the host would take it out of the GPU's own memory for good."""
    import mlx.core as mx

    return array + mx.zeros((), array.dtype) if default_device() == "cuda" else array


def as_numpy(array: Any) -> np.ndarray:
    """A numpy view (or float32 copy, for half precision) of an mlx array."""
    import mlx.core as mx

    # numpy converts half precision itself: mlx does it in software, in a queue of its own.
    if array.dtype == mx.bfloat16:
        bits = np.array(array.view(mx.uint16), copy=False).astype(np.uint32)
        return np.ascontiguousarray((bits << 16).view(np.float32))
    values = np.ascontiguousarray(np.array(array, copy=False))
    return values.astype(np.float32) if array.dtype == mx.float16 else values


#: Largest finite value, smallest normal exponent and mantissa bits of the output dtypes.
_FORMATS = {"float32": (3.4028234663852886e38, -126, 23), "float16": (65504.0, -14, 10),
            "bfloat16": (3.3895313892515355e38, -126, 7)}  # fmt: skip


def ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """Distance between neighbouring numbers of `dtype` at |value| (float64 in, float64 out)."""
    _, lowest, mantissa = _FORMATS[dtype]
    _, exponent = np.frexp(np.abs(value))
    # frexp gives zero the exponent 0, as if it were 0.5.
    exponent = np.where(value == 0, lowest, np.maximum(exponent - 1, lowest))
    return np.ldexp(1.0, exponent - mantissa)


def rounding_bound(y64: np.ndarray, magnitude: np.ndarray, k: int, dtype: str) -> np.ndarray:
    """What the class ``rounding`` allows: 1 ulp(dtype) + 4 sqrt(k) 2^-24 sum|w x|."""
    return ulp(y64, dtype) + 4.0 * np.sqrt(k) * 2.0**-24 * magnitude


def worst_excess(y: np.ndarray, y64: np.ndarray, magnitude: np.ndarray, k: int, dtype: str) -> float:
    """max |y - y64| / rounding_bound: at most 1.0 for the class ``rounding``, inf where y is not a number."""
    return worst_ratio(y, y64, rounding_bound(y64, magnitude, k, dtype), dtype)


def worst_ratio(y: np.ndarray, y64: np.ndarray, bound: np.ndarray, dtype: str) -> float:
    """max |y - y64| / bound, inf where y is not a number.

    A result that the dtype cannot hold may be the infinity of the right sign.
    """
    if y64.size == 0:
        return 0.0
    y = y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        excess = np.abs(y - y64) / bound
    worst = float(np.max(excess))
    if worst <= 1.0:
        return worst
    largest = _FORMATS[dtype][0]
    may_overflow = np.isinf(y) & (np.sign(y) == np.sign(y64)) & (np.abs(y64) + bound >= largest)
    excess = np.where(may_overflow, 0.0, np.where(np.isnan(excess), np.inf, excess))
    return float(np.max(excess))
