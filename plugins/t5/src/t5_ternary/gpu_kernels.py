"""The Metal and CUDA kernels: what each can do and how it is started.

Facts that geometry and eligibility take: ``rows`` (M), ``n``, ``k``, ``group_size``, ``x_dtype``, ``scales_dtype``,
``out_dtype``, ``has_bias``, ``device``.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

from backend_core.simt import Launch, SimtKernel
from backend_core.simt.pieces import Shape, octets, pieces_launch, shape_that_fits
from backend_core.simt.shared_memory import of_arrays

from .gpu_tiles import T5_QMM, T5_QMM_SIMD
from .layout import GROUP_BYTES

FLOATS = ("float32", "float16", "bfloat16")
#: Rows of x in one pass of the matrix-vector kernel over the weights.
MOST_ROWS = 8
#: SIMD groups of a threadgroup of the matrix-vector kernel.
QMV_SIMD_GROUPS = 4


def _file(name: str) -> Any:
    return importlib.resources.files("t5_ternary") / "kernels" / name


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _qmv_eligible(*, group_size: int, x_dtype: str, scales_dtype: str, k: int, **_: Any) -> str:
    if group_size not in GROUP_BYTES:
        return f"groups of {group_size}"
    if x_dtype not in FLOATS or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    return "" if k > 0 and k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


def _qmv_geometry(*, rows: int, n: int, group_size: int, out_dtype: str, has_bias: bool = False, tile: int = 0,
                  **_: Any) -> Launch:  # fmt: skip
    passes = _ceil(rows, MOST_ROWS)
    at_once = _ceil(rows, passes)
    # Sums of all rows are in registers: 16 at most.
    tile = tile or (4 if at_once <= 4 else 2)
    blocks = _ceil(n, QMV_SIMD_GROUPS * tile)
    template = (
        ("O", out_dtype), ("GS", group_size), ("ROWS", at_once), ("TILE", tile), ("SIMD_GROUPS", QMV_SIMD_GROUPS),
        ("HAS_BIAS", has_bias),
    )  # fmt: skip
    lanes = 32 * QMV_SIMD_GROUPS
    return Launch(template, (lanes * blocks, passes, 1), (lanes, 1, 1))


T5_QMV = SimtKernel(
    name="t5_qmv",
    source=_file("t5_qmv.metal"),
    inputs=("x", "w", "scales", "bias"),
    outputs=("y",),
    template=("O", "GS", "ROWS", "TILE", "SIMD_GROUPS", "HAS_BIAS"),
    geometry=_qmv_geometry,
    eligible=_qmv_eligible,
)


def _mma_eligible(*, group_size: int, x_dtype: str, scales_dtype: str, k: int, n: int = 1, device: str = "metal",
                  **_: Any) -> str:  # fmt: skip
    if reason := _qmv_eligible(group_size=group_size, x_dtype=x_dtype, scales_dtype=scales_dtype, k=k):
        return reason
    if x_dtype not in ("float16", "bfloat16") or scales_dtype != x_dtype:
        return f"dtypes {x_dtype} and {scales_dtype}"
    if n * k // group_size >= 1 << 31:
        return f"{n} x {k} weights have too many groups"
    return "" if _mma_shape(1, k, group_size, device).rows else f"a row of {k} has no room in threadgroup memory"


def _mma_bytes(rows: int, room: int, items: int, simd_groups: int, depth: int, group_size: int) -> int:
    groups = 1024 // group_size
    slots = room * rows * 3 * (groups * (7 if group_size == 128 else 4) + 4)
    # With four rows, or two, gaps between their words so that they leave 8 or 16 of 32 banks.
    gap = 0 if rows == 1 else ((48 if rows == 2 else 40) - slots // rows % 32) % 32
    x = 16 * slots + _ceil(4 * (slots + gap * rows), 16) * 16
    facts = _ceil(8 * room * groups * rows, 16) * 16 + _ceil(4 * room * groups * rows, 16) * 16
    # Of a column in vectors, an odd number of them.
    scales = items // room * 256 * (room * groups // 8 | 1)
    return x + facts + 16 + 64 * items * rows + scales + simd_groups * (3328 * depth + 128)


def _mma_shape(rows: int, k: int, group_size: int, device: str, simd_groups: int = 0, depth: int = 0) -> Shape:
    def fits(s: Shape) -> bool:
        return _mma_bytes(s.rows, octets(k), s.items, s.simd_groups, s.depth, group_size) <= of_arrays(device)

    shapes = [(simd_groups, depth or 2)] if simd_groups else [(g, 2) for g in (*range(12, 7, -1), 4, 2, 1)]
    return shape_that_fits(rows, k, shapes, (1, 2, 4), fits)


def _mma_geometry(*, rows: int, n: int, k: int, group_size: int, x_dtype: str, out_dtype: str, has_bias: bool = False,
                  device: str = "metal", ratio: int = 16, zeros: int = 64, simd_groups: int = 0, depth: int = 0,
                  blocks: int = 0, **_: Any) -> Launch:  # fmt: skip
    shape = _mma_shape(rows, k, group_size, device, simd_groups, depth)
    columns = k // group_size * GROUP_BYTES[group_size]
    align = 16 if k % 1024 == 0 else next(a for a in (8, 4, 1) if columns % a == 0)
    template = (
        ("T", x_dtype), ("O", out_dtype), ("GS", group_size), ("ROWS", shape.rows), ("SIMD_GROUPS", shape.simd_groups),
        ("ROOM", octets(k)), ("ITEMS", shape.items), ("DEPTH", shape.depth), ("ALIGN", align), ("RATIO", ratio),
        ("ZEROS", zeros), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    return pieces_launch(template, shape, rows, n, blocks)


def _mma_threadgroup_bytes(launch: Launch) -> int:
    return _mma_bytes(*(int(launch.value(name)) for name in ("ROWS", "ROOM", "ITEMS", "SIMD_GROUPS", "DEPTH", "GS")))


T5_MMA = SimtKernel(
    name="t5_mma",
    source=_file("t5_mma.metal"),
    inputs=("x", "w", "scales", "bias"),
    outputs=("y",),
    template=(
        "T", "O", "GS", "ROWS", "SIMD_GROUPS", "ROOM", "ITEMS", "DEPTH", "ALIGN", "RATIO", "ZEROS", "HAS_BIAS",
    ),
    geometry=_mma_geometry,
    threadgroup_bytes=_mma_threadgroup_bytes,
    eligible=_mma_eligible,
)

KERNELS = (T5_QMV, T5_MMA, T5_QMM, T5_QMM_SIMD)
