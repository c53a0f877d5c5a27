"""t5 weights in layers of a model's own class, which call mlx's operations themselves."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from . import calls


class NoBiases:
    """Stands where a module's code picks rows of its biases; mlx's operations never see it
    (:mod:`t5_ternary.calls`)."""

    def __getitem__(self, _: object) -> NoBiases:
        return self


def adopt(module: nn.Module, weight: mx.array, scales: mx.array, group_size: int) -> None:
    """Make a module with ``weight``, ``scales`` and ``biases`` ready to be loaded with t5 ones.

    The module keeps its class and code; its biases are no parameter any more, and mlx's operations take what it hands
    them.
    """
    calls.install()
    calls.watch(module)
    module.weight = mx.zeros(weight.shape, mx.uint8)
    module.scales = mx.zeros(scales.shape, scales.dtype)
    module.biases = NoBiases()
    module.group_size = group_size
    module.bits = 2
