"""Packed or expanded: whether t5 weights stay t5 in memory, or become 2-bit words once, at load time.

Expanded weights take 29 % more memory and run with whatever is installed for 2-bit weights. ``t5=auto`` measures both
on the model's own largest layers, as the core would run them, and takes 2-bit words where they are faster and there is
room for them. What was measured is remembered, so that a model is loaded the same way every time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import remembered
from .contest import Contest, contest, timed
from .layout import GROUP_BYTES
from .modules import T5Embedding, T5Linear, T5SwitchLinear
from .words import words

if TYPE_CHECKING:
    from backend_core import Policy

#: By how much 2-bit words must be faster to be worth their memory, and by how much more or less where another decision
#: was made before.
WORTH, INERTIA = 1.05, 0.04
#: How much each number of rows weighs in that: a token, and a piece of a prompt.
WEIGHTS = {1: 0.75, 64: 0.25}
#: Share of the free memory that expanding may take.
MEMORY_SHARE = 0.5
#: Layers are measured in turns over so many bytes, as far as the model has them, so that weights are cold.
_COLD_BYTES = 64 << 20


@dataclass(frozen=True)
class Choice:
    """expand: whether weights become 2-bit words; note: a sentence for the report."""

    expand: bool
    note: str


def decide(layers: Mapping[str, Any], held: Mapping[str, mx.array], policy: Policy) -> Choice:
    """Choose for a model with t5 `layers` (path -> layer, still empty) whose tensors are `held`."""
    given = policy.option("t5") or "auto"
    packed, expanded = _bytes(held, layers)
    more = f"{expanded / max(packed, 1) - 1:.0%} more memory"
    if given == "packed":
        return Choice(False, "t5 weights stay packed (t5=packed)")
    if given == "expand":
        return Choice(True, f"t5 weights became 2-bit words, {more} (t5=expand)")
    if policy.deterministic or policy.race == "off":
        why = "deterministic=1" if policy.deterministic else "race=off"
        return Choice(False, f"t5 weights stay packed (t5=auto does not measure under {why})")
    free = _free_memory()
    if free is not None and expanded > MEMORY_SHARE * free:
        return Choice(False, f"t5 weights stay packed ({expanded >> 20} MB as 2-bit words, {free >> 20} MB are free)")
    largest = _largest(layers, held)
    if not largest:
        return Choice(False, "t5 weights stay packed (there is no layer to measure)")
    first = layers[largest[0]]
    key = remembered.key(type(first).__name__, _arrays(held, largest[0]), len(largest), policy)
    before = remembered.recall(key)
    if before is not None and policy.race != "force":
        expand, what, how = bool(before["expand"]), str(before["what"]), "t5=auto, measured before"
    else:
        worth = WORTH if before is None else WORTH - INERTIA if before["expand"] else WORTH + INERTIA
        found = measure([layers[p] for p in largest], [_arrays(held, p) for p in largest], policy, worth)
        parts = [f"{a * 1e6:.0f} us packed and {b * 1e6:.0f} us as 2-bit words at rows {m}"
                 for m, (a, b) in found.times.items()]  # fmt: skip
        expand, what, how = found.lead > worth, f"{largest[0]}: {', '.join(parts)}", "t5=auto"
        remembered.keep(key, {"expand": expand, "what": what})
    if expand:
        return Choice(True, f"t5 weights became 2-bit words, {more} ({how}: {what})")
    return Choice(False, f"t5 weights stay packed ({how}: {what})")


def _free_memory() -> int | None:
    from backend_core.doctor.cpu import free_memory

    return free_memory()


def _arrays(held: Mapping[str, mx.array], path: str) -> dict[str, mx.array]:
    return {key: held[f"{path}.{key}"] for key in ("weight", "scales", "bias") if f"{path}.{key}" in held}


def _bytes(held: Mapping[str, mx.array], layers: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the layers' weights and scales, packed and as 2-bit words with biases."""
    packed = expanded = 0
    for path, layer in layers.items():
        weight, scales = held[path + ".weight"], held[path + ".scales"]
        packed += weight.nbytes + scales.nbytes
        expanded += weight.nbytes // GROUP_BYTES[layer.group_size] * layer.group_size // 4 + 2 * scales.nbytes
    return packed, expanded


