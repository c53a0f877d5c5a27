"""Telling t5 weights from everything else, by dtypes and shapes.

One rule for files and for models: a uint8 ``weight`` with float ``scales`` whose shapes are those of the format. Where
config.json carries the marker, a uint8 weight that does not fit is damaged, and is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend_core.errors import ModelError

from . import marker
from .layout import group_size_of

#: dtype (as safetensors files name it) and shape of a tensor.
Form = tuple[str, tuple[int, ...]]

_FLOATS = ("F16", "BF16", "F32")
_NAMES = {"uint8": "U8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def form_of(array: Any) -> Form:
    """The form of an mlx array."""
    name = str(array.dtype).rpartition(".")[2]
    return _NAMES.get(name, name), tuple(array.shape)


def find(forms: Mapping[str, Form], entry: Mapping[str, Any] | None, where: str = "") -> dict[str, int]:
    """t5 layers among tensors: path -> group size.

    forms
        Name of a tensor -> its form.
    entry
        The marker in config.json, or None.
    where
        Begins messages.

    Raises ModelError, with the tensor's name, for what does not fit a marker.
    """
    found = {}
    for name, (dtype, shape) in forms.items():
        if entry is not None and name.endswith(".scales") and name.removesuffix("scales") + "weight" not in forms:
            raise ModelError(f"{where}{name} belongs to no weight ({name.removesuffix('scales')}weight is missing)")
        path = name.removesuffix(".weight")
        if path == name or dtype != "U8":
            continue
        scales = forms.get(path + ".scales")
        if scales is None:
            if entry is not None and len(shape) in (2, 3):
                raise ModelError(f"{where}{name} has no scales ({path}.scales is missing)")
            continue
        size = group_size_of(shape, scales[1]) if scales[0] in _FLOATS else 0
        if not size:
            if entry is not None:
                raise ModelError(
                    f"{where}{name} {list(shape)} with scales {list(scales[1])} of {scales[0]} is no t5 weight: "
                    "a group of 128 has 26 bytes, one of 64 has 13"
                )
            continue
        stated = marker.group_size(entry, path) if entry is not None else None
        if stated is not None and stated != size:
            raise ModelError(f"{where}{name} has groups of {size}, config.json says {stated}")
        found[path] = size
    return found
