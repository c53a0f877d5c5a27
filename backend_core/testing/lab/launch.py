"""Runs a compiled kernel over numpy arrays and makes the report."""

from __future__ import annotations

import ctypes
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import launch_abi
from .dtypes import LabDtype, Sparse
from .errors import LabError
from .faults import Names, describe
from .module import Entry, Module
from .report import BufferCounts, Fault, Report, ThreadgroupCounts

#: Limits of Metal on every Apple GPU.
MAX_THREADGROUP_BYTES = 32 << 10
MAX_THREADS = 1024
MAX_BUFFERS = 31
#: The lab's own limits, above which it does not try.
_MAX_LANES = 4096
_MAX_THREADGROUP_BYTES = 1 << 20

_lock = threading.Lock()


@dataclass
class Bound:
    """An array bound to an index. Outputs must be written; what is not initialised must not be read before."""

    name: str
    index: int
    value: np.ndarray[Any, Any] | Sparse
    dtype: LabDtype
    read_only: bool
    initialised: bool = True
    must_write: bool = False
    skew: int = 0  # bytes from a multiple of 128 to its start


def _triple(value: Sequence[int], what: str) -> tuple[int, int, int]:
    try:
        x, y, z = (operator.index(v) for v in value)
    except (TypeError, ValueError):
        x = 0
    if not all(0 < v < 2**32 for v in ((x, y, z) if x else (0,))):
        raise LabError(f"{what} takes three numbers of at least 1 and below 2^32, not {tuple(value)}")
    return x, y, z


def run(
    module: Module,
    entry: Entry,
    bound: list[Bound],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    threadgroup_memory: Mapping[int, int] | None = None,
    constants: Mapping[int, Any] | None = None,
    groups: Sequence[tuple[int, int, int]] | None = None,
    timeout: float = 60.0,
) -> Report:
    """Launches a kernel; writable arrays are changed in place. Raises :class:`LabError` for what cannot be launched."""
    grid, threadgroup = _triple(grid, "grid"), _triple(threadgroup, "threadgroup")
    dispatched = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    lanes = int(np.prod(dispatched))
    if lanes > _MAX_LANES:
        raise LabError(f"a threadgroup of {lanes} threads cannot be run; Metal allows {MAX_THREADS}")
    launch = launch_abi.Launch()
    buffers = (launch_abi.Buffer * max(1, len(bound)))()
    for b, item in zip(buffers, bound, strict=False):
        b.index, b.itemsize = item.index, item.dtype.itemsize
        b.nbytes = item.value.nbytes
        b.data = None if isinstance(item.value, Sparse) else item.value.ctypes.data
        b.initialised, b.read_only, b.skew = item.initialised, item.read_only, item.skew
    launch.buffers, launch.buffer_count, launch.kernel = buffers, len(bound), entry.number
    memory = dict(threadgroup_memory or {})
    if sum(memory.values()) > _MAX_THREADGROUP_BYTES:
        raise LabError(f"{sum(memory.values())} bytes of threadgroup memory; Metal allows {MAX_THREADGROUP_BYTES}")
    count = max(memory, default=-1) + 1
    sizes = (ctypes.c_uint64 * count)(*[memory.get(i, 0) for i in range(count)])
    launch.threadgroup_bytes, launch.threadgroup_count = sizes, len(sizes)
    launch.grid[:], launch.threadgroup[:] = grid, threadgroup
    if groups is not None:
        launch.groups, launch.group_count = _group_list(groups, grid, dispatched), len(groups)
    faults = (launch_abi.Fault * 256)()
    launch.faults, launch.fault_capacity = faults, len(faults)
    launch.timeout_s = timeout
    with _lock:
        _set_constants(module, constants or {})
        start = time.perf_counter()
        failed = module.library.lab_run(ctypes.byref(launch))
        seconds = time.perf_counter() - start
    if launch.interrupted:
        raise LabError(f"{entry.name}: the launch was interrupted")
    if failed:
        total = sum(item.value.nbytes for item in bound)
        raise LabError(f"{entry.name}: there is no address space for buffers of {total} bytes in all")
    arrays = [launch.arrays[i] for i in range(launch.array_count)]
    names = Names(
        [(b.name, b.dtype.itemsize, b.value.nbytes) for b in bound], [(a.name.decode(), a.nbytes) for a in arrays]
    )
    found = [describe(faults[i], module, names) for i in range(launch.fault_count)]
    shared = tuple(ThreadgroupCounts(a.name.decode(), a.nbytes, a.read_bytes, a.written_bytes) for a in arrays)
    threadgroup_bytes = launch.threadgroup_total
    # The compiler may have made two checks of one access.
    listed = list({replace(f, count=0): f for f in reversed(found) if f is not None}.values())[::-1]
    listed += _limits(int(np.prod(threadgroup)), threadgroup_bytes, max((b.index for b in bound), default=-1) + 1)
    if groups is None and not launch.aborted:
        listed += _unwritten(bound, buffers)
    counts = {
        item.name: BufferCounts(
            item.name, item.value.nbytes, b.read_bytes, b.written_bytes, b.unique_read, b.unique_written,
            b.read_transactions, b.write_transactions, (b.touched_lo, b.touched_hi),
        )
        for b, item in zip(buffers, bound, strict=False)
    }  # fmt: skip
    return Report(entry.name, tuple(listed), counts, shared, threadgroup_bytes, launch.threads, seconds)


