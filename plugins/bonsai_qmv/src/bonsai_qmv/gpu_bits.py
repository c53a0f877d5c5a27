"""The binary matrix kernel for 1-bit weights: what it can do and how it is started.

Facts are those of ``gpu_kernels``.
"""

from __future__ import annotations

import importlib.resources
import math
from typing import TYPE_CHECKING, Any

from backend_core.simt import Launch, SimtKernel
from backend_core.simt.pieces import Shape, octets, pieces_launch, shape_that_fits
from backend_core.simt.shared_memory import of_arrays
from backend_core.sites import itemsize

if TYPE_CHECKING:
    import mlx.core as mx

#: SIMD groups of a threadgroup, at most.
MOST_SIMD_GROUPS = 17
#: Products of a sum, at least, where no numbers of x lie half way between integers; :func:`most_uneven` asks for more.
LEAST_K = 33 * 33
#: Magnitudes of weights that it takes, zero aside.
SMALLEST, LARGEST = 2.0**-50, 2.0**50


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def unevenness(scales: mx.array, biases: mx.array) -> float:
    """How many times as large as another weight of its group a 1-bit weight is, at most; inf beside weights of zero.

    scales, biases: (n, groups); the weights of a group are bias and bias + scale. NaN where they are not finite.
    """
    import mlx.core as mx

    a = mx.abs(biases.astype(mx.float32))
    b = mx.abs(biases.astype(mx.float32) + scales.astype(mx.float32))
    low, high = mx.minimum(a, b), mx.maximum(a, b)
    return float(mx.max(mx.where(high == 0, 1.0, high / low)).item())


def unusual(scales: mx.array, biases: mx.array) -> str:
    """What is said of the largest of a group's two 1-bit weights where its products with x may be more or less than
    float32 holds; empty where they are usual numbers or zero. scales, biases: as in :func:`unevenness`."""
    import mlx.core as mx

    b = biases.astype(mx.float32)
    size = mx.maximum(mx.abs(b), mx.abs(b + scales.astype(mx.float32)))
    least, most = float(mx.min(mx.where(size == 0, 1.0, size)).item()), float(mx.max(size).item())
    if least >= SMALLEST and most <= LARGEST:
        return ""
    return f"weights are from {least:.3g} to {most:.3g}; the kernel takes {SMALLEST:.3g} to {LARGEST:.3g}"


def most_uneven(k: int) -> float:
    """The largest unevenness with which sums over k weights keep the bound of `rounding` (affine_bits.metal)."""
    return math.sqrt(k) / 57


def _bits_eligible(*, bits: int, group_size: int, x_dtype: str, scales_dtype: str, k: int, n: int = 1,
                   device: str = "metal", **_: Any) -> str:  # fmt: skip
    if bits != 1 or group_size != 128:
        return f"{bits} bits in groups of {group_size}"
    if x_dtype not in ("float16", "bfloat16") or scales_dtype not in ("float32", "float16", "bfloat16"):
        return f"dtypes {x_dtype} and {scales_dtype}"
    if n * k // group_size >= 1 << 31:
        return f"{n} x {k} weights have too many groups"
    if k % group_size:
        return f"k = {k} is not a multiple of {group_size}"
    if k < LEAST_K:
        return f"sums of {k} products are not exact enough"
    return "" if _bits_shape(1, k, scales_dtype, 0, device).rows else f"a row of {k} has no room in threadgroup memory"


def _bits_bytes(rows: int, room: int, items: int, simd_groups: int, depth: int, scales: int, symmetric: bool) -> int:
    x = rows * (16 * room * 204 + 64 * items) + _ceil(4 * simd_groups * rows, 16) * 16
    # Of a column in vectors, an odd number of them.
    of_tile = 256 * (room * scales // 2 | 1) * (1 if symmetric else 2)
    return x + items // room * of_tile + 2304 * simd_groups * depth


def _bits_shapes(pieces: int) -> list[tuple[int, int]]:
    """(SIMD groups, pieces that each has memory for), the fastest on an H200 first.

    A threadgroup's pieces come in multiples of `pieces`: so should the SIMD groups that take them in turns if there are
    many. Four schedulers share 18 better than 17: 7.5 us, not 7.9, at 5120 x 17408; and 12 better than 15, 3.9 us, not
    4.3, at 8192 x 5120.
    """
    many = MOST_SIMD_GROUPS // pieces * pieces or 16
    many += many == 17
    less = 8 // pieces * pieces or 8
    first = (many, 2) if pieces > 8 else (12, 3)
    return [first, (12, 2), (less, 2), (4, 2), (1, 2)]


def _bits_shape(rows: int, k: int, scales_dtype: str, symmetric: int, device: str, simd_groups: int = 0,
                depth: int = 0) -> Shape:  # fmt: skip
    def fits(s: Shape) -> bool:
        numbers = s.rows, octets(k), s.items, s.simd_groups, s.depth
        return _bits_bytes(*numbers, itemsize(scales_dtype), symmetric > 0) <= of_arrays(device)

    shapes = [(simd_groups, depth or 2)] if simd_groups else _bits_shapes(octets(k))
    return shape_that_fits(rows, k, shapes, (1, 2, 4, 8), fits)


def _bits_geometry(*, rows: int, n: int, k: int, x_dtype: str, scales_dtype: str, out_dtype: str, symmetric: int = 0,
                   has_bias: bool = False, device: str = "metal", simd_groups: int = 0, depth: int = 0,
                   blocks: int = 0, **_: Any) -> Launch:  # fmt: skip
    shape = _bits_shape(rows, k, scales_dtype, symmetric, device, simd_groups, depth)
    template = (
        ("T", x_dtype), ("S", scales_dtype), ("O", out_dtype), ("ROWS", shape.rows),
        ("SIMD_GROUPS", shape.simd_groups), ("ROOM", octets(k)), ("ITEMS", shape.items), ("DEPTH", shape.depth),
        ("WHOLE", k % 1024 == 0), ("SYMMETRIC", symmetric), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    return pieces_launch(template, shape, rows, n, blocks)


def _bits_threadgroup_bytes(launch: Launch) -> int:
    numbers = (int(launch.value(name)) for name in ("ROWS", "ROOM", "ITEMS", "SIMD_GROUPS", "DEPTH"))
    return _bits_bytes(*numbers, itemsize(str(launch.value("S"))), int(launch.value("SYMMETRIC")) > 0)


AFFINE_BITS = SimtKernel(
    name="affine_bits",
    source=importlib.resources.files("bonsai_qmv") / "kernels" / "affine_bits.metal",
    inputs=("x", "w", "scales", "biases", "bias"),
    outputs=("y",),
    template=("T", "S", "O", "ROWS", "SIMD_GROUPS", "ROOM", "ITEMS", "DEPTH", "WHOLE", "SYMMETRIC", "HAS_BIAS"),
    geometry=_bits_geometry,
    threadgroup_bytes=_bits_threadgroup_bytes,
    eligible=_bits_eligible,
)
