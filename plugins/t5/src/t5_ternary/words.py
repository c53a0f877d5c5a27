"""t5 bytes as mlx's 2-bit words, in mlx operations: on any device, lazily.

The same table and the same forties of bits as :mod:`t5_ternary.convert`.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from .layout import GROUP_BYTES


@functools.cache
def _table() -> mx.array:
    values = np.arange(256)
    return mx.array((values[:, None] // 3 ** np.arange(5) % 3 @ 4 ** np.arange(5)).astype(np.uint64))


def words(packed: mx.array, group_size: int) -> mx.array:
    """t5 bytes (..., columns) uint8 -> 2-bit codes (..., k / 16) uint32. Bytes above 242 give any codes."""
    lead, size = packed.shape[:-1], GROUP_BYTES[group_size]
    groups = packed.shape[-1] // size
    fours = -(-size // 4)
    bits = _table()[packed.reshape(-1, size)]
    bits = mx.pad(bits, ((0, 0), (0, 4 * fours - size))).reshape(-1, fours, 4)
    numbers = bits[..., 0] | (bits[..., 1] << 10) | (bits[..., 2] << 20) | (bits[..., 3] << 30)
    codes = numbers.view(mx.uint8).reshape(-1, fours, 8)[..., :5].reshape(-1, 5 * fours)
    return mx.contiguous(codes[:, : group_size // 4]).view(mx.uint32).reshape(*lead, groups * group_size // 16)
