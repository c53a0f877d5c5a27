"""Offers for GPUs: which kernel for which layer, and the layer's product as a callable.

Rows 1 to 16 are one unit, by one family of kernels whose bits do not depend on the number of rows; more rows are an
offer of their own. Nothing is compiled before a callable's result is evaluated, which is when the core verifies and
races it; what does not compile is an offer that lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backend_core import simt
from backend_core.offers import Offer
from backend_core.simt import MOST_ROWS, Family, SimtKernel, check_dtypes, check_shapes, families
from backend_core.sites import LinearSite, itemsize

from .gpu_kernels import FLOATS, T5_MMA, T5_QMV
from .gpu_tiles import T5_QMM, T5_QMM_SIMD, rows_of
from .layout import GROUP_BYTES, packed_columns

if TYPE_CHECKING:
    import mlx.core as mx

#: Sums of fewer products are not exact enough in integers of 22 bits for most activations.
LEAST_K = 1024
#: Ratio of two scales of a row, times 16, and weights of zero in a group of 128, of which few different ones are
#: compiled.
RATIOS, ZEROS = (16, 24, 32, 48, 64, 96, 128), (64, 80, 96)
MOST_RATIO = RATIOS[-1] // 16
#: Magnitudes of scales whose products with x are usual numbers.
SMALLEST, LARGEST = 2.0**-60, 2.0**60

#: The kernel that asks more of weights than their format, and may decline when it sees them: offered besides another.
MMA = Family("packed_mma", T5_MMA, "cuda", (8, 0), (1, 2, 4, 8, 16), 20, "matrix instructions on bytes")
#: In order: a layer gets the first family that serves it.
FAMILIES = (
    Family("packed", T5_QMV, "cuda", (7, 0), (1, 2, 4, 8, 16), 10, "decoded in registers"),
    Family("packed", T5_QMV, "metal", (13,), tuple(range(1, MOST_ROWS + 1)), 10, "decoded in registers"),
)


def facts_of(site: LinearSite, rows: int = 1) -> dict[str, Any]:
    """What geometry and eligibility of the kernels take."""
    return {
        "rows": rows, "n": site.n, "k": site.k, "group_size": site.group_size, "x_dtype": site.x_dtype,
        "scales_dtype": site.scales_dtype, "out_dtype": site.out_dtype,
        "has_bias": site.has_bias and site.kind == "linear", "device": site.device,
    }  # fmt: skip


def offers(site: LinearSite) -> list[Offer]:
    """The offers for a t5 layer on ``"metal"`` or ``"cuda"``: none, one, or another one for many rows."""
    facts = facts_of(site)
    family = simt.family_for(FAMILIES, facts)
    if family is None:
        return []
    chosen = [family]
    if site.k >= LEAST_K and simt.family_for([MMA], facts):
        chosen.insert(0, MMA)
    groups = site.n * site.k // site.group_size
    weights = site.n * packed_columns(site.k, site.group_size) + groups * itemsize(site.scales_dtype)
    found = [
        Offer(
            name=f"{f.name}_{site.device}",
            build=functools.partial(build, family=f, site=site),
            rows=(1, MOST_ROWS),
            exactness="rounding",
            row_invariant=True,
            bytes_moved=weights + site.k * itemsize(site.x_dtype) + site.n * itemsize(site.out_dtype),
            preference=f.preference,
            note=f"1.625 bits a weight and its scale, groups of {site.group_size}, {f.note}",
        )
        for f in chosen
    ]
    if many := many_rows(facts):
        found.append(
            Offer(
                name=f"packed_qmm_{site.device}",
                build=functools.partial(build, family=family, site=site, many=many),
                rows=(MOST_ROWS + 1, None),
                exactness="rounding",
                row_invariant=True,
                preference=family.preference,
                note=f"matrix instructions, tiles of weights unpacked on the way, groups of {site.group_size}",
            )
        )
    return found


def many_rows(facts: dict[str, Any]) -> SimtKernel | None:
    """The kernel for more rows than a family has, if there is one."""
    if facts["device"] == "metal":
        return None if T5_QMM_SIMD.eligible(**facts) else T5_QMM_SIMD
    return T5_QMM if families.generation("cuda") >= (8, 0) and not T5_QMM.eligible(**facts) else None


def build(
    module: Any, *, family: Family, site: LinearSite, many: SimtKernel | None = None
) -> Callable[[mx.array], mx.array]:
    """The layer's product as a callable ``f(x)``: x (..., k) of ``site.x_dtype`` -> (..., n) of ``site.out_dtype``.

    module
        Holds ``weight`` (n, columns) uint8 and ``scales`` (n, groups), and possibly ``bias`` (n,).
    many
        The kernel for more than 16 rows, which are mlx's without.

    Raises ValueError if shapes or dtypes of the arrays are not the site's or the kernel cannot serve them, RuntimeError
    without the device.
    """
    weight, scales = module["weight"], module["scales"]
    columns = packed_columns(site.k, site.group_size)
    shapes = {"weight": (site.n, columns), "scales": (site.n, site.k // site.group_size)}
    facts = facts_of(site)
    # What is not read is not bound either: anything of its type stands for it.
    bias = module["bias"] if facts["has_bias"] else scales
    arrays = {"weight": weight, "scales": scales, "bias": bias}
    check_shapes(family.kernel, shapes, arrays)
    dtypes = {"weight": "uint8", "scales": site.scales_dtype, "bias": FLOATS}
    check_dtypes(family.kernel, site.path, dtypes, arrays)
    if family is MMA:
        facts["ratio"] = ratio_of(scales)
        facts["zeros"] = zeros_of(weight, site.group_size)
    return product(family, facts, (weight, scales, bias), many)


def zeros_of(weight: mx.array, group_size: int) -> int:
    """What t5_mma.metal calls ZEROS: weights of zero in a group of 128 of t5 weights (n, columns), at most, or a bit
    more.

    Raises ValueError where a group has more of them than the kernel is exact enough for.
    """
    import mlx.core as mx

    digits = [sum(byte // 3**i % 3 == 1 for i in range(5)) for byte in range(256)]
    size = GROUP_BYTES[group_size]
    counts = mx.array(digits, mx.uint8)[weight].reshape(len(weight), -1, size).astype(mx.int32).sum(axis=2)
    # The digits beyond the end of a group are zeros too.
    most = (int(mx.max(counts).item()) - (size * 5 - group_size)) * 128 // group_size
    if most > ZEROS[-1]:
        raise ValueError(
            f"{most / 128:.0%} of a group's weights are zero; the kernel is exact enough up to {ZEROS[-1] / 128:.0%}"
        )
    return next(z for z in ZEROS if most <= z)


def ratio_of(scales: mx.array) -> int:
    """What t5_mma.metal calls RATIO: 16 times the largest ratio of two scales (n, groups) of a row, or a bit more.

    Raises ValueError where the kernel would not keep the bound of `rounding`: with scales that differ more than
    MOST_RATIO times, are zero beside others, or are far from usual numbers.
    """
    import mlx.core as mx

    size = mx.abs(scales.astype(mx.float32))
    low, high = mx.min(size, axis=1), mx.max(size, axis=1)
    ratio = float(mx.max(mx.where(high == 0, 1.0, high / low)).item())
    if not ratio <= MOST_RATIO:
        raise ValueError(f"scales of a row differ {ratio:.3g} times; the kernel is exact enough up to {MOST_RATIO}")
    least, most = float(mx.min(mx.where(low == 0, 1.0, low)).item()), float(mx.max(high).item())
    if least < SMALLEST or most > LARGEST:
        raise ValueError(f"scales are from {least:.3g} to {most:.3g}; the kernel takes {SMALLEST:.3g} to {LARGEST:.3g}")
    return next(r for r in RATIOS if ratio * 16 <= r)


def product(
    family: Family, facts: dict[str, Any], fixed: tuple[mx.array, ...], many: SimtKernel | None = None
) -> Callable[[mx.array], mx.array]:
    """``f(x)`` with the weights `fixed`: w, scales, bias. More than 16 rows are the kernel `many`'s; without it mlx's,
    on 2-bit words."""
    import mlx.core as mx

    def stock(x: mx.array) -> mx.array:
        from .words import words

        w, scales, bias = fixed
        codes, size = words(w, facts["group_size"]), facts["group_size"]
        y = mx.quantized_matmul(x, codes, scales, -scales, True, size, 2)
        return y + bias if facts["has_bias"] else y

    if many is None:
        return simt.product(family, facts, fixed, stock)
    whole = functools.partial(rows_of, many)
    return simt.product(family, facts, fixed, stock, simt.many_rows(many, family.device, facts, fixed, whole))
