"""Proof that a rewritten checkpoint holds the weights of its source.

What was converted is decoded on both sides, digit by digit, by other code than the conversion's; everything else must
be equal byte for byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backend_core.errors import ModelError

from . import convert, marker
from .tensors import Tensor, read_file

if TYPE_CHECKING:
    from .repack import Layer, Plan, Progress

#: Bytes of packed weights that are decoded at a time: each becomes five.
_BLOCK = 1 << 20


def compare(p: Plan, result: Path, progress: Progress | None = None) -> int:
    """Compare every tensor of `result` with the plan's source. Returns how many there are.

    Raises ModelError, naming the first tensor that differs.
    """
    written: dict[str, Tensor] = {}
    for path in p.files:
        written.update({t.name: t for t in read_file(result / path)[0]})
    expected = set(written)
    for held, _ in p.files.values():
        for tensor in held:
            layer_path, _, part = tensor.name.rpartition(".")
            layer = p.layers.get(layer_path) if part in ("weight", "scales", "biases") else None
            if layer is not None and part == "weight":
                _layer(p, layer, written, progress)
                expected -= {f"{layer_path}.{x}" for x in ("weight", "scales", "biases")}
            elif layer is None:
                _same(tensor, written.get(tensor.name), progress)
                expected.discard(tensor.name)
    if expected:
        raise ModelError(f"{result}: {min(expected)} is not in the source")
    _config(p, result)
    return len(written)


def _layer(p: Plan, layer: Layer, written: dict[str, Tensor], progress: Progress | None) -> None:
    weight, scales = written.get(layer.weight.name), written.get(layer.scales.name)
    biases = written.get(f"{layer.path}.biases")
    if weight is None or scales is None:
        raise ModelError(f"{layer.path}: weight or scales are missing")
    _same(layer.scales, scales, progress)
    if p.to == "t5":
        packed, affine, sign = weight, layer.weight, layer.biases
        if biases is not None:
            raise ModelError(f"{biases.name} should not be there")
    else:
        packed, affine, sign = layer.weight, weight, biases
    if sign is None:
        raise ModelError(f"{layer.path}: there are no biases to compare")
    for begin, end in scales.blocks():
        if not np.array_equal(convert.negated(scales.read(begin, end)), sign.read(begin, end)):
            raise ModelError(f"{sign.name} is not the negative of the scales (rows {begin}..{end})")
    for begin, end in packed.blocks(_BLOCK):
        data = packed.read(begin, end)
        if fault := convert.first_fault(data, layer.group_size):
            raise ModelError(f"{packed.name}: {fault} (from row {begin})")
        if not np.array_equal(_trits(data, layer.group_size), _codes(affine.read(begin, end))):
            raise ModelError(f"{layer.weight.name}: weights differ (rows {begin}..{end})")
        if progress is not None:
            progress(data.nbytes, layer.path)


def _trits(packed: np.ndarray, group_size: int) -> np.ndarray:
    """(rows, k) digits of t5 bytes, by division."""
    groups = packed.reshape(len(packed), -1, -(-group_size // 5))
    digits = np.empty((*groups.shape, 5), np.uint8)
    for i in range(5):
        digits[..., i] = groups // np.uint8(3**i) % np.uint8(3)
    return digits.reshape(len(packed), groups.shape[1], -1)[:, :, :group_size].reshape(len(packed), -1)


def _codes(words: np.ndarray) -> np.ndarray:
    """(rows, k) 2-bit codes of words, by shifts."""
    codes = np.empty((*words.shape, 16), np.uint8)
    for i in range(16):
        codes[..., i] = words >> np.uint32(2 * i) & np.uint32(3)
    return codes.reshape(len(words), -1)


def _same(source: Tensor, copy: Tensor | None, progress: Progress | None) -> None:
    if copy is None:
        raise ModelError(f"{source.name} is missing")
    if (source.dtype, source.shape) != (copy.dtype, copy.shape):
        raise ModelError(f"{source.name} is {copy.dtype} {list(copy.shape)}, not {source.dtype} {list(source.shape)}")
    for a, b in zip(source.raw(), copy.raw(), strict=True):
        if a != b:
            raise ModelError(f"{source.name}: its copy differs")
        if progress is not None:
            progress(len(a), source.name)


def _config(p: Plan, result: Path) -> None:
    """The marker must be there, or gone."""
    config = json.loads((result / "config.json").read_text(encoding="utf-8"))
    if (marker.find(config) is not None) != (p.to == "t5"):
        raise ModelError(f"{result}/config.json does not say what it should")
