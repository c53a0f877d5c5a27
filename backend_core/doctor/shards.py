"""Headers of safetensors files, read without touching the tensors.

Such a file is 8 bytes with the length of the header (little-endian), the header (JSON: tensor name -> dtype,
shape, data_offsets) and the data, at whose end the file ends.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The format's own limit.
MAX_HEADER_BYTES = 100_000_000

_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip


class ShardError(ValueError):
    """A safetensors file that cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Tensor:
    """One entry of a header; `nbytes` is its size in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A shard's tensors and what the file's size is and should be, in bytes."""

    tensors: dict[str, Tensor]
    expected: int
    found: int


def tensor_files(directory: Path) -> list[Path]:
    """The weight files of a model directory as mlx-lm finds them, sorted by name."""
    try:
        return sorted(directory.glob("model*.safetensors"))
    except OSError:
        return []


def read_header(path: Path) -> Header:
    """The header of one file. The file may be shorter or longer than the header says: compare the sizes.

    Raises :class:`ShardError` if there is no readable header.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ShardError(f"{path.name} is {'a directory' if stat.S_ISDIR(status.st_mode) else 'not a file'}")
        size = status.st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise ShardError(f"{path.name} is truncated: {size} bytes, without a complete header")
            length = struct.unpack("<Q", start)[0]
            if length > MAX_HEADER_BYTES:
                raise ShardError(f"{path.name} is no safetensors file: its header would be {length} bytes long")
            if 8 + length > size:
                raise ShardError(f"{path.name} is truncated: {8 + length} bytes expected for its header, {size} found")
            raw = file.read(length)
    except OSError as error:
        raise ShardError(f"{path.name} cannot be read: {error.strerror or error}") from error
    try:
        entries = json.loads(raw)
        tensors = {name: _tensor(entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{path.name} has a damaged header ({type(error).__name__}: {error})") from error
    ends = (e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__")
    return Header(tensors, 8 + length + max(ends, default=0), size)


def _tensor(entry: Any) -> Tensor:
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (begin, end, *shape)) or end < begin:
        raise ValueError("impossible shape or offsets")
    count = 1
    for n in shape:
        count *= n
    bits = _ITEM_BITS.get(entry["dtype"])
    if bits is not None and (count * bits + 7) // 8 != end - begin:
        raise ValueError(f"shape {list(shape)} of {entry['dtype']} does not fill {end - begin} bytes")
    return Tensor(str(entry["dtype"]), shape, end - begin)
