"""Offers for GPUs: which kernel for which layer, and the layer's product as a callable.

Rows 1 to 16 are one unit, by one family of kernels whose bits do not depend on the number of rows. Nothing is compiled
before a callable's result is evaluated, which is when the core verifies and races it; what does not compile is an offer
that lost.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend_core.offers import Offer
from backend_core.simt import SimtKernel, check_shapes
from backend_core.sites import LinearSite, itemsize

from .gpu_kernels import T5_MMA, T5_QMV
from .layout import packed_columns

if TYPE_CHECKING:
    import mlx.core as mx

#: Rows that are decided as one unit.
MOST_ROWS = 16


@dataclass(frozen=True)
class Family:
    """Kernels of one source for 1 to 16 rows on one kind of device, and what they need.

    since
        Lowest generation of GPU: compute capability on CUDA, generation on Apple's (M1 has 13).
    steps
        Numbers of rows that have a kernel of their own; others use that of the next larger one.
    """

    name: str
    kernel: SimtKernel
    device: str
    since: tuple[int, ...]
    steps: tuple[int, ...]
    preference: int
    note: str

    def step(self, rows: int) -> int:
        """The number of rows, up to 16, whose launch serves `rows`."""
        return next(s for s in self.steps if s >= rows)


#: In order: a layer gets the first family that serves it.
FAMILIES = (
    # On sm_80 and later a matrix instruction takes 16x8x16 values.
    Family("packed_mma", T5_MMA, "cuda", (8, 0), (1, 2, 4, 8, 16), 20, "matrix instructions"),
    Family("packed", T5_QMV, "cuda", (7, 0), (1, 2, 4, 8, 16), 10, "decoded in registers"),
    Family("packed", T5_QMV, "metal", (13,), tuple(range(1, MOST_ROWS + 1)), 10, "decoded in registers"),
)


@functools.cache
def generation(device: str) -> tuple[int, ...]:
    """Compute capability of the CUDA device, generation of Apple's GPU; () if unknown."""
    import mlx.core as mx

    info = mx.device_info()
    if device == "cuda":
        return tuple(int(info.get(f"compute_capability_{part}", 0)) for part in ("major", "minor"))
    match = re.match(r"applegpu_g(\d+)", str(info.get("architecture", "")))
    return (int(match.group(1)),) if match else ()


def family_for(device: str, facts: dict[str, Any]) -> Family | None:
    """The first family that serves a layer with these facts (``gpu_kernels``)."""
    for family in FAMILIES:
        if family.device == device and generation(device) >= family.since and not family.kernel.eligible(**facts):
            return family
    return None


def facts_of(site: LinearSite, rows: int = 1) -> dict[str, Any]:
    """What geometry and eligibility of the kernels take."""
    return {
        "rows": rows, "n": site.n, "k": site.k, "group_size": site.group_size, "x_dtype": site.x_dtype,
        "scales_dtype": site.scales_dtype, "out_dtype": site.out_dtype,
        "has_bias": site.has_bias and site.kind == "linear", "device": site.device,
    }  # fmt: skip


def offers(site: LinearSite) -> list[Offer]:
    """The offers for a t5 layer on ``"metal"`` or ``"cuda"``: one or none."""
    family = family_for(site.device, facts_of(site))
    if family is None:
        return []
    groups = site.n * site.k // site.group_size
    weights = site.n * packed_columns(site.k, site.group_size) + groups * itemsize(site.scales_dtype)
    return [
        Offer(
            name=f"{family.name}_{site.device}",
            build=functools.partial(build, family=family, site=site),
            rows=(1, MOST_ROWS),
            exactness="rounding",
            row_invariant=True,
            bytes_moved=weights + site.k * itemsize(site.x_dtype) + site.n * itemsize(site.out_dtype),
            preference=family.preference,
            note=f"1.625 bits a weight and its scale, groups of {site.group_size}, {family.note}",
        )
    ]


def build(module: Any, *, family: Family, site: LinearSite) -> Callable[[mx.array], mx.array]:
    """The layer's product as a callable ``f(x)``: x (..., k) of ``site.x_dtype`` -> (..., n) of ``site.out_dtype``.

    module
        Holds ``weight`` (n, columns) uint8 and ``scales`` (n, groups), and possibly ``bias`` (n,).

    Raises ValueError if the arrays do not fit each other or the kernel cannot serve them, RuntimeError without the
    device.
    """
    weight, scales = module["weight"], module["scales"]
    shapes = {"w": (site.n, packed_columns(site.k, site.group_size)), "scales": (site.n, site.k // site.group_size)}
    check_shapes(family.kernel, shapes, {"w": weight, "scales": scales})
    facts = facts_of(site)
    # What is not read is not bound either: anything of its type stands for it.
    return product(family, facts, (weight, scales, module["bias"] if facts["has_bias"] else scales))


def product(family: Family, facts: dict[str, Any], fixed: tuple[mx.array, ...]) -> Callable[[mx.array], mx.array]:
    """``f(x)`` with the weights `fixed`: w, scales, bias. More than 16 rows are mlx's, on 2-bit words."""
    import mlx.core as mx

    from backend_core import native

    n, k = facts["n"], facts["k"]
    dtypes = [getattr(mx, facts["out_dtype"])]
    kernel, device = family.kernel, family.device

    @functools.cache
    def launch(rows: int) -> Any:
        return kernel.launch(**{**facts, "rows": rows})

    @functools.cache
    def started(rows: int) -> Callable[..., Any]:
        return kernel.bind(device, launch(rows), fixed)

    small = [started(family.step(max(rows, 1))) for rows in range(MOST_ROWS + 1)]
    # Nothing is compiled before the first call, which then compiles for all rows at once.
    ahead = [launch(step) for step in family.steps] if device == "cuda" else []

    def stock(x: mx.array) -> mx.array:
        from .words import words

        w, scales, bias = fixed
        codes, size = words(w, facts["group_size"]), facts["group_size"]
        y = mx.quantized_matmul(x, codes, scales, -scales, True, size, 2)
        return y + bias if facts["has_bias"] else y

    # By shape of x, where calls can be told once and for all; a model has few of at most 16 rows.
    known: dict[tuple[int, ...], Callable[..., Any]] = {}

    def f(x: mx.array) -> mx.array:
        if (quick := known.get(x.shape)) is not None:
            return quick(inputs=[x, *fixed])[0]
        rows = x.size // k
        # Kernels made at run time have no gradients; stock's have.
        if rows > MOST_ROWS or native.in_tracing(x):
            return stock(x)
        if ahead:
            kernel.compile_ahead(ahead, (x, *fixed), dtypes)
            ahead.clear()
        call = small[rows]
        shapes = [(*x.shape[:-1], n)]
        if hasattr(call, "for_shapes") and not native.available():
            known[x.shape] = call.for_shapes([x], shapes, dtypes)
        return call(inputs=[x], output_shapes=shapes, output_dtypes=dtypes)[0]

    return f
