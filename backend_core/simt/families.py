"""Kernels of one source for few rows as plugins offer them: the family that serves a layer, its product as a callable.

Nothing is compiled before a callable's result is evaluated, which is when the core verifies and races it; what does not
compile is an offer that lost.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .. import native
from .kernel import SimtKernel

#: Rows that are decided as one unit.
MOST_ROWS = 16


@dataclass(frozen=True)
class Family:
    """Kernels of one source for 1 to 16 rows on one kind of device, and what they need.

    since
        Lowest generation of GPU: compute capability on CUDA, generation on Apple's (M1 has 13).
    steps
        Numbers of rows that have a kernel of their own; others use that of the next larger one. Few where compiling
        takes long.
    """

    name: str
    kernel: SimtKernel
    device: str
    since: tuple[int, ...]
    steps: tuple[int, ...]
    preference: int
    note: str

    def step(self, rows: int) -> int:
        """The number of rows whose launch serves `rows`."""
        return next((s for s in self.steps if s >= rows), -(-rows // MOST_ROWS) * MOST_ROWS)


@functools.cache
def generation(device: str) -> tuple[int, ...]:
    """Compute capability of the CUDA device, generation of Apple's GPU; () if unknown."""
    import mlx.core as mx

    info = mx.device_info()
    if device == "cuda":
        return tuple(int(info.get(f"compute_capability_{part}", 0)) for part in ("major", "minor"))
    match = re.match(r"applegpu_g(\d+)", str(info.get("architecture", "")))
    return (int(match.group(1)),) if match else ()


def family_for(families: Iterable[Family], facts: dict[str, Any]) -> Family | None:
    """The first family that serves a layer with these facts, those of the kernels' geometry and eligibility; ``device``
    is one of them."""
    device = facts["device"]
    for family in families:
        if family.device == device and generation(device) >= family.since and not family.kernel.eligible(**facts):
            return family
    return None


def many_rows(
    kernel: SimtKernel, device: str, facts: dict[str, Any], fixed: tuple[Any, ...], whole: Callable[[int], int]
) -> Callable[[int], Callable[..., Any]]:
    """`many` of :func:`product` by a kernel that makes tiles: ``whole(rows)`` is how many rows the tiles have that make
    `rows`; one launch serves all for which it is the same."""

    @functools.cache
    def started(rows: int) -> Callable[..., Any]:
        return kernel.bind(device, kernel.launch(**{**facts, "rows": rows}), fixed)

    return lambda rows: started(whole(rows))


def product(
    family: Family,
    facts: dict[str, Any],
    fixed: tuple[Any, ...],
    stock: Callable[[Any], Any],
    many: Callable[[int], Callable[..., Any]] | None = None,
) -> Callable[[Any], Any]:
    """The product ``f(x)`` of a layer: x (..., k) of ``x_dtype`` -> (..., n) of ``out_dtype``.

    facts
        What the kernel's geometry takes; ``n``, ``k`` and ``out_dtype`` among them.
    fixed
        The kernel's inputs behind x.
    stock
        mlx's product, for gradients: kernels made at run time have none. Without `many` also for more than 16 rows.
    many
        ``many(rows)`` gives what :meth:`SimtKernel.bind` gives, for a launch of at least that many rows.

    ``f.notes`` is a list of sentences for the report, `CudaCall.notes` of its launches; it may grow at any call.

    Raises ValueError if the kernel cannot serve the facts, RuntimeError without the device.
    """
    import mlx.core as mx

    n, k = facts["n"], facts["k"]
    dtypes = [getattr(mx, facts["out_dtype"])]
    kernel, device = family.kernel, family.device

    @functools.cache
    def launch(rows: int) -> Any:
        return kernel.launch(**{**facts, "rows": rows})

    notes: list[str] = []

    def told(call: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(call, "notes"):
            call.notes = notes
        return call

    @functools.cache
    def started(rows: int) -> Callable[..., Any]:
        return told(kernel.bind(device, launch(rows), fixed))

    few = [started(family.step(max(rows, 1))) for rows in range(MOST_ROWS + 1)]
    # Nothing is compiled before the first call, which then compiles for all rows at once.
    ahead = [launch(step) for step in family.steps] if device == "cuda" else []

    def f(x: Any) -> Any:
        rows = x.size // k
        if (rows > MOST_ROWS and many is None) or native.in_tracing(x):
            return stock(x)
        shapes = [(*x.shape[:-1], n)]
        if rows > MOST_ROWS and many is not None:
            return told(many(rows))(inputs=[x], output_shapes=shapes, output_dtypes=dtypes)[0]
        if ahead:
            kernel.compile_ahead(ahead, (x, *fixed), dtypes)
            ahead.clear()
        return few[rows](inputs=[x], output_shapes=shapes, output_dtypes=dtypes)[0]

    f.notes = notes  # type: ignore[attr-defined]
    # mlx's part of a call in Python takes longer than many a kernel.
    return native.get().Repeated(f, list(fixed), notes) if native.available() else f
