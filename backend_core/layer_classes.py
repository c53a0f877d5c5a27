"""Layer classes that plugins bring, for weights that mlx has no layer for.

A plugin that loads a checkpoint format of its own puts modules of its own class into the model. ``@layer_class(...)``
makes them sites like stock's layers: they are found, offered to every plugin, verified, raced and reported. The class's
own methods take the part of stock: they are what runs where no offer wins, and what offers are raced against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T", bound=type)

KINDS = ("linear", "embedding", "switch", "multi")


@dataclass(frozen=True)
class LayerFormat:
    """What weights of a plugin's format are.

    mode
        ``LinearSite.mode`` of the layers, a name of the plugin's own.
    bits
        ``LinearSite.bits``: bits of the affine form.
    as_affine
        ``as_affine(weight, scales) -> (words, scales, biases)``: the same weights in mlx's affine format, with `bits`
        bits a code and the module's ``group_size``. All are numpy arrays of one matrix: weight (n, ...) as the module
        holds it, scales float32 (n, groups); words uint32 (n, k * bits / 32), scales and biases float32 (n, groups).
        The core verifies every offer with it, so that it must not share code with kernels.
    """

    mode: str
    bits: int
    as_affine: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


_CLASSES: dict[type, tuple[str, LayerFormat]] = {}
_FORMATS: dict[str, LayerFormat] = {}


def layer_class(kind: str, form: LayerFormat) -> Callable[[_T], _T]:
    """Class decorator: instances are sites of `kind` (as ``LinearSite.kind``) with weights of format `form`.

    Instances are modules with parameters ``weight``, ``scales``, possibly ``bias``, and an attribute ``group_size``;
    they are called as the kind says. Embeddings also have ``rows(indices, dtype)``: their rows in that dtype.

    Raises ValueError for an unknown kind, or a mode that another format has.
    """
    from .checkpoints import MODES

    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    if form.mode in (*MODES, "dense") or _FORMATS.get(form.mode, form) != form:
        raise ValueError(f"mode {form.mode!r} is taken")

    def register(cls: _T) -> _T:
        _FORMATS[form.mode] = form
        _CLASSES[cls] = (kind, form)
        return cls

    return register


def kinds() -> dict[type, str]:
    """Registered classes -> kind."""
    return {cls: kind for cls, (kind, _) in _CLASSES.items()}


def format_of(cls: type) -> LayerFormat | None:
    """The format of a registered class."""
    found = _CLASSES.get(cls)
    return found[1] if found else None


def format_named(mode: str) -> LayerFormat | None:
    """The format with that mode."""
    return _FORMATS.get(mode)


def is_embedding(cls: Any) -> bool:
    """True for stock's embeddings and those of plugins."""
    import mlx.nn as nn

    return cls in (nn.Embedding, nn.QuantizedEmbedding) or _CLASSES.get(cls, ("",))[0] == "embedding"
