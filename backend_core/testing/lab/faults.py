"""Makes sentences of the faults that the runtime recorded."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from . import launch_abi
from .compiler import source_line
from .module import Module
from .places import Place, chain, in_kernel
from .report import Fault


@dataclass(frozen=True)
class Names:
    """What the sentences call things: buffers in launch order with item and total bytes, threadgroup variables."""

    buffers: list[tuple[str, int, int]]
    arrays: list[tuple[str, int]]


def _lane(thread: launch_abi.Fault, other: bool = False) -> str:
    x, y, z = thread.other if other else thread.thread
    return f"lane ({x}, {y}, {z})"


def _where(f: launch_abi.Fault, names: Names) -> tuple[str, str]:
    """The buffer's name and a phrase for the place in it."""
    if f.space == 0:
        name, item, nbytes = names.buffers[f.buffer]
        if f.offset % item:
            return name, f"byte {f.offset} of {name!r} ({nbytes // item} elements of {item} bytes)"
        return name, f"element {f.offset // item} of {name!r} ({nbytes // item} elements of {item} bytes)"
    if f.space == 1 and 0 <= f.buffer < len(names.arrays):
        name, nbytes = names.arrays[f.buffer]
        return name, f"byte {f.offset} of threadgroup variable {name!r} ({nbytes} bytes)"
    return "", f"address {f.offset & (2**64 - 1):#x}, which belongs to no buffer"


def describe(raw: launch_abi.Fault, module: Module, names: Names) -> Fault | None:
    """A fault for the report, or None if it turns out to be none (one operation that the compiler duplicated)."""
    kind = launch_abi.FAULT_KINDS[raw.kind]
    callers, other_callers = tuple(raw.stack), tuple(raw.other_stack)
    here = chain(module.path, raw.pc, callers)
    place = in_kernel(here, module.texts)
    there: Place | None = None
    if raw.other_pc:
        elsewhere = chain(module.path, raw.other_pc, other_callers)
        if kind in ("simd-divergence", "barrier-divergence"):
            if raw.value == 1 and here == elsewhere:
                return None
            # Both may wait in one function that was called from two places.
            common = 0
            while raw.value != 4 and common < min(len(here), len(elsewhere)) and here[common] == elsewhere[common]:
                common += 1
            place = in_kernel(here[common:], module.texts) or place
            elsewhere = elsewhere[common:] or elsewhere
        there = in_kernel(elsewhere, module.texts)
    if raw.file:
        file = raw.file.decode()
        own = in_kernel((Place(file, raw.line),), module.texts)
        place = own or place
    buffer, where = _where(raw, names)
    message = _message(kind, raw, where, there)
    text = source_line(place.file, place.line, module.texts) if place else ""
    x, y, z = raw.thread
    lane = None if kind in ("timeout",) else (x, y, z)
    file, line = (place.file, place.line) if place else ("", 0)
    return Fault(kind, buffer, message, lane, file, line, text, int(raw.count))


def _elsewhere(there: Place | None) -> str:
    return f" ({there.file}:{there.line})" if there else ""


def _message(kind: str, raw: launch_abi.Fault, where: str, there: Place | None) -> str:
    me = _lane(raw)
    if kind == "out-of-bounds-read":
        return f"{me} reads {raw.size} bytes at {where}"
    if kind == "out-of-bounds-write":
        return f"{me} writes {raw.size} bytes at {where}"
    if kind == "write-to-input":
        return f"{me} writes {where}, which is an input"
    if kind == "uninitialised-read":
        return f"{me} reads {raw.size} bytes at {where}, which nobody has written"
    if kind in ("race", "race-same-value"):
        mine = "writes" if raw.write else "reads"
        same = "; both wrote the same value" if kind == "race-same-value" else ""
        theirs = "wrote" if raw.other_write else "read"
        return (
            f"{me} {mine} {where}, which {_lane(raw, True)} {theirs}{_elsewhere(there)}, with no barrier between{same}"
        )
    if kind in ("simd-divergence", "barrier-divergence"):
        what = "a SIMD operation" if kind == "simd-divergence" else "a threadgroup barrier"
        whose = "its SIMD group" if kind == "simd-divergence" else "its threadgroup"
        if raw.value == 3:
            return f"{me} waits in {what}, but lanes of {whose} have left the kernel"
        if raw.value == 4:
            return f"{me} waits in {what}, but {_lane(raw, True)} of {whose} does so in another round of a loop"
        return f"{me} waits in {what}, but {_lane(raw, True)} of {whose} is elsewhere{_elsewhere(there)}"
    if kind == "inactive-lane":
        return f"{me} takes the value of lane {raw.value} of its SIMD group, which does not take part"
    if kind == "misaligned":
        start = ", and the buffer itself starts at none" if raw.space == 0 and raw.offset % raw.value == 0 else ""
        return f"{me} reaches {where} as a type that has to lie at a multiple of {raw.value} bytes{start}"
    if kind == "signed-overflow":
        operator = "<<" if raw.value == ord("<") else chr(raw.value)
        return f"{me}: the result of signed {operator} does not fit its type"
    if kind == "division-by-zero":
        return f"{me} divides by zero, or the smallest integer by -1"
    if kind == "array-bounds":
        return f"{me}: index {raw.value - 2**64 if raw.value >= 2**63 else raw.value} is beyond an array"
    if kind == "crash":
        name = signal.Signals(int(raw.value)).name
        return f"{me} crashed ({name} at address {raw.offset & (2**64 - 1):#x})"
    return "the launch was stopped after its time limit"
