"""The t5 format: where each ternary weight lies, and how t5 weights are recognised.

A weight matrix (n, k) is stored as uint8 (n, groups * bytes), with one scale for each group of 64 or 128 weights along
k; k is a whole number of groups. A group of 128 takes 26 bytes, one of 64 takes 13, groups follow each other. Byte b of
a group holds its weights 5b .. 5b + 4 as the digits of a number to base 3, the first weight as the lowest digit::

    byte = t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4          value = scale * (t - 1), t in 0, 1, 2

The digits beyond the group's end (two of 128, one of 64) are 1, so that they stand for zeros. Bytes above 242 do not
occur.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Weights of a group -> bytes of a group.
GROUP_BYTES = {64: 13, 128: 26}
#: Largest byte: five digits of 2.
LARGEST = 242
#: What the digits beyond the group's end add to its last byte, and how many digits of that byte are weights.
PADDING = {64: (81, 4), 128: (27 + 81, 3)}
#: Version of this layout, as the marker in config.json states it.
VERSION = 1


def packed_columns(k: int, group_size: int) -> int:
    """Bytes of a row of k weights. Raises ValueError if the format has no such row."""
    if group_size not in GROUP_BYTES:
        raise ValueError(f"t5 has groups of 64 and 128 weights, not of {group_size}")
    if k <= 0 or k % group_size:
        raise ValueError(f"{k} weights a row are not a whole number of groups of {group_size}")
    return k // group_size * GROUP_BYTES[group_size]


def group_size_of(weight_shape: Sequence[int], scales_shape: Sequence[int]) -> int:
    """The group size of a uint8 weight with these scales, 0 if the shapes are not those of t5.

    Shapes have two dimensions, or three with the experts first.
    """
    if len(weight_shape) != len(scales_shape) or len(weight_shape) not in (2, 3):
        return 0
    if tuple(weight_shape[:-1]) != tuple(scales_shape[:-1]) or not scales_shape[-1]:
        return 0
    for group_size, size in GROUP_BYTES.items():
        if weight_shape[-1] == scales_shape[-1] * size:
            return group_size
    return 0