def _largest(layers: Mapping[str, Any], held: Mapping[str, mx.array]) -> list[str]:
    """Layers of the shape that most bytes have, so many that they do not fit into a cache."""
    groups: defaultdict[Any, list[str]] = defaultdict(list)
    for path, layer in layers.items():
        if not isinstance(layer, T5Embedding):
            groups[(type(layer), held[path + ".weight"].shape, held[path + ".scales"].shape)].append(path)
    if not groups:
        return []
    paths = max(groups.values(), key=lambda g: len(g) * held[g[0] + ".weight"].size)
    return paths[: max(1, _COLD_BYTES // max(1, held[paths[0] + ".weight"].nbytes))]


def measure(empty: list[Any], arrays: list[dict[str, mx.array]], policy: Policy, worth: float = WORTH) -> Contest:
    """Packed layers against the same as 2-bit words, each with the offers that win for it.

    worth: the lead that decides; the closer it is, the longer is measured.
    """
    packed = [_filled(type(layer), layer, held) for layer, held in zip(empty, arrays, strict=True)]
    wide = [expanded(layer) for layer in packed]
    return contest(_runner(packed, policy), _runner(wide, policy), WEIGHTS, worth)


def _filled(cls: type, layer: Any, arrays: Mapping[str, mx.array]) -> Any:
    copy = cls.__new__(cls)
    nn.Module.__init__(copy)
    copy.group_size = layer.group_size
    for key, value in arrays.items():
        copy[key] = value
    return copy


class _Holder(nn.Module):
    """Layers as a model; the embedding tells the dtype of activations."""

    def __init__(self, layers: list[Any], dtype: mx.Dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(1, 8)
        self.embed.weight = self.embed.weight.astype(dtype)
        self.layers = layers


def _runner(layers: list[Any], policy: Policy) -> Any:
    """A function that times the accelerated layers: rows -> seconds of a call."""
    from backend_core import core

    first = layers[0]
    holder = _Holder(layers, first.scales.dtype)
    mx.eval(holder.parameters())
    core.accelerate(holder, policy)
    dtype = holder.embed(mx.array([0])).dtype
    k = first.scales.shape[-1] * first.group_size

    def seconds(rows: int) -> float:
        values = np.random.default_rng(0).standard_normal((1, rows, k), dtype=np.float32)
        x, rest = mx.array(values).astype(dtype), ()
        if first.weight.ndim == 3:
            experts = min(8, first.weight.shape[0])
            rest = (mx.broadcast_to(mx.arange(experts, dtype=mx.uint32), (1, rows, experts)),)
            x = x[:, :, None, None]
        mx.eval(x, rest, layers[0](x, *rest))
        some = layers if rows == 1 else layers[:2]
        return timed(lambda: mx.eval([layer(x, *rest) for layer in some])) / len(some)

    return seconds


def expanded(layer: Any, wide: mx.array | None = None) -> nn.Module:
    """A t5 layer with its weights as mlx's own 2-bit layer. wide: its 2-bit words, where they have been made."""
    size = layer.group_size
    if isinstance(layer, T5Linear):
        cls: Any = nn.QuantizedLinear
    elif isinstance(layer, T5Embedding):
        cls = nn.QuantizedEmbedding
    else:
        assert isinstance(layer, T5SwitchLinear)
        from mlx_lm.models.switch_layers import QuantizedSwitchLinear as cls
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.group_size, made.bits, made.mode = size, 2, "affine"
    made.weight = words(layer.weight, size) if wide is None else wide
    made.scales, made.biases = layer.scales, -layer.scales
    if "bias" in layer:
        made.bias = layer.bias
    if layer.weight.ndim == 3:
        made.global_scale = None
    elif isinstance(layer, T5Embedding):
        made.num_embeddings, made.dims = layer.weight.shape[0], layer.input_dims
    made.freeze()
    return made


def expand(layers: dict[str, Any], others: list[str], held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Replace `layers` by 2-bit ones, in place, and give back their tensors with all others.

    One by one, and packed weights in `held` are emptied behind it (they become zeros that take no memory), so that the
    two forms are never in memory together.

    others
        Paths of t5 layers of a model's own class, which take 2-bit words as they are.
    """
    result = dict(held)
    sizes = {path: layer.group_size for path, layer in layers.items()}
    for path in others:
        weight, scales = held[path + ".weight"], held[path + ".scales"]
        sizes[path] = next(s for s, b in GROUP_BYTES.items() if weight.shape[-1] == b * scales.shape[-1])
    uses = Counter(map(id, held.values()))
    for path, size in sizes.items():
        packed = held[path + ".weight"]
        result[path + ".weight"] = wide = words(packed, size)
        result[path + ".biases"] = -held[path + ".scales"]
        if path in layers:
            layers[path] = expanded(_filled(type(layers[path]), layers[path], _arrays(held, path)), wide)
        mx.eval(wide)
        if uses[id(packed)] == 1:
            # The host holds this very array until it is done, and never looks at it again.
            packed[...] = 0
    return result
