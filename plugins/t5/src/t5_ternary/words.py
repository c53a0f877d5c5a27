"""t5 bytes as mlx's 2-bit words, lazily: by a kernel where layers run on the CPU, else in mlx operations.

The operations go through the same table as :mod:`t5_ternary.convert`, four bytes at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from .layout import GROUP_BYTES


@functools.cache
def _table() -> mx.array:
    values = np.arange(256)
    return mx.array((values[:, None] // 3 ** np.arange(5) % 3 @ 4 ** np.arange(5)).astype(np.uint64))


def words(packed: mx.array, group_size: int) -> mx.array:
    """t5 bytes (..., columns) uint8 -> 2-bit codes (..., k / 16) uint32. Bytes above 242 give any codes."""
    kernel = _kernel() if mx.default_device() == mx.cpu else None
    if kernel is None:
        return operations(packed, group_size)
    from backend_core.cpu_kernel import like

    width = packed.shape[-1] // GROUP_BYTES[group_size] * group_size // 16
    (made,) = kernel(
        inputs=[packed], output_shapes=[like(0, last=width)], output_dtypes=[mx.uint32], params=[group_size]
    )
    return made


@functools.cache
def _kernel() -> Any:
    """The kernel, None without the native module or without a compiler when this was installed."""
    from backend_core import native

    from .plugin import WORDS, library

    if not native.available() or not library().is_file():
        return None
    from backend_core.cpu_kernel import cpu_kernel

    return cpu_kernel(library(), WORDS, name="t5/words")


def operations(packed: mx.array, group_size: int) -> mx.array:
    """:func:`words` in mlx's own operations."""
    lead, size = packed.shape[:-1], GROUP_BYTES[group_size]
    groups = packed.shape[-1] // size
    fours = -(-size // 4)
    bits = _table()[packed.reshape(-1, size)]
    bits = mx.pad(bits, ((0, 0), (0, 4 * fours - size))).reshape(-1, fours, 4)
    numbers = bits[..., 0] | (bits[..., 1] << 10) | (bits[..., 2] << 20) | (bits[..., 3] << 30)
    codes = numbers.view(mx.uint8).reshape(-1, fours, 8)[..., :5].reshape(-1, 5 * fours)
    return mx.contiguous(codes[:, : group_size // 4]).view(mx.uint32).reshape(*lead, groups * group_size // 16)
