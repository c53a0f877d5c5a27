"""Projection shapes of real models, as pieces of work for ``bench linear``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import AccelError
from .layers import LinearSpec
from .linear import Work, peers_of

#: model -> layer -> (output features, input features), from the models' config.json.
#: Qwen3.6-27B: 48 layers of linear attention and 16 of full attention, whose q_proj also makes the output gate.
SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "Qwen3.6-27B": {
        "in_proj_qkv": (10240, 5120), "in_proj_z": (6144, 5120), "out_proj": (5120, 6144), "q_proj": (12288, 5120),
        "k_proj": (1024, 5120), "v_proj": (1024, 5120), "o_proj": (5120, 6144), "gate_proj": (17408, 5120),
        "up_proj": (17408, 5120), "down_proj": (5120, 17408), "lm_head": (248320, 5120),
    },
    "Qwen3-8B": {
        "q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096),
        "gate_proj": (12288, 4096), "up_proj": (12288, 4096), "down_proj": (4096, 12288), "lm_head": (151936, 4096),
    },
}  # fmt: skip
PRESETS = ("bonsai_decode_bench",)


def bonsai_decode_bench(rows: Sequence[int] = (1, 2, 3, 4, 5), bits: Sequence[int] = (1, 2),
                        group_sizes: Sequence[int] = (64, 128), scales: str = "float16", sym: bool = False
                        ) -> list[tuple[str, Work]]:  # fmt: skip
    """(name, work) of each distinct shape of both models in 1 and 2 bits; layers of one shape share a line.

    Raises AccelError if a shape does not fit a group size.
    """
    found = []
    for model, layers in SHAPES.items():
        names: dict[tuple[int, int], list[str]] = {}
        for layer, shape in layers.items():
            names.setdefault(shape, []).append(layer)
        for (n, k), same in names.items():
            for b in bits:
                for group in group_sizes:
                    if k % group:
                        raise AccelError(f"{n}x{k}: {k} input features are not a multiple of the group size {group}")
                    spec = LinearSpec(n, k, b, group, scales, sym)
                    found += [(f"{model} {'/'.join(same)}", Work(spec, m, peers_of(spec))) for m in rows]
    return found


def labelled(work: Work, layer: str) -> Work:
    """The same work under the name of a layer."""
    return dataclasses.replace(work, layer=layer)
