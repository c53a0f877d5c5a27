"""Affine-quantized matrices, the float64 product with them, and what each kernel may lose on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from backend_core.reference import decode, rounding_bound, worst_ratio
from backend_core.testing import lab

#: Metal's name of an element type -> mlx's name and half the distance of 1 to the next number.
TYPES = {"half": ("float16", 2.0**-11), "bfloat16_t": ("bfloat16", 2.0**-8), "float": ("float32", 2.0**-24)}


def rounded(values: np.ndarray, metal: str) -> Any:
    """An array of the lab in the element type that Metal calls so."""
    if metal == "bfloat16_t":
        return lab.to_bfloat16(values)
    return values.astype(np.float16 if metal == "half" else np.float32)


@dataclass(frozen=True)
class Affine:
    """A matrix (rows, columns) in groups along its columns: value = scale * code + bias.

    weight (rows, columns * bits / 32) uint32; scales and biases (rows, columns / group) in the type `metal`.
    """

    metal: str
    group: int
    bits: int
    weight: np.ndarray
    scales: Any
    biases: Any

    @staticmethod
    def random(rng: np.random.Generator, rows: int, columns: int, metal: str, group: int, bits: int) -> Affine:
        dense = mx.array(rng.standard_normal((rows, columns)).astype(np.float32))
        weight, scales, biases = (np.array(a) for a in mx.quantize(dense, group_size=group, bits=bits))
        return Affine(metal, group, bits, weight, rounded(scales, metal), rounded(biases, metal))

    def values(self) -> np.ndarray:
        """The matrix, float64."""
        scales, biases = lab.to_float32(self.scales), lab.to_float32(self.biases)
        return decode("affine", self.bits, self.group, self.weight, scales, biases)

    def rounding_of_values(self) -> np.ndarray:
        """What each value loses in a kernel that computes scale * code + bias in float and stores the type `metal`."""
        bias, value = self.bias_sizes(), np.abs(self.values())
        return TYPES[self.metal][1] * value + 2.0**-24 * (2 * value + bias)

    def bias_sizes(self) -> np.ndarray:
        """|bias| of each value, (rows, columns) float64."""
        return np.repeat(np.abs(lab.to_float32(self.biases).astype(np.float64)), self.group, axis=1)


def check(y: np.ndarray, x: Any, w: Affine, transposed: bool = True, extra: np.ndarray | None = None) -> None:
    """Asserts that y is x times the matrix, in float64 and as mlx computes it on the CPU in float32.

    y (m, n) and x (m, k) in the matrix' type; the product is with the transpose of (n, k), or with (k, n).
    extra (m, n): what the kernel's own arithmetic may lose beyond the class `rounding`.
    """
    dtype = TYPES[w.metal][0]
    matrix = w.values().T if transposed else w.values()
    x64 = lab.to_float32(x).astype(np.float64)
    y64, size = x64 @ matrix, np.abs(x64) @ np.abs(matrix)
    bound = rounding_bound(y64, size, x64.shape[1], dtype) + (0.0 if extra is None else extra)
    actual = lab.to_float32(y).astype(np.float64)
    assert worst_ratio(actual, y64, bound, dtype) <= 1.0
    arrays = [mx.array(a) for a in (lab.to_float32(x), w.weight, lab.to_float32(w.scales), lab.to_float32(w.biases))]
    stock = np.array(mx.quantized_matmul(*arrays, transposed, w.group, w.bits), dtype=np.float64)
    bound_of_stock = rounding_bound(y64, size, x64.shape[1], "float32")
    assert worst_ratio(actual, stock, bound + bound_of_stock, dtype) <= 1.0
