"""Offers for GPUs: which kernel for which layer, and the layer's product as a callable.

Rows 1 to 16 are one unit, by one family of kernels whose bits do not depend on the number of rows. More rows are an
offer of their own on CUDA, and left to stock on Metal; where stock has no kernel at all (1 bit on CUDA) one offer has
all. Nothing is compiled before a callable's result is evaluated, which is when the core verifies and races it; what
does not compile is an offer that lost.
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

from .gpu_kernels import AFFINE_MMA, AFFINE_QMM, AFFINE_QMV, QMM_ROWS

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


#: In order: a layer gets the first family that serves it.
FAMILIES = (
    # On sm_80 and later a matrix instruction takes 16x8x16 halves; compiling one kernel takes a second or two.
    Family("mma", AFFINE_MMA, "cuda", (8, 0), (1, 2, 4, 8, 16), 20, "matrix instructions, weights read once for all"),
    Family("qmv", AFFINE_QMV, "cuda", (7, 0), (1, 2, 4, 8, 16), 10, "decoded in registers"),
    Family("qmv", AFFINE_QMV, "metal", (13,), tuple(range(1, MOST_ROWS + 1)), 10, "decoded in registers"),
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


def stock_serves(site: LinearSite) -> bool:
    """False for what mlx has no kernel for."""
    return not (site.device == "cuda" and site.bits == 1)


def offers(site: LinearSite) -> list[Offer]:
    """The offers for an affine layer on ``"metal"`` or ``"cuda"``: none, one, or another one for many rows."""
    for family in FAMILIES:
        if family.device != site.device or generation(site.device) < family.since:
            continue
        if not family.kernel.eligible(**facts_of(site)):
            found = [_offer(family, site)]
            if stock_serves(site) and many_rows(facts_of(site)):
                found.append(_offer(family, site, many=True))
            return found
    return []


def many_rows(facts: dict[str, Any]) -> SimtKernel | None:
    """The kernel for more rows than a family has, if there is one."""
    serves = facts["device"] == "cuda" and generation("cuda") >= (8, 0) and not AFFINE_QMM.eligible(**facts)
    return AFFINE_QMM if serves else None


def facts_of(site: LinearSite, rows: int = 1, symmetric: int = 0) -> dict[str, Any]:
    """What geometry and eligibility of the kernels take (``gpu_kernels``)."""
    return {
        "rows": rows, "n": site.n, "k": site.k, "bits": site.bits, "group_size": site.group_size,
        "x_dtype": site.x_dtype, "scales_dtype": site.scales_dtype, "out_dtype": site.out_dtype,
        "symmetric": symmetric, "has_bias": site.has_bias and site.kind == "linear", "device": site.device,
    }  # fmt: skip


def _offer(family: Family, site: LinearSite, many: bool = False) -> Offer:
    name = "affine" if family.name == "qmv" else f"affine_{family.name}"
    if many:
        return Offer(
            name=f"affine_qmm_{site.device}",
            build=functools.partial(build, family=family, site=site),
            rows=(MOST_ROWS + 1, None),
            exactness="rounding",
            row_invariant=True,
            preference=family.preference,
            note=f"matrix instructions, tiles of weights unpacked on the way, {site.bits} bits",
        )
    return Offer(
        name=f"{name}_{site.device}",
        build=functools.partial(build, family=family, site=site),
        rows=(1, MOST_ROWS if stock_serves(site) else None),
        exactness="rounding",
        row_invariant=True,
        bytes_moved=site.weight_bytes + site.k * itemsize(site.x_dtype) + site.n * itemsize(site.out_dtype),
        preference=family.preference,
        note=f"{family.note}, {site.bits} bits, groups of {site.group_size}; biases unread where scales tell them",
    )


def build(module: Any, *, family: Family, site: LinearSite) -> Callable[[mx.array], mx.array]:
    """The layer's product as a callable ``f(x)``: x (..., k) of ``site.x_dtype`` -> (..., n) of ``site.out_dtype``.

    module
        Holds ``weight`` (n, k * bits // 32) uint32, ``scales`` and ``biases`` (n, k // group_size), and possibly
        ``bias`` (n,).

    Reads all scales and biases, to know whether the biases need to be read. Raises ValueError if the arrays do not fit
    each other or the kernel cannot serve them, RuntimeError without the device.
    """
    weight, scales, biases = module["weight"], module["scales"], module["biases"]
    groups = (site.n, site.k // site.group_size)
    shapes = {"w": (site.n, site.k // 32 * site.bits), "scales": groups, "biases": groups}
    check_shapes(family.kernel, shapes, {"w": weight, "scales": scales, "biases": biases})
    symmetric = symmetric_ratio(scales, biases)
    facts = facts_of(site, symmetric=symmetric)
    # What is not read is not bound either: anything of its type stands for it.
    bias = module["bias"] if facts["has_bias"] else scales
    fixed = (weight, scales, scales if symmetric else biases, bias)
    return product(family, facts, fixed)


def product(family: Family, facts: dict[str, Any], fixed: tuple[mx.array, ...]) -> Callable[[mx.array], mx.array]:
    """``f(x)`` with the weights `fixed`: w, scales, biases, bias."""
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

    @functools.cache
    def started_many(blocks: int) -> Callable[..., Any]:
        if large is None:
            return started(blocks * QMM_ROWS)
        return large.bind(device, large.launch(**{**facts, "rows": blocks * QMM_ROWS}), fixed)

    large = many_rows(facts)
    small = [started(family.step(max(rows, 1))) for rows in range(MOST_ROWS + 1)]
    # Nothing is compiled before the first call, which then compiles for all rows at once.
    ahead = [launch(step) for step in family.steps] if device == "cuda" else []

    def stock(x: mx.array) -> mx.array:
        w, scales, biases, bias = fixed
        if symmetric := facts["symmetric"]:
            biases = (scales * (-0.5 * symmetric)).astype(scales.dtype)
        y = mx.quantized_matmul(x, w, scales, biases, True, facts["group_size"], facts["bits"])
        return y + bias if facts["has_bias"] else y

    # By shape of x, where calls can be told once and for all; a model has few of at most 16 rows.
    known: dict[tuple[int, ...], Callable[..., Any]] = {}

    def f(x: mx.array) -> mx.array:
        if (quick := known.get(x.shape)) is not None:
            return quick(inputs=[x, *fixed])[0]
        # Kernels made at run time have no gradients; stock's have.
        if native.in_tracing(x):
            return stock(x)
        rows = x.size // k
        if ahead and rows <= MOST_ROWS:
            kernel.compile_ahead(ahead, (x, *fixed), dtypes)
            ahead.clear()
        call = small[rows] if rows <= MOST_ROWS else started_many(-(-rows // QMM_ROWS))
        shapes = [(*x.shape[:-1], n)]
        if rows <= MOST_ROWS and hasattr(call, "for_shapes") and not native.available():
            known[x.shape] = call.for_shapes([x], shapes, dtypes)
        return call(inputs=[x], output_shapes=shapes, output_dtypes=dtypes)[0]

    return f


def symmetric_ratio(scales: mx.array, biases: mx.array) -> int:
    """r such that ``biases == -r / 2 * scales`` for all groups exactly, 0 if there is none."""
    import mlx.core as mx

    s, b = scales.astype(mx.float32), biases.astype(mx.float32)
    ratio = mx.round(b[0, 0] / s[0, 0] * -2.0)
    fits = mx.all(b == s * (ratio * -0.5))
    # An unusable ratio (from a scale of zero) is not finite, and nothing equals its products.
    return int(ratio.item()) if fits.item() and 0 < ratio.item() <= 512 else 0
