"""Offers for GPUs: which kernel for which layer, and the layer's product as a callable.

Rows 1 to 16 are one unit, by one family of kernels whose bits do not depend on the number of rows. More rows are an
offer of their own; where stock has no kernel at all (1 bit on CUDA) one offer has all. Nothing is compiled before a
callable's result is evaluated, which is when the core verifies and races it; what does not compile is an offer that
lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backend_core import simt
from backend_core.offers import Offer
from backend_core.simt import MOST_ROWS, Family, SimtKernel, check_dtypes, check_shapes, families
from backend_core.simt.tiles import rows_of_tiles
from backend_core.sites import LinearSite, itemsize

from .gpu_bits import AFFINE_BITS, most_uneven, unevenness, unusual
from .gpu_kernels import AFFINE_MMA, AFFINE_QMM, AFFINE_QMV, FLOATS, QMM_ROWS
from .gpu_tiles import AFFINE_QMM_SIMD

if TYPE_CHECKING:
    import mlx.core as mx

#: In order: a layer gets the first family that serves it; one whose kernel asks more of weights than their format, and
#: may decline when it sees them, besides it.
BITS = Family("bits", AFFINE_BITS, "cuda", (8, 0), (1, 2, 4, 8, 16), 30, "binary matrix instructions")
FAMILIES = (
    # On sm_80 and later a matrix instruction takes 16x8x16 halves; compiling one kernel takes a second or two.
    Family("mma", AFFINE_MMA, "cuda", (8, 0), (1, 2, 4, 8, 16), 20, "matrix instructions, weights read once for all"),
    Family("qmv", AFFINE_QMV, "cuda", (7, 0), (1, 2, 4, 8, 16), 10, "decoded in registers"),
    Family("qmv", AFFINE_QMV, "metal", (13,), tuple(range(1, MOST_ROWS + 1)), 10, "decoded in registers"),
)


def stock_serves(site: LinearSite) -> bool:
    """False for what mlx has no kernel for."""
    return not (site.device == "cuda" and site.bits == 1)


def offers(site: LinearSite) -> list[Offer]:
    """The offers for an affine layer on ``"metal"`` or ``"cuda"``: none, one, or another one for many rows."""
    facts = facts_of(site)
    family = simt.family_for(FAMILIES, facts)
    if family is None:
        return []
    # Weights of a group that are equally large are the least uneven ones.
    bits = simt.family_for([BITS], facts) if most_uneven(site.k) >= 1 else None
    found = [_offer(f, site) for f in (bits, family) if f]
    if stock_serves(site) and many_rows(facts):
        found.append(_offer(family, site, many=True))
    return found


def many_rows(facts: dict[str, Any]) -> SimtKernel | None:
    """The kernel for more rows than a family has, if there is one."""
    if facts["device"] == "metal":
        return None if AFFINE_QMM_SIMD.eligible(**facts) else AFFINE_QMM_SIMD
    serves = families.generation("cuda") >= (8, 0) and not AFFINE_QMM.eligible(**facts)
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

    Reads all scales and biases, to know whether the biases need to be read and what the kernels may do with them.
    Raises ValueError if shapes or dtypes of the arrays are not the site's or the kernel cannot serve them, RuntimeError
    without the device.
    """
    weight, scales, biases = module["weight"], module["scales"], module["biases"]
    groups = (site.n, site.k // site.group_size)
    shapes = {"weight": (site.n, site.k // 32 * site.bits), "scales": groups, "biases": groups}
    # What is not read is not bound either: anything of its type stands for it.
    bias = module["bias"] if site.has_bias and site.kind == "linear" else scales
    arrays = {"weight": weight, "scales": scales, "biases": biases, "bias": bias}
    check_shapes(family.kernel, shapes, arrays)
    dtypes = {"weight": "uint32", "scales": site.scales_dtype, "biases": site.scales_dtype, "bias": FLOATS}
    check_dtypes(family.kernel, site.path, dtypes, arrays)
    symmetric = symmetric_ratio(scales, biases)
    if family is BITS and not (ratio := unevenness(scales, biases)) <= most_uneven(site.k):
        raise ValueError(
            f"a weight is {ratio:.3g} times as large as another of its group; for sums of {site.k} products the kernel "
            f"is exact enough up to {most_uneven(site.k):.2f}"
        )
    if family is BITS and (reason := unusual(scales, biases)):
        raise ValueError(reason)
    facts = facts_of(site, symmetric=symmetric)
    facts["folded"] = can_fold(scales)
    fixed = (weight, scales, scales if symmetric else biases, bias)
    return product(family, facts, fixed)


def expanded(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """1-bit weights (n, k // 32) uint32 as (n, k) of the scales' dtype, by operations that can be differentiated."""
    import mlx.core as mx

    codes = (w[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    grouped = codes.reshape(*scales.shape, -1).astype(scales.dtype)
    return (grouped * scales[..., None] + biases[..., None]).reshape(len(w), -1)


def product(family: Family, facts: dict[str, Any], fixed: tuple[mx.array, ...]) -> Callable[[mx.array], mx.array]:
    """``f(x)`` with the weights `fixed`: w, scales, biases, bias."""
    import mlx.core as mx

    large = many_rows(facts) or family.kernel

    def whole(rows: int) -> int:
        return rows_of_tiles(rows) if large is AFFINE_QMM_SIMD else -(-rows // QMM_ROWS) * QMM_ROWS

    def stock(x: mx.array) -> mx.array:
        w, scales, biases, bias = fixed
        if symmetric := facts["symmetric"]:
            biases = (scales * (-0.5 * symmetric)).astype(scales.dtype)
        if facts["bits"] == 1 and family.device == "cuda":  # mlx has no kernel for these there
            y = (x @ expanded(w, scales, biases).T).astype(getattr(mx, facts["out_dtype"]))
        else:
            y = mx.quantized_matmul(x, w, scales, biases, True, facts["group_size"], facts["bits"])
        return y + bias if facts["has_bias"] else y

    return simt.product(family, facts, fixed, stock, simt.many_rows(large, family.device, facts, fixed, whole))


def can_fold(scales: mx.array) -> bool:
    """Whether twice each scale is a finite number of the scales' dtype, as `FOLDED` of affine_qmm.metal asks."""
    import mlx.core as mx

    return bool(mx.all(mx.abs(scales) * 2 < mx.inf).item())


def symmetric_ratio(scales: mx.array, biases: mx.array) -> int:
    """r such that ``biases == -r / 2 * scales`` for all groups exactly, 0 if there is none."""
    import mlx.core as mx

    s, b = scales.astype(mx.float32), biases.astype(mx.float32)
    ratio = mx.round(b[0, 0] / s[0, 0] * -2.0)
    fits = mx.all(b == s * (ratio * -0.5))
    # An unusable ratio (from a scale of zero) is not finite, and nothing equals its products.
    return int(ratio.item()) if fits.item() and 0 < ratio.item() <= 512 else 0
