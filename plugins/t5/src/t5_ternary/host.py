"""The shared library's plain functions for the host: conversion and validation in C++, without mlx and the core.

They serve :mod:`t5_ternary.convert`, which does the same in numpy where the plugin was installed without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from backend_core.machine import affinity

from .layout import GROUP_BYTES

#: Groups in a piece of work for a thread, a few MB, and the most threads: memory is the limit then.
_GROUPS, _MOST_THREADS = 1 << 17, 8


@functools.cache
def library() -> Any:
    """The library, None where there is none that has these functions."""
    from .plugin import library as file

    try:
        found = ctypes.CDLL(str(file()))
        found.t5_host_words.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        found.t5_host_words.restype = None
        found.t5_host_faults.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        found.t5_host_faults.restype = ctypes.c_int64
    except (OSError, AttributeError):
        return None
    return found


def to_affine(packed: np.ndarray, group_size: int) -> np.ndarray | None:
    """As :func:`t5_ternary.convert.to_affine`; None without the library."""
    code, size = library(), GROUP_BYTES[group_size]
    if code is None:
        return None
    data = np.ascontiguousarray(packed)
    groups = data.size // size
    words = np.empty((*packed.shape[:-1], packed.shape[-1] // size * group_size // 16), np.uint32)

    def part(begin: int, end: int) -> None:
        code.t5_host_words(
            data.ctypes.data + begin * size, words.ctypes.data + begin * group_size // 4, end - begin, group_size
        )

    _in_parts(part, groups)
    return words


def faults(packed: np.ndarray, group_size: int) -> int | None:
    """How many groups of bytes hold something invalid; None without the library."""
    code, size = library(), GROUP_BYTES[group_size]
    if code is None:
        return None
    data = np.ascontiguousarray(packed)
    # One thread: it is as fast as memory, and the others read the next weights meanwhile.
    return int(code.t5_host_faults(data.ctypes.data, data.size // size, group_size))


def _in_parts(part: Callable[[int, int], Any], groups: int) -> list[Any]:
    """`part(begin, end)` for ranges that cover all groups, on several threads where there are several."""
    places = range(0, groups, _GROUPS)
    if len(places) < 2:
        return [part(0, groups)]
    with ThreadPoolExecutor(max(1, min(len(affinity()), _MOST_THREADS))) as pool:
        return list(pool.map(lambda at: part(at, min(at + _GROUPS, groups)), places))
