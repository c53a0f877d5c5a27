"""What is measured and how: series of samples, taken round by round, and what follows from them.

A *contender* is one way to do one piece of work (a layer at a number of rows). A *round* takes one sample of
each contender, and every second round goes the other way round, so that a drift of the machine hits all alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Sample = TypeVar("_Sample")

#: Threads of one contender may spin for a while after their last call; the next one must not pay for that.
SETTLE_S = 0.02
#: Seconds of a sample that the system's placing of woken threads does not change much.
LONG_S = 0.1


@dataclass
class Series:
    """Samples of one contender.

    name
        ``"ours"``, ``"stock"``, or what the peer calls its kernel (``"q4_K"``).
    role
        ``"ours"``, ``"stock"`` or ``"peer"``.
    detail
        Which offer, or which path of the peer.
    bytes_moved
        Bytes one call must read and write at least, in this contender's own format.
    samples
        Seconds per call.
    note
        How it was measured, if not plainly (``"64 of 4096 columns"``).
    """

    name: str
    role: str
    detail: str = ""
    bytes_moved: int = 0
    samples: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest sample."""
        return min(self.samples), max(self.samples)

    @property
    def gbps(self) -> float:
        """10^9 bytes a second."""
        return self.bytes_moved / self.median / 1e9

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "role": self.role, "detail": self.detail, "note": self.note,
            "bytes": self.bytes_moved, "median_s": self.median, "samples_s": self.samples,
        }  # fmt: skip


@dataclass
class Row:
    """One piece of work and all who did it.

    work
        Which work, for people: ``"2-bit g128 4096x4096"``.
    rows
        M, or L for attention.
    macs
        Multiply-adds of one call (0 if they do not count).
    series
        Ours first.
    read, fma
        Samples of the two limits taken in the same rounds: bytes a second, multiply-adds a second.
    facts
        Shape and format as data.
    """

    work: str
    rows: int
    macs: int = 0
    series: list[Series] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    fma: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def of(self, role: str) -> list[Series]:
        """The series of one role that have samples."""
        return [s for s in self.series if s.role == role and s.samples]

    @property
    def ours(self) -> Series | None:
        return next(iter(self.of("ours")), None)

    @property
    def stock(self) -> Series | None:
        return next(iter(self.of("stock")), None)

    def floor(self, bytes_moved: int) -> tuple[float, str]:
        """(seconds one call needs at least on this machine, ``"bytes"`` or ``"FMA"``); (0, "") if not measured."""
        limits = []
        if self.read and bytes_moved:
            limits.append((bytes_moved / statistics.median(self.read), "bytes"))
        if self.fma and self.macs:
            limits.append((self.macs / statistics.median(self.fma), "FMA"))
        return max(limits, default=(0.0, ""))

    def ratio(self, other: Series) -> float:
        """How many times faster than `other` ours is."""
        assert self.ours is not None
        return other.median / self.ours.median

    def of_floor(self) -> float:
        """Floor over our time: 1 is as fast as the machine allows. 0 if unknown."""
        if self.ours is None:
            return 0.0
        return self.floor(self.ours.bytes_moved)[0] / self.ours.median

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "work": self.work, "rows": self.rows, "facts": self.facts, "multiply_adds": self.macs,
            "series": [s.as_dict() for s in self.series if s.samples],
            "read_bytes_per_s": self.read, "multiply_adds_per_s": self.fma,
        }  # fmt: skip
        if self.ours is not None:
            seconds, bound = self.floor(self.ours.bytes_moved)
            data["floor_s"], data["bound_by"], data["of_floor"] = seconds, bound, self.of_floor()
            data["ratios"] = {s.name: self.ratio(s) for s in self.series if s.samples and s is not self.ours}
        return data


@dataclass
class Contender:
    """A series and how to take one more sample of it.

    sample
        () -> seconds per call.
    at_most
        Samples in all; stock is slow on some devices.
    """

    series: Series
    sample: Callable[[], float]
    at_most: int = 1 << 30


class Neighbours:
    """How many CPUs other processes kept busy since this object was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._start = self._foreign()

    def __call__(self) -> float:
        """CPUs, on average; 0 where the system does not say."""
        seconds = max(time.perf_counter() - self._begin, 1e-3)
        return max(0.0, self._foreign() - self._start) / seconds

    @staticmethod
    def _foreign() -> float:
        """Seconds that CPUs have spent on anything but this process and idling."""
        try:
            with open("/proc/stat", encoding="ascii") as f:
                fields = [int(v) for v in f.readline().split()[1:]]
        except (OSError, ValueError):
            return 0.0
        # user, nice, system, (idle, iowait), irq, softirq, steal; guests are in user already
        busy = sum(fields[:3]) + sum(fields[5:8])
        mine = os.times()
        return busy / os.sysconf("SC_CLK_TCK") - sum(mine[:4])


def _settled(sample: Callable[[], _Sample]) -> _Sample:
    """A sample of threads at work.

    Those that have slept may wake on one processor, and stay there for some milliseconds: the first sample after a
    pause is thrown away unless it was long.
    """
    begin = time.perf_counter()
    first = sample()
    return first if time.perf_counter() - begin > LONG_S else sample()


def rounds(contenders: Sequence[Contender], repeats: int, limits: Callable[[], tuple[float, float]] | None = None,
           row: Row | None = None, settle: float = SETTLE_S) -> None:  # fmt: skip
    """Take `repeats` rounds. `limits` measures the machine, once a round, into `row`."""
    for i in range(repeats):
        for c in contenders if i % 2 == 0 else contenders[::-1]:
            if len(c.series.samples) < c.at_most:
                time.sleep(settle)
                c.series.samples.append(_settled(c.sample))
        if limits is not None and row is not None:
            time.sleep(settle)
            read, fma = _settled(limits)
            row.read.append(read)
            row.fma.append(fma)