def _group_list(groups: Sequence[tuple[int, int, int]], grid: Sequence[int], dispatched: Sequence[int]) -> Any:
    count = [-(-g // d) for g, d in zip(grid, dispatched, strict=True)]
    for group in groups:
        if len(group) != 3 or any(not 0 <= g < c for g, c in zip(group, count, strict=True)):
            raise LabError(f"there is no threadgroup {tuple(group)}; the grid has {tuple(count)} of them")
    flat = [int(v) for group in groups for v in group]
    return (ctypes.c_uint32 * max(1, len(flat)))(*flat)


def _limits(lanes: int, threadgroup_bytes: int, buffers: int) -> list[Fault]:
    found = []
    if buffers > MAX_BUFFERS:
        found.append(Fault("buffers", "", f"the kernel takes {buffers} buffers; Metal allows {MAX_BUFFERS}"))
    if lanes > MAX_THREADS:
        found.append(Fault("threads", "", f"a threadgroup has {lanes} threads; Metal allows {MAX_THREADS}"))
    if threadgroup_bytes > MAX_THREADGROUP_BYTES:
        message = f"a threadgroup takes {threadgroup_bytes} bytes of memory; Metal allows {MAX_THREADGROUP_BYTES}"
        found.append(Fault("threadgroup-memory", "", message))
    return found


def _unwritten(bound: list[Bound], buffers: Any) -> list[Fault]:
    found = []
    for b, item in zip(buffers, bound, strict=False):
        missing = item.value.nbytes - b.unique_written
        if item.must_write and missing:
            size = item.dtype.itemsize
            message = f"{missing} of {item.value.nbytes} bytes of output {item.name!r} are never written, "
            message += f"the first in element {b.first_unwritten // size}"
            found.append(Fault("unwritten-output", item.name, message))
    return found


def _set_constants(module: Module, constants: Mapping[int, Any]) -> None:
    table = module.library.lab_get_module().contents
    known = set()
    for i in range(table.constant_count):
        c = table.constants[i]
        known.add(c.index)
        given = c.index in constants
        c.defined[0] = given
        kinds: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
        value = constants.get(c.index, 0)
        if isinstance(value, float):
            raw = np.array(value, dtype={2: np.float16, 4: np.float32}.get(c.bytes, np.float64)).tobytes()
        else:
            raw = np.array(int(value) & (2 ** (8 * c.bytes) - 1), dtype=kinds[c.bytes]).tobytes()
        ctypes.memmove(c.value, raw, c.bytes)
    if unknown := set(constants) - known:
        raise LabError(f"the text has no function constant {sorted(unknown)[0]}; it has {sorted(known) or 'none'}")
