"""The Metal and CUDA kernels: what each can do and how it is started.

Facts that geometry and eligibility take: ``rows`` (M), ``n``, ``k``, ``bits``, ``group_size``, ``x_dtype``,
``scales_dtype``, ``out_dtype``, ``symmetric`` (twice the ratio of ``biases == -ratio * scales``, 0 if that does not
hold), ``has_bias``.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

from backend_core.simt import Launch, SimtKernel

GROUP_SIZES = (32, 64, 128)
FLOATS = ("float32", "float16", "bfloat16")
#: Rows of x in one pass of the matrix-vector kernel over the weights.
MOST_ROWS = 8
#: SIMD groups of a threadgroup of the matrix-vector kernel.
QMV_SIMD_GROUPS = 4


def _file(name: str) -> Any:
    return importlib.resources.files("bonsai_qmv") / "kernels" / name


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _qmv_eligible(*, bits: int, group_size: int, x_dtype: str, scales_dtype: str, k: int, **_: Any) -> str:
    if bits not in (1, 2, 3, 4, 5, 6, 8) or group_size not in GROUP_SIZES:
        return f"{bits} bits in groups of {group_size}"
    if x_dtype not in FLOATS or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    return "" if k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


def _qmv_geometry(*, rows: int, n: int, bits: int, group_size: int, out_dtype: str, symmetric: int = 0,
                  has_bias: bool = False, tile: int = 0, **_: Any) -> Launch:  # fmt: skip
    passes = _ceil(rows, MOST_ROWS)
    at_once = _ceil(rows, passes)
    # Sums of all rows are in registers: 16 at most.
    tile = tile or (4 if at_once <= 4 else 2)
    blocks = _ceil(n, QMV_SIMD_GROUPS * tile)
    template = (
        ("O", out_dtype), ("BITS", bits), ("GS", group_size), ("ROWS", at_once), ("TILE", tile),
        ("SIMD_GROUPS", QMV_SIMD_GROUPS), ("SYMMETRIC", symmetric), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    lanes = 32 * QMV_SIMD_GROUPS
    return Launch(template, (lanes * blocks, passes, 1), (lanes, 1, 1))


AFFINE_QMV = SimtKernel(
    name="affine_qmv",
    source=_file("affine_qmv.metal"),
    inputs=("x", "w", "scales", "biases", "bias"),
    outputs=("y",),
    template=("O", "BITS", "GS", "ROWS", "TILE", "SIMD_GROUPS", "SYMMETRIC", "HAS_BIAS"),
    geometry=_qmv_geometry,
    eligible=_qmv_eligible,
)


def _mma_eligible(*, bits: int, group_size: int, x_dtype: str, scales_dtype: str, k: int, **_: Any) -> str:
    if bits not in (1, 2, 4, 8) or group_size not in GROUP_SIZES:
        return f"{bits} bits in groups of {group_size}"
    if x_dtype not in ("float16", "bfloat16") or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    if bits == 8 and x_dtype == "bfloat16":
        return "codes of 8 bits are not exact in bfloat16"
    return "" if k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


#: Multiprocessors that the matrix kernel fills, an H200's; others take more or fewer turns.
MULTIPROCESSORS = 132
#: Threadgroup memory of the matrix kernel for x, by device.
X_BYTES = {"metal": 24576, "cuda": 41984}


def mma_shape(k: int, group_size: int) -> tuple[int, int]:
    """(SIMD groups, quad) of the matrix kernel: little left over in K, 4 groups fetched at once if K allows.

    They decide in which order sums are made, so they must not depend on the number of rows.
    """
    groups = k // group_size
    quad = 4 if groups % 4 == 0 else 2 if groups % 2 == 0 else 1
    quads = groups // quad
    if quads <= 4:
        return max(quads, 1), quad
    return min(range(4, 18), key=lambda s: (_ceil(quads, s) * s, -s)), quad


def _mma_geometry(*, rows: int, n: int, k: int, bits: int, group_size: int, x_dtype: str, scales_dtype: str,
                  out_dtype: str, symmetric: int = 0, has_bias: bool = False, device: str = "metal", tiles: int = 1,
                  simd_groups: int = 0, quad: int = 0, depth: int = 1, per_multiprocessor: int = 0,
                  staged: bool | None = None, **_: Any) -> Launch:  # fmt: skip
    usual = mma_shape(k, group_size)
    simd_groups, quad = simd_groups or usual[0], quad or usual[1]
    at_once = next((r for r in (1, 2, 4, 8) if rows <= r), 16)
    if staged is None:
        staged = at_once <= 8 and at_once * k * 2 <= X_BYTES[device]
    if not staged and 1 < at_once < 8:
        at_once = 8
    template = (
        ("T", x_dtype), ("S", scales_dtype), ("O", out_dtype), ("BITS", bits), ("GS", group_size), ("ROWS", at_once),
        ("TILES", tiles), ("SIMD_GROUPS", simd_groups), ("QUAD", quad), ("DEPTH", depth),
        ("STAGED", k // group_size if staged else 0), ("SYMMETRIC", symmetric), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    lanes, passes = 32 * simd_groups, _ceil(rows, at_once)
    resident = MULTIPROCESSORS * (per_multiprocessor or max(1, 24 // simd_groups))
    blocks = min(_ceil(n, 16 * tiles), max(resident // passes, 1))
    return Launch(template, (lanes * blocks, passes, 1), (lanes, 1, 1))


def _mma_threadgroup_bytes(launch: Launch) -> int:
    rows, kept = int(launch.value("ROWS")), int(launch.value("STAGED")) * int(launch.value("ROWS")) or 1
    part = int(launch.value("SIMD_GROUPS")) * int(launch.value("TILES")) * 16 * rows
    return 4 * part * (2 if part <= 1536 else 1) + kept * (4 + 2 * int(launch.value("GS")))


AFFINE_MMA = SimtKernel(
    name="affine_mma",
    source=_file("affine_mma.metal"),
    inputs=("x", "w", "scales", "biases", "bias"),
    outputs=("y",),
    template=(
        *("T", "S", "O", "BITS", "GS", "ROWS", "TILES", "SIMD_GROUPS", "QUAD", "DEPTH", "STAGED", "SYMMETRIC"),
        "HAS_BIAS",
    ),
    geometry=_mma_geometry,
    threadgroup_bytes=_mma_threadgroup_bytes,
    eligible=_mma_eligible,
)

KERNELS = (AFFINE_QMV, AFFINE_MMA)
