"""t5 weights in layers of a model's own class, which call mlx's operations themselves."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from . import calls


def adopt(module: nn.Module, weight: mx.array, scales: mx.array, group_size: int) -> None:
    """Make a module with ``weight``, ``scales`` and ``biases`` ready to be loaded with t5 ones.

    The module keeps its class and code; its biases become None, and mlx's operations take what it hands them.
    """
    calls.install()
    calls.watch(module)
    module.weight = mx.zeros(weight.shape, mx.uint8)
    module.scales = mx.zeros(scales.shape, scales.dtype)
    module.biases = None
    module.group_size = group_size
    module.bits = 2
