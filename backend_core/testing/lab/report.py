"""What a launch found out: faults and counts, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import LabError


@dataclass(frozen=True)
class Fault:
    """One thing a kernel did wrong, at one place of its text.

    kind
        ``out-of-bounds-read``, ``out-of-bounds-write``, ``write-to-input``, ``uninitialised-read``,
        ``unwritten-output``, ``race``, ``race-same-value``, ``barrier-divergence``, ``simd-divergence``,
        ``inactive-lane``, ``misaligned``, ``signed-overflow``, ``division-by-zero``, ``array-bounds``,
        ``threadgroup-memory``, ``threads``, ``crash`` or ``timeout``.
    buffer
        Name of the buffer or threadgroup variable, ``""`` if none is meant.
    message
        One sentence with offsets, lanes and places.
    lane
        ``thread_position_in_grid`` of the first lane that did it, None if no lane is meant.
    file, line
        Where in the kernel's text, ``""`` and 0 if unknown.
    source
        That line.
    count
        How often it happened there.
    """

    kind: str
    buffer: str
    message: str
    lane: tuple[int, int, int] | None = None
    file: str = ""
    line: int = 0
    source: str = ""
    count: int = 1

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        shown = f"\n    {self.line} | {self.source.strip()}" if self.source.strip() else ""
        return f"{where}{self.kind}: {self.message}{times}{shown}"


@dataclass(frozen=True)
class BufferCounts:
    """Traffic of one buffer in a launch.

    bytes_read, bytes_written
        Requested by all lanes together.
    unique_read, unique_written
        Bytes of the buffer that were read or written at least once.
    read_transactions, write_transactions
        Distinct 128-byte lines per access of the 32 lanes of a SIMD group, summed.
    nbytes
        Size of the buffer.
    touched
        Byte offsets of the first byte that was reached, and behind the last; (0, 0) if none was. Shows where a
        kernel ended up whose unsigned index arithmetic may have wrapped.
    """

    name: str
    nbytes: int
    bytes_read: int
    bytes_written: int
    unique_read: int
    unique_written: int
    read_transactions: int
    write_transactions: int
    touched: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ThreadgroupCounts:
    """One threadgroup variable: its size, and the bytes that all groups together read and wrote there."""

    name: str
    nbytes: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Report:
    """Faults and counts of one launch.

    threadgroup_bytes
        Threadgroup memory of one group: variables that were reached and `[[threadgroup(i)]]` arguments.
    threads
        Lanes that ran.
    seconds
        Wall time of the run with all checks, without compiling.
    """

    kernel: str
    faults: tuple[Fault, ...]
    buffers: dict[str, BufferCounts]
    threadgroup: tuple[ThreadgroupCounts, ...]
    threadgroup_bytes: int
    threads: int
    seconds: float

    def kinds(self) -> set[str]:
        """The kinds of faults found."""
        return {f.kind for f in self.faults}


@dataclass(frozen=True)
class Result:
    """Outputs of a launch, as numpy arrays in the order of the output names, and its report."""

    outputs: list[np.ndarray[Any, Any]]
    report: Report

    def check(self, allow: Collection[str] = ()) -> Result:
        """Itself, if no fault was found but of the kinds that are allowed. Raises :class:`LabError` that lists them.

        allow
            For kernels that mean it: ``("race-same-value",)`` if tiles at the edge overlap and write what another
            tile writes too.
        """
        found = [f for f in self.report.faults if f.kind not in allow]
        if found:
            listed = "\n".join(f"- {fault}" for fault in found)
            raise LabError(f"{self.report.kernel}: {len(found)} faults\n{listed}")
        return self
