"""Between t5 bytes and mlx's affine 2-bit words, by tables; the way to words in C++ where the library has it.

Twenty weights are five bytes of 2-bit codes and four bytes of t5. Both directions go through tables that relate ten
bits (five codes) with one t5 byte, or twenty with two; nothing is ever widened to one number a weight. Codes equal
trits, so that an affine 2-bit matrix with bias = -scale and its t5 form are the same weights, bit for bit.
"""

from __future__ import annotations

import functools

import numpy as np

from . import host
from .layout import GROUP_BYTES, LARGEST, PADDING

#: In the table from ten bits to a byte: one of the five codes is 3.
_NOT_TERNARY = 255


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(ten bits of codes -> byte or 255, byte -> ten bits of codes)."""
    bits = np.arange(1024)
    codes = bits[:, None] >> np.arange(0, 10, 2) & 3
    to_byte = np.where((codes == 3).any(1), _NOT_TERNARY, codes @ 3 ** np.arange(5)).astype(np.uint8)
    values = np.arange(256)
    trits = values[:, None] // 3 ** np.arange(5) % 3
    return to_byte, (trits @ 4 ** np.arange(5)).astype(np.uint16)


def from_affine(words: np.ndarray, group_size: int) -> np.ndarray | None:
    """2-bit codes (..., k / 16) uint32 -> t5 bytes (..., columns) uint8; None if a code is 3.

    Code j of a row lies at bits [2j, 2j + 2) of the row's little-endian words.
    """
    to_byte, _ = _tables()
    lead, size = words.shape[:-1], GROUP_BYTES[group_size]
    data = np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(-1, group_size // 4)
    # Fives of bytes as 40-bit numbers; what is missing at the end of a group are codes of 1.
    fives = -(-data.shape[1] // 5)
    padded = np.full((len(data), 5 * fives), 0x55, np.uint8)
    padded[:, : data.shape[1]] = data
    wide = np.zeros((len(data), fives, 8), np.uint8)
    wide[..., :5] = padded.reshape(len(data), fives, 5)
    numbers = wide.view("<u8")[..., 0]
    out = np.empty((len(data), fives, 4), np.uint8)
    for i in range(4):
        out[..., i] = to_byte[(numbers >> np.uint64(10 * i)) & np.uint64(1023)]
    packed = out.reshape(len(data), 4 * fives)[:, :size]
    if (packed == _NOT_TERNARY).any():
        return None
    return np.ascontiguousarray(packed).reshape(*lead, words.shape[-1] * 16 // group_size * size)


@functools.cache
def _pairs() -> np.ndarray:
    """Two bytes -> twenty bits of codes, uint32."""
    _, to_bits = _tables()
    low = to_bits.astype(np.uint32)
    return (low[None, :] | low[:, None] << np.uint32(10)).reshape(-1)


#: The words of 128 weights from numbers of twenty bits: (number, shift to the left, or to the right below 0).
_WORDS = (
    ((0, 0), (1, 20)), ((1, -12), (2, 8), (3, 28)), ((3, -4), (4, 16)), ((4, -16), (5, 4), (6, 24)),
    ((6, -8), (7, 12)), ((8, 0), (9, 20)), ((9, -12), (10, 8), (11, 28)), ((11, -4), (12, 16)),
)  # fmt: skip
#: Groups at a time, so that everything stays in a cache.
_GROUPS = 8192


def to_affine(packed: np.ndarray, group_size: int) -> np.ndarray:
    """t5 bytes (..., columns) uint8 -> 2-bit codes (..., k / 16) uint32.

    The inverse of :func:`from_affine`. The bytes must be valid: see :func:`first_fault`.
    """
    words = host.to_affine(packed, group_size)
    return to_affine_in_numpy(packed, group_size) if words is None else words


def to_affine_in_numpy(packed: np.ndarray, group_size: int) -> np.ndarray:
    """:func:`to_affine` without the library."""
    lead, size = packed.shape[:-1], GROUP_BYTES[group_size]
    data = np.ascontiguousarray(packed).reshape(-1, size)
    table, even = _pairs(), size + size % 2
    words = np.empty((len(data), group_size // 16), np.uint32)
    for begin in range(0, len(data), _GROUPS):
        part = data[begin : begin + _GROUPS]
        if even > size:
            part = np.pad(part, ((0, 0), (0, 1)))
        numbers = np.take(table, np.ascontiguousarray(part.view("<u2").T), mode="wrap")  # nothing wraps: no checks
        other = np.empty(len(part), np.uint32)
        for j, terms in enumerate(_WORDS[: group_size // 16]):
            word = _shifted(numbers, *terms[0])
            for i, shift in terms[1:]:
                word |= _shifted(numbers, i, shift, other)
            words[begin : begin + len(part), j] = word
    return words.reshape(*lead, packed.shape[-1] // size * group_size // 16)


def _shifted(numbers: np.ndarray, i: int, shift: int, out: np.ndarray | None = None) -> np.ndarray:
    return (np.left_shift if shift >= 0 else np.right_shift)(numbers[i], np.uint32(abs(shift)), out=out)


def first_fault(packed: np.ndarray, group_size: int) -> str:
    """What is wrong with t5 bytes (..., columns), "" if nothing: a byte above 242, or padding that is not 1."""
    # What is valid, as nearly all is, need not be searched for the place.
    if not packed.size or host.faults(packed, group_size) == 0:
        return ""
    if packed.max() > LARGEST:
        at = int(np.argmax(packed.reshape(-1) > LARGEST))
        return f"byte {at} is {int(packed.reshape(-1)[at])}; five trits are at most {LARGEST}"
    padding, digits = PADDING[group_size]
    last = packed.reshape(-1, GROUP_BYTES[group_size])[:, -1]
    # Bytes below the padding's wrap around.
    wrong = last - np.uint8(padding) >= 3**digits
    if wrong.any():
        return f"the last byte of group {int(np.argmax(wrong))} does not end in trits of 1"
    return ""


def negated(scales: np.ndarray) -> np.ndarray:
    """-scales for numbers given as their bits: uint16 (half precision) or uint32 (float32)."""
    if scales.dtype not in (np.uint16, np.uint32):
        raise TypeError(f"scales as bits must be uint16 or uint32, not {scales.dtype}")
    return scales ^ scales.dtype.type(1 << (8 * scales.dtype.itemsize - 1))
