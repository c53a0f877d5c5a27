"""Tensors in safetensors files, a block of rows at a time.

Files are read and written piecewise, so that a checkpoint of any size passes through a few megabytes of memory. dtypes
are the format's own names (``"U8"``, ``"U32"``, ``"F16"``, ``"BF16"``, ...); floats are handled as their bits, which is
all that repacking needs and what numpy has for every dtype.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backend_core.errors import ModelError

#: dtype in the file -> numpy dtype of its bits.
_BITS = {
    "BOOL": "<u1", "U8": "<u1", "I8": "<u1", "F8_E4M3": "<u1", "F8_E5M2": "<u1", "F8_E8M0": "<u1", "U16": "<u2",
    "I16": "<u2", "F16": "<u2", "BF16": "<u2", "U32": "<u4", "I32": "<u4", "F32": "<u4", "U64": "<u8", "I64": "<u8",
    "F64": "<u8", "C64": "<u8",
}  # fmt: skip
#: Bytes that are held of a tensor at a time.
BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `begin` is its first byte in the file, `nbytes` its size."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def columns(self) -> int:
        """Elements of a row: the last dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Product of all dimensions but the last."""
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows

    def read(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) as bits, (end - begin, columns). Raises ModelError if the file cannot be read."""
        dtype = np.dtype(_BITS[self.dtype])
        end = self.rows if end is None else end
        count, width = (end - begin) * self.columns, dtype.itemsize * self.columns
        try:
            with open(self.file, "rb") as f:
                values = np.fromfile(f, dtype, count, offset=self.begin + begin * width)
        except OSError as error:
            raise ModelError(f"{self.file}: {self.name} cannot be read: {error.strerror or error}") from error
        if values.size != count:
            raise ModelError(f"{self.file}: {self.name} is truncated: the file ends within it")
        return values.reshape(end - begin, self.columns)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Ranges of rows that cover the tensor, each of at most `block_bytes` (or one row)."""
        width = max(1, np.dtype(_BITS[self.dtype]).itemsize * self.columns)
        step = max(1, block_bytes // width)
        for begin in range(0, self.rows, step):
            yield begin, min(begin + step, self.rows)

    def raw(self) -> Iterator[bytes]:
        """The tensor's bytes, in pieces. Raises ModelError."""
        left = self.nbytes
        try:
            with open(self.file, "rb") as f:
                f.seek(self.begin)
                while left:
                    piece = f.read(min(left, BLOCK_BYTES))
                    if not piece:
                        raise ModelError(f"{self.file}: {self.name} is truncated: the file ends within it")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise ModelError(f"{self.file}: {self.name} cannot be read: {error.strerror or error}") from error


def read_file(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """(tensors in the order in which they lie, metadata) of a file.

    Raises ModelError, naming the file and the tensor, for anything that is not as the format demands.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            start = f.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
            if length > _MAX_HEADER_BYTES or 8 + length > size:
                raise ModelError(f"{path} is no complete safetensors file ({size} bytes)")
            header = json.loads(f.read(length))
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ holds something else than strings")
        tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header ({type(error).__name__}: {error})") from error
    tensors.sort(key=lambda t: (t.begin, t.name))
    for tensor in tensors:
        if tensor.begin + tensor.nbytes > size:
            raise ModelError(f"{path}: {tensor.name} is truncated: the file has {size} bytes and ends within it")
    return tensors, metadata


def _tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    shape, (begin, end), dtype = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
    if not isinstance(dtype, str) or any(type(n) is not int for n in (*shape, begin, end)):
        raise ValueError(f"{name}: dtype, shape or offsets of a wrong type")
    count = 1
    for n in shape:
        count *= n
    if begin < 0 or end < begin or any(n < 0 for n in shape):
        raise ValueError(f"{name}: impossible shape or offsets")
    if dtype in _BITS and count * np.dtype(_BITS[dtype]).itemsize != end - begin:
        raise ValueError(f"{name}: shape {list(shape)} of {dtype} does not fill {end - begin} bytes")
    return Tensor(name, path, dtype, shape, data + begin, end - begin)


@dataclass(frozen=True)
class Output:
    """A tensor to be written: `pieces` yields its `nbytes` bytes when they are due."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Iterable[bytes]


def write_file(path: Path, outputs: Iterable[Output], metadata: dict[str, str]) -> int:
    """Write tensors in the given order; returns the bytes of all tensors.

    Bytes and booleans come last, so that everything else stays aligned. Raises OSError, and ValueError if a tensor
    yields another number of bytes than it promised.
    """
    ordered = sorted(outputs, key=lambda o: o.dtype in ("U8", "I8", "BOOL"))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for o in ordered:
        header[o.name] = {"dtype": o.dtype, "shape": list(o.shape), "data_offsets": [at, at + o.nbytes]}
        at += o.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for o in ordered:
            written = 0
            for piece in o.pieces:
                f.write(piece)
                written += len(piece)
            if written != o.nbytes:
                raise ValueError(f"{o.name}: {written} bytes instead of {o.nbytes}")
    return at
