"""Element types of the lab, by the names that mlx and Metal give them.

numpy has no bfloat16, so arrays of it are uint16 that hold the bits, wrapped by :class:`BFloat16Array` on the way
in and out of a kernel. :func:`to_bfloat16` rounds to nearest even, :func:`to_float32` is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LabDtype:
    """An element type: its name in mlx, its name in Metal text, the numpy type of its storage."""

    name: str
    metal: str
    storage: np.dtype[Any]

    def __repr__(self) -> str:
        return f"lab.{self.name}"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.storage.itemsize)


def _make(name: str, metal: str, storage: str) -> LabDtype:
    return LabDtype(name, metal, np.dtype(storage))


bool_ = _make("bool_", "bool", "bool")
int8, int16 = _make("int8", "int8_t", "int8"), _make("int16", "int16_t", "int16")
int32, int64 = _make("int32", "int32_t", "int32"), _make("int64", "int64_t", "int64")
uint8, uint16 = _make("uint8", "uint8_t", "uint8"), _make("uint16", "uint16_t", "uint16")
uint32, uint64 = _make("uint32", "uint32_t", "uint32"), _make("uint64", "uint64_t", "uint64")
float16, float32 = _make("float16", "float16_t", "float16"), _make("float32", "float", "float32")
bfloat16 = _make("bfloat16", "bfloat16_t", "uint16")

_ALL = (bool_, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, float32, bfloat16)
_BY_NAME = {d.name: d for d in _ALL} | {"bool": bool_}


class BFloat16Array(np.ndarray[Any, Any]):
    """A uint16 array of bfloat16 bits. Everything numpy does with it is done with the bits."""


def to_bfloat16(values: Any) -> BFloat16Array:
    """Rounds numbers (any shape) to bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, quiet, rounded).astype(np.uint16).reshape(np.shape(values)).view(BFloat16Array)


def to_float32(values: Any) -> np.ndarray[Any, Any]:
    """Any array of the lab as float32: bfloat16 bits are decoded, other types converted."""
    array = np.asanyarray(values)
    if isinstance(array, BFloat16Array):
        return (np.asarray(array).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, dtype=np.float32)


def dtype_of(value: Any) -> LabDtype:
    """The lab's type for a lab dtype, an array, a numpy or mlx dtype, or a name ("float16").

    Raises ValueError for types that kernels cannot have (float64).
    """
    if isinstance(value, LabDtype):
        return value
    if isinstance(value, BFloat16Array):
        return bfloat16
    if isinstance(value, np.ndarray):
        value = value.dtype
    if isinstance(value, type) and issubclass(value, np.generic):
        value = np.dtype(value)
    name = value if isinstance(value, str) else getattr(value, "name", None) or str(value)
    name = name.removeprefix("mlx.core.").removeprefix("lab.")
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is no element type of kernels; there are {', '.join(d.name for d in _ALL)}")
    return _BY_NAME[name]


@dataclass(frozen=True)
class Sparse:
    """A buffer of zeros that takes memory only where a kernel touches it; see :func:`sparse`."""

    shape: tuple[int, ...]
    dtype: LabDtype

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes a full array would take."""
        return self.size * self.dtype.itemsize


def sparse(shape: tuple[int, ...], dtype: Any) -> Sparse:
    """An input of zeros larger than memory: for kernels whose index arithmetic must hold beyond 2^31 elements."""
    return Sparse(tuple(shape), dtype_of(dtype))


def skew_of(array: np.ndarray[Any, Any]) -> int:
    """How far the array starts from a multiple of 128 bytes, counted from the start of the array it is a slice of.

    As in mlx, where a contiguous slice is bound with an offset and arrays of their own begin at a page.
    """
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return int(array.ctypes.data - owner.ctypes.data) % 128


def as_array(value: Any) -> tuple[np.ndarray[Any, Any], LabDtype]:
    """A Python number, list or array as a numpy array and its type: int is int32, float is float32, as in mlx."""
    if isinstance(value, bool):
        return np.array(value), bool_
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{value} does not fit into int32, which a number becomes; give an array or np.int64")
        return np.array(value, dtype=np.int32), int32
    if isinstance(value, float):
        return np.array(value, dtype=np.float32), float32
    if type(value).__module__.startswith("mlx.") and dtype_of(value.dtype) is bfloat16:
        # numpy cannot take it over: the bits can.
        import mlx.core as mx

        return np.array(value.view(mx.uint16)).view(BFloat16Array), bfloat16
    array = np.asanyarray(value)
    dtype = dtype_of(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if dtype is bfloat16 and array.dtype != np.uint16:
        array = array.view(np.uint16).view(BFloat16Array)
    return array, dtype
