"""Adapters of mlx-lm around t5 layers: trained as around any layer, merged where the format can hold the result.

With an adapter added weights are ternary no more, and 2 bits would lose what was trained. So that ``fuse`` gives the t5
layer where the adapter changes nothing, full precision where that is asked for, and an error everywhere else.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from backend_core.errors import ModelError


def _merged(layer: Any, delta: mx.array, dequantize: bool) -> mx.array | None:
    """Weights (..., n, k) with `delta` in the dtype of the scales; None if they are the layer's own.

    Raises ModelError, with the layer's name, if they differ and may not be dequantized.
    """
    words, scales, biases = layer.affine()
    own = mx.dequantize(words, scales, biases, group_size=layer.group_size, bits=2)
    sum_ = own + delta.astype(own.dtype)
    if not dequantize:
        if mx.array_equal(sum_, own).item():
            return None
        name = layer.path or type(layer).__name__
        raise ModelError(
            f"{name}: with the adapter its weights are not ternary, and t5 cannot hold them. Fuse with dequantize=True "
            "(full precision), or load the adapter beside the model (adapter_path)"
        )
    return sum_


class T5LoRALinear(LoRALinear):
    """mlx-lm's adapter around a :class:`~t5_ternary.modules.T5Linear`."""

    @classmethod
    def around(cls, layer: Any, r: int, dropout: float, scale: float) -> T5LoRALinear:
        lora = cls(layer.input_dims, layer.output_dims, r=r, dropout=dropout, scale=scale)
        lora.linear = layer
        return lora

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """The layer with the adapter in its weights; see the module. Raises ModelError."""
        layer = self.linear
        weight = _merged(layer, (self.scale * self.lora_b.T) @ self.lora_a.T, dequantize)
        if weight is None:
            return layer
        fused = nn.Linear(layer.input_dims, layer.output_dims, bias="bias" in layer)
        fused.weight = weight
        if "bias" in layer:
            fused.bias = layer.bias
        return fused


class T5LoRAEmbedding(LoRAEmbedding):
    """mlx-lm's adapter around a :class:`~t5_ternary.modules.T5Embedding`."""

    @classmethod
    def around(cls, layer: Any, r: int, dropout: float, scale: float) -> T5LoRAEmbedding:
        lora = cls(layer.output_dims, layer.input_dims, r=r, dropout=dropout, scale=scale)
        lora.embedding = layer
        return lora

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """As :meth:`T5LoRALinear.fuse`."""
        layer = self.embedding
        weight = _merged(layer, (self.scale * self.lora_a) @ self.lora_b, dequantize)
        if weight is None:
            return layer
        fused = nn.Embedding(layer.output_dims, layer.input_dims)
        fused.weight = weight
        return fused


class T5LoRASwitchLinear(LoRASwitchLinear):
    """mlx-lm's adapter around a :class:`~t5_ternary.modules.T5SwitchLinear`."""

    @classmethod
    def around(cls, layer: Any, r: int, dropout: float, scale: float) -> T5LoRASwitchLinear:
        lora = cls(layer.input_dims, layer.output_dims, layer.num_experts, r=r, dropout=dropout, scale=scale)
        lora.linear = layer
        return lora

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """As :meth:`T5LoRALinear.fuse`."""
        layer = self.linear
        weight = _merged(layer, (self.scale * self.lora_b) @ self.lora_a, dequantize)
        if weight is None:
            return layer
        fused = SwitchLinear(layer.input_dims, layer.output_dims, layer.num_experts, bias="bias" in layer)
        fused.weight = weight
        if "bias" in layer:
            fused.bias = layer.bias
        return fused
