"""Whole Metal files: any kernel with `[[buffer(i)]]` attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import launch, module
from .dtypes import BFloat16Array, Sparse, as_array, bfloat16, skew_of
from .errors import LabError
from .report import Result


def run_msl(
    source: str | Path,
    function: str,
    buffers: Mapping[int, Any],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    threadgroup_memory: Mapping[int, int] | None = None,
    constants: Mapping[int, Any] | None = None,
    outputs: Sequence[int] = (),
    include_dirs: Sequence[str | Path] = (),
    defines: Sequence[str] = (),
    groups: Sequence[tuple[int, int, int]] | None = None,
    timeout: float = 60.0,
) -> Result:
    """Runs one kernel of a Metal file.

    source
        The text, or the path of a file.
    function
        A kernel's name, its host name, or ``name<arguments>`` for a template.
    buffers
        Index of ``[[buffer(i)]]`` to array, number or ``lab.sparse``. The kernel works on copies.
    grid, threadgroup
        Threads in x, y, z. The last groups are smaller if the grid is no multiple.
    threadgroup_memory
        Index of ``[[threadgroup(i)]]`` to bytes.
    constants
        Index of ``[[function_constant(i)]]`` to value; others are 0 and not defined.
    outputs
        Indices of buffers that hold nothing before the launch: reading what was not written is a fault, and so is
        not writing all of it. All of them are in `buffers`.
    include_dirs, defines
        For the preprocessor: folders, and ``NAME=value``.
    groups
        Run these threadgroups only (for grids too large to run).
    timeout
        Seconds after which the launch is stopped, a fault.

    The result's outputs are the buffers that the kernel can write, by index. Raises :class:`LabError` when the text
    does not compile or the launch does not fit the kernel's parameters.
    """
    name = "kernel.metal"
    if isinstance(source, Path):
        name, text = str(source), source.read_text()
        include_dirs = [source.parent, *include_dirs]
    else:
        text = source
    wanted = () if "<" not in function else (" ".join(function.split()),)
    loaded = module.load(
        f'#line 1 "{name}"\n{text}', ((name, text),), wanted, tuple(str(d) for d in include_dirs), tuple(defines)
    )
    entry = loaded.entries.get(" ".join(function.split()))
    if entry is None:
        known = ", ".join(sorted(loaded.entries)) or "none"
        raise LabError(f"there is no kernel {function!r} in {name}; it has: {known}")
    bound = _bind(entry, buffers, set(outputs))
    for param in entry.params:
        if param.kind == "threadgroup" and not (threadgroup_memory or {}).get(param.index):
            raise LabError(f"{entry.name}: [[threadgroup({param.index})]] {param.name!r} needs its size in bytes")
    report = launch.run(loaded, entry, bound, grid, threadgroup, threadgroup_memory, constants, groups, timeout)
    results = [b.value for b in bound if not b.read_only and not isinstance(b.value, Sparse)]
    return Result(results, report)


def _bind(entry: module.Entry, buffers: Mapping[int, Any], outputs: set[int]) -> list[launch.Bound]:
    bound = []
    if missing := sorted(outputs - set(buffers)):
        known = sorted(buffers)
        raise LabError(f"{entry.name}: outputs names [[buffer({missing[0]})]], which is not bound; {known} are")
    params = {p.index: p for p in entry.params if p.kind == "buffer"}
    for index in buffers:
        if index not in params:
            raise LabError(f"{entry.name} has no [[buffer({index})]]; it has {sorted(params)}")
    for index in sorted(params):
        param = params[index]
        if index not in buffers:
            if param.optional:
                continue
            raise LabError(f"{entry.name}: [[buffer({index})]] {param.name!r} is not bound")
        given = buffers[index]
        if isinstance(given, Sparse):
            bound.append(launch.Bound(param.name, index, given, given.dtype, param.read_only))
            continue
        try:
            array, dtype = as_array(given)
        except ValueError as e:
            raise LabError(f"{entry.name}: [[buffer({index})]] {param.name!r}: {e}") from None
        copy = np.array(array, order="C", copy=True)
        if dtype is bfloat16:
            copy = copy.view(BFloat16Array)
        out = index in outputs
        skew = skew_of(array) if array.flags.c_contiguous else 0
        bound.append(launch.Bound(param.name, index, copy, dtype, param.read_only, not out, out, skew))
    return bound
