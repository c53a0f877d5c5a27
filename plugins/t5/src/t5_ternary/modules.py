"""Layers that hold t5 weights.

Their own methods compute with mlx's 2-bit operations on words that are made on the fly: right on every device, slow,
and what kernels are raced against. Parameters are ``weight`` (uint8), ``scales`` and possibly ``bias``; there are no
biases.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend_core.layer_classes import LayerFormat, layer_class

from . import convert
from .layout import group_size_of, packed_columns
from .words import words

MODE = "t5"


def as_affine(weight: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix as 2-bit words, scales and biases: see :class:`backend_core.layer_classes.LayerFormat`."""
    size = group_size_of(weight.shape, scales.shape)
    return convert.to_affine(weight, size), scales, -scales


FORMAT = LayerFormat(MODE, 2, as_affine)


class _T5(nn.Module):
    """What all layers share.

    lead
        Dimensions before the last: (n,), or (experts, n).
    k
        Input features, a multiple of `group_size` (64 or 128).
    dtype
        dtype of the scales.

    ``path`` is where the layer lies in its model, "" if nobody has said so.
    """

    path = ""

    def __init__(self, lead: tuple[int, ...], k: int, group_size: int, dtype: mx.Dtype = mx.float16) -> None:
        super().__init__()
        self.group_size = group_size
        self.weight = mx.full((*lead, packed_columns(k, group_size)), 121, mx.uint8)
        self.scales = mx.zeros((*lead, k // group_size), dtype)
        self.freeze()

    @property
    def mode(self) -> str:
        return MODE

    @property
    def input_dims(self) -> int:
        return int(self.scales.shape[-1]) * self.group_size

    @property
    def output_dims(self) -> int:
        return int(self.weight.shape[-2])

    def unfreeze(self, *args: Any, **kwargs: Any) -> None:
        """Only what is below this layer: packed weights are not trained."""
        super().unfreeze(*args, **kwargs)
        self.freeze(recurse=False)

    def _extra_repr(self) -> str:
        bias = ", bias" if "bias" in self else ""
        return f"input_dims={self.input_dims}, output_dims={self.output_dims}, group_size={self.group_size}{bias}"

    def affine(self) -> tuple[mx.array, mx.array, mx.array]:
        """The weights in mlx's 2-bit format: (words, scales, biases)."""
        return words(self["weight"], self.group_size), self["scales"], -self["scales"]


def _product(layer: _T5, x: mx.array) -> mx.array:
    return mx.quantized_matmul(x, *layer.affine(), transpose=True, group_size=layer.group_size, bits=2)


@layer_class("linear", FORMAT)
class T5Linear(_T5):
    """A linear layer: (..., k) -> (..., n)."""

    def __init__(self, k: int, n: int, bias: bool = False, group_size: int = 128, dtype: mx.Dtype = mx.float16) -> None:
        super().__init__((n,), k, group_size, dtype)
        if bias:
            self.bias = mx.zeros((n,), dtype)
            self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> nn.Module:
        """This layer with an adapter of mlx-lm around it; mlx-lm calls it for layers that it does not know."""
        from .adapters import T5LoRALinear

        return T5LoRALinear.around(self, r, dropout, scale)


@layer_class("embedding", FORMAT)
class T5Embedding(_T5):
    """Rows by number, and the output projection with the same weights."""

    def __init__(self, n: int, k: int, group_size: int = 128, dtype: mx.Dtype = mx.float16) -> None:
        super().__init__((n,), k, group_size, dtype)

    def rows(self, indices: mx.array, dtype: mx.Dtype) -> mx.array:
        """Rows of the matrix, (..., k), in a float dtype; scale * (trit - 1) is exact in that of the scales."""
        scales = self["scales"][indices].astype(dtype)
        codes = words(self["weight"][indices], self.group_size)
        return mx.dequantize(codes, scales, -scales, group_size=self.group_size, bits=2)

    def __call__(self, x: mx.array) -> mx.array:
        return self.rows(x, self["scales"].dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> nn.Module:
        """As :meth:`T5Linear.to_lora`."""
        from .adapters import T5LoRAEmbedding

        return T5LoRAEmbedding.around(self, r, dropout, scale)


@layer_class("switch", FORMAT)
class T5SwitchLinear(_T5):
    """One matrix per expert, called as mlx-lm's ``SwitchLinear``."""

    def __init__(self, k: int, n: int, experts: int, bias: bool = False, group_size: int = 128,
                 dtype: mx.Dtype = mx.float16) -> None:  # fmt: skip
        super().__init__((experts, n), k, group_size, dtype)
        if bias:
            self.bias = mx.zeros((experts, n), dtype)
            self.freeze()

    @property
    def num_experts(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weight, scales, chosen = self["weight"], self["scales"], indices
        if indices.size < self.num_experts:
            # Only the experts that are asked for are unpacked.
            weight, scales = weight[indices.flatten()], scales[indices.flatten()]
            chosen = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        y = mx.gather_qmm(
            x, words(weight, self.group_size), scales, -scales, rhs_indices=chosen, transpose=True,
            group_size=self.group_size, bits=2, sorted_indices=sorted_indices and chosen is indices,
        )  # fmt: skip
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> nn.Module:
        """As :meth:`T5Linear.to_lora`."""
        from .adapters import T5LoRASwitchLinear

        return T5LoRASwitchLinear.around(self, r, dropout, scale)
