"""Needed libraries of a shared library, read from the file: nothing is loaded or executed."""

from __future__ import annotations

import struct
from pathlib import Path

_MAX_BYTES = 1 << 20  # no sound dynamic section or string table read here is larger
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ = 1, 5, 10


class ElfError(ValueError):
    """Not a 64-bit little-endian ELF file, or a damaged one."""


def needed_libraries(path: Path) -> list[str]:
    """The DT_NEEDED entries of a 64-bit little-endian ELF file, in order.

    Raises :class:`ElfError` for another kind of file and OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            raise ElfError(f"{path} is not a 64-bit little-endian ELF file")
        table, entry, count = struct.unpack_from("<32xQ14xHH", header)
        if entry < 56:
            raise ElfError(f"{path} has program headers of {entry} bytes")

        def read(offset: int, size: int) -> bytes:
            if size > _MAX_BYTES or offset > 1 << 62:
                raise ElfError(f"{path} has a part of {size} bytes at {offset}")
            file.seek(offset)
            data = file.read(size)
            if len(data) != size:
                raise ElfError(f"{path} is truncated")
            return data

        segments = []
        raw = read(table, entry * count)
        for i in range(count):
            kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", raw, i * entry)
            segments.append((kind, offset, address, size))
        dynamic = next(((offset, size) for kind, offset, _, size in segments if kind == _PT_DYNAMIC), None)
        if dynamic is None:
            return []
        block = read(*dynamic)
        needed, strings, length = [], 0, 0
        for tag, value in struct.iter_unpack("<QQ", block[: len(block) // 16 * 16]):
            if tag == _DT_NEEDED:
                needed.append(value)
            elif tag == _DT_STRTAB:
                strings = value
            elif tag == _DT_STRSZ:
                length = value
            elif tag == 0:
                break
        for kind, offset, address, size in segments:
            if kind == _PT_LOAD and address <= strings < address + size:
                text = read(offset + strings - address, length)
                names = [text[at:].split(b"\0", 1)[0] for at in needed]
                return [name.decode("utf-8", "replace") for name in names]
    raise ElfError(f"{path} has no string table")
