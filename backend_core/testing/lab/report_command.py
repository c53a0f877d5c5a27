"""Reports of a plugin's kernels: each case run with all checks, its traffic next to the contract."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from backend_core.hookspecs import ENTRY_POINT_GROUP
from backend_core.kernels_registry import Registry
from backend_core.simt import SimtKernel, arguments

from . import dtypes, typecheck
from .cases import Case
from .errors import CompilerMissing, LabError
from .one_source import find_metal_only
from .report import BufferCounts

#: What is shown of each buffer: its size, what all lanes request, what of it is touched, what the contract says.
_COLUMNS = ("bytes", "requested", "touched", "by contract", "transactions")


@dataclass
class Finding:
    """What a case showed.

    threadgroups
        How many were launched, of how many lanes; zeros if the kernel could not be run.
    wrong
        What breaks the contract, one sentence each; empty if all is well.
    untold
        What could not be checked, and why.
    """

    kernel: str
    case: str
    buffers: list[BufferCounts] = field(default_factory=list)
    contract: dict[str, int] = field(default_factory=dict)
    threadgroups: tuple[int, int] = (0, 0)
    threadgroup_bytes: int = 0
    promised_bytes: int = 0
    races: int = 0
    excess: float | None = None
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def kernels_of(plugin: str) -> list[tuple[SimtKernel, Callable[[], Iterable[Case]] | None]]:
    """The kernels that an installed plugin announces with `Registry.simt`, and their cases.

    Raises LookupError if there is no such plugin or it has no such kernels, and what the plugin raises.
    """
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name.replace("-", "_") == plugin.replace("-", "_"):
            break
    else:
        raise LookupError(f"no plugin {plugin!r} is installed")
    registry = Registry(plugin)
    # CPU kernels that were not built are no matter here.
    with contextlib.suppress(FileNotFoundError):
        entry.load().register_kernels(registry)
    if not registry.simt_kernels:
        raise LookupError(f"plugin {plugin!r} announces no kernels for Metal and CUDA")
    return [(kernel, registry.cases.get(kernel.name)) for kernel in registry.simt_kernels]


def report(plugin: str, threads: int = 1) -> list[Finding]:
    """Every case of every kernel. Raises as :func:`kernels_of`, and CompilerMissing."""
    todo: list[tuple[SimtKernel, Case]] = []
    findings = []
    for kernel, cases in kernels_of(plugin):
        made = list(cases()) if cases else []
        if not made:
            findings.append(Finding(kernel.name, "", untold=["the plugin gives no cases for it"]))
        todo += [(kernel, case) for case in made]
    with ThreadPoolExecutor(threads) as pool:
        return findings + list(pool.map(lambda t: run(*t), todo))


def run(kernel: SimtKernel, case: Case) -> Finding:
    """One case. Raises CompilerMissing."""
    found = Finding(kernel.name, case.name, contract=dict(case.touched))
    found.promised_bytes = kernel.threadgroup_bytes(case.launch)
    types = [getattr(dtypes, dtype) for _, dtype in case.outputs]
    how = arguments(case.launch, dtypes)
    found.wrong += [str(f) for f in find_metal_only(kernel)]
    try:
        result = kernel.lab()(
            inputs=list(case.inputs), output_shapes=[shape for shape, _ in case.outputs], output_dtypes=types,
            contract=dict(case.shapes), **how,
        )  # fmt: skip
    except CompilerMissing:
        raise
    except LabError as error:
        found.wrong.append(str(error))
        return found
    seen = result.report
    found.buffers, found.seconds = list(seen.buffers.values()), seen.seconds
    found.threadgroup_bytes = seen.threadgroup_bytes
    lanes = math.prod(case.launch.threadgroup)
    found.threadgroups = math.prod(case.launch.grid) // lanes, lanes
    found.races = sum(f.count for f in seen.faults if f.kind.startswith("race"))
    found.wrong += [str(f) for f in seen.faults]
    if seen.threadgroup_bytes > found.promised_bytes:
        found.wrong.append(f"{seen.threadgroup_bytes} bytes of threadgroup memory, not {found.promised_bytes}")
    found.wrong += _traffic(kernel, case, seen.buffers)
    if case.excess is not None:
        found.excess = case.excess(result.outputs)
        if not found.excess <= 1.0:
            found.wrong.append(f"wrong result: {found.excess:.3g} times the allowed error")
    try:
        types_found = typecheck.check_types(
            kernel.lab(), inputs=list(case.inputs), output_dtypes=types, template=how["template"],
            together=case.together,
        )  # fmt: skip
        found.wrong += [str(t) for t in types_found]
    except CompilerMissing as error:
        found.untold.append(f"types: {error}")
    return found


def _traffic(kernel: SimtKernel, case: Case, buffers: dict[str, BufferCounts]) -> Iterable[str]:
    for name, expected in case.touched.items():
        b = buffers.get(name)
        touched = 0 if b is None else b.unique_written if name in kernel.outputs else b.unique_read
        if touched != expected:
            yield f"{name}: {touched} bytes are touched, {expected} by the contract"
    for name in case.once:
        b = buffers.get(name)
        if b is not None and (b.bytes_read, b.bytes_written) != (b.unique_read, b.unique_written):
            yield f"{name}: {b.bytes_read + b.bytes_written} bytes are requested, some of them twice"


def lines(findings: Iterable[Finding]) -> Iterable[str]:
    """The report as text."""
    for f in findings:
        yield f"{f.kernel}{f': {f.case}' if f.case else ''}"
        if f.buffers:
            yield "  " + "".join(f"{head:>13}" for head in ("buffer", *_COLUMNS))
        for b in f.buffers:
            touched = b.unique_written if b.bytes_written else b.unique_read
            transactions = b.read_transactions + b.write_transactions
            row = (b.nbytes, b.bytes_read + b.bytes_written, touched, f.contract.get(b.name, "-"), transactions)
            yield "  " + "".join(f"{cell:>13}" for cell in (b.name, *row))
        if f.threadgroups[0]:
            error = "" if f.excess is None else f", error {f.excess:.2f} of the allowed"
            yield (f"  {f.threadgroups[0]} threadgroups of {f.threadgroups[1]} lanes, {f.threadgroup_bytes} bytes of "
                   f"threadgroup memory, races {f.races or 'none'}{error}, {f.seconds:.2f} s")  # fmt: skip
        yield from (f"  WRONG: {text}" for text in f.wrong)
        yield from (f"  not checked: {text}" for text in f.untold)


def summary(findings: list[Finding]) -> dict[str, Any]:
    """Numbers for the last line."""
    return {
        "kernels": len({f.kernel for f in findings}),
        "cases": sum(bool(f.case) for f in findings),
        "wrong": sum(bool(f.wrong) for f in findings),
        "not checked": sum(bool(f.untold) for f in findings),
    }
