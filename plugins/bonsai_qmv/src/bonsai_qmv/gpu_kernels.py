"""The Metal and CUDA kernels: what each can do and how it is started.

Facts that geometry and eligibility take: ``rows`` (M), ``n``, ``k``, ``bits``, ``group_size``, ``x_dtype``,
``scales_dtype``, ``out_dtype``, ``symmetric`` (twice the ratio of ``biases == -ratio * scales``, 0 if that does not
hold), ``has_bias``.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

from backend_core.simt import Launch, SimtKernel
from backend_core.simt.pieces import MULTIPROCESSORS

from .gpu_bits import AFFINE_BITS
from .gpu_tiles import AFFINE_QMM_SIMD

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


def _mma_eligible(*, bits: int, group_size: int, x_dtype: str, scales_dtype: str, k: int, n: int = 1,
                  device: str = "metal", **_: Any) -> str:  # fmt: skip
    if bits not in (1, 2, 4, 8) or group_size not in GROUP_SIZES:
        return f"{bits} bits in groups of {group_size}"
    if x_dtype not in ("float16", "bfloat16") or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    if bits == 8 and x_dtype == "bfloat16":
        return "codes of 8 bits are not exact in bfloat16"
    if n * k // group_size >= 1 << 31:
        return f"{n} x {k} weights have too many groups"
    if not _mma_at_once(1, k, device):
        return f"a row of {k} has no room in threadgroup memory"
    return "" if k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


#: Threadgroup memory of the matrix kernel for x, by device.
X_BYTES = {"metal": 24576, "cuda": 147456}
#: Threads of a threadgroup of the matrix kernel: a multiprocessor has 65536 registers, which
#: leaves a thread 168.
MOST_SIMD_GROUPS = 12
#: Shared memory of a multiprocessor that threadgroups have for x and sums.
MULTIPROCESSOR_BYTES = 220 << 10
#: SIMD groups that a multiprocessor holds, at most 96 registers for each of their lanes.
RESIDENT = 20


def mma_simd_groups(k: int, group_size: int) -> int:
    """SIMD groups of a threadgroup of the matrix kernel: many, with little left over in K.

    They decide in which order sums are made, so they must not depend on the number of rows.
    """
    quads = _ceil(k, group_size * 4)
    return min(range(1, min(quads, MOST_SIMD_GROUPS) + 1), key=lambda s: (_ceil(quads, s) * s > quads * 1.1, -s))


def _mma_at_once(rows: int, k: int, device: str) -> int:
    """Rows of x in one pass over the weights, 0 if not even one has room."""
    fit = [r for r in (1, 2, 4, 8) if r * _ceil(k, 128) * 256 <= X_BYTES[device]]
    return next((r for r in fit if rows <= r), fit[-1] if fit else 0)


def _mma_geometry(*, rows: int, n: int, k: int, bits: int, group_size: int, x_dtype: str, scales_dtype: str,
                  out_dtype: str, symmetric: int = 0, has_bias: bool = False, device: str = "metal",
                  simd_groups: int = 0, per_multiprocessor: int = 0, blocks: int = 0, **_: Any) -> Launch:  # fmt: skip
    simd_groups = simd_groups or mma_simd_groups(k, group_size)
    at_once, groups = _mma_at_once(rows, k, device), k // group_size
    quads = _ceil(groups, 4)
    # Kernels for several K where that costs little room.
    room = _ceil(quads, 4) * 4 if quads >= 8 and device == "cuda" else quads
    # With eight rows in one pass, registers for two threadgroups do not hold the sums.
    resident = per_multiprocessor or (1 if at_once > 4 else max(1, RESIDENT // simd_groups))
    memory = at_once * (room * 8 * group_size + 128 * simd_groups)
    fit = max(1, min(resident, MULTIPROCESSOR_BYTES // memory))
    template = (
        ("T", x_dtype), ("S", scales_dtype), ("O", out_dtype), ("BITS", bits), ("GS", group_size), ("ROWS", at_once),
        ("SIMD_GROUPS", simd_groups), ("WHOLE", groups % 4 == 0), ("ROOM", room), ("RESIDENT", resident),
        ("SYMMETRIC", symmetric), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    lanes, passes = 32 * simd_groups, _ceil(rows, at_once)
    blocks = blocks or min(_ceil(n, 16), max(MULTIPROCESSORS * fit // passes, 1))
    return Launch(template, (lanes * blocks, passes, 1), (lanes, 1, 1))


def _mma_threadgroup_bytes(launch: Launch) -> int:
    rows, room = int(launch.value("ROWS")), int(launch.value("ROOM")) * int(launch.value("ROWS"))
    part = int(launch.value("SIMD_GROUPS")) * 16 * rows
    return 4 * part * (2 if part <= 1536 else 1) + room * (16 + 8 * int(launch.value("GS")))


AFFINE_MMA = SimtKernel(
    name="affine_mma",
    source=_file("affine_mma.metal"),
    inputs=("x", "w", "scales", "biases", "bias"),
    outputs=("y",),
    template=("T", "S", "O", "BITS", "GS", "ROWS", "SIMD_GROUPS", "WHOLE", "ROOM", "RESIDENT", "SYMMETRIC", "HAS_BIAS"),
    geometry=_mma_geometry,
    threadgroup_bytes=_mma_threadgroup_bytes,
    eligible=_mma_eligible,
)

#: Rows of a tile of the kernel for many rows on CUDA.
QMM_ROWS = 128


def _qmm_eligible(*, bits: int, group_size: int, x_dtype: str, scales_dtype: str, k: int, **_: Any) -> str:
    if bits not in (1, 2, 4) or group_size not in GROUP_SIZES:
        return f"{bits} bits in groups of {group_size}"
    if x_dtype not in ("float16", "bfloat16") or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    return "" if k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


def qmm_across(rows: int, n: int, folded: bool) -> int:
    """Blocks of 32 columns of a tile: what keeps all multiprocessors at work until the end.

    More than four take more registers than weights leave that are not folded. Measured on an H200: a tile of six takes
    about 1.4 times as long as one of four.
    """
    tiles = _ceil(rows, QMM_ROWS)
    time = {4: 4.0, 5: 4.9, 6: 5.6} if folded else {4: 4.0}
    return min(time, key=lambda a: (_ceil(tiles * _ceil(n, 32 * a), MULTIPROCESSORS) * time[a], a))


def _qmm_geometry(*, rows: int, n: int, bits: int, group_size: int, x_dtype: str, scales_dtype: str, out_dtype: str,
                  symmetric: int = 0, has_bias: bool = False, device: str = "metal", folded: bool = True,
                  warps: tuple[int, int] = (0, 0), per_multiprocessor: int = 0, **_: Any) -> Launch:  # fmt: skip
    # Codes times scales that are values of x's dtype.
    folded = folded and scales_dtype == x_dtype and bits in (1, 2)
    down, across = warps if warps[0] else (QMM_ROWS // 64, qmm_across(rows, n, folded)) if device == "cuda" else (1, 1)
    template = (
        ("T", x_dtype), ("S", scales_dtype), ("O", out_dtype), ("BITS", bits), ("GS", group_size),
        ("SYMMETRIC", symmetric), ("HAS_BIAS", has_bias), ("FOLDED", folded), ("WARPS_M", down),
        ("SIMD_GROUPS", down * across), ("RESIDENT", per_multiprocessor or 1),
    )  # fmt: skip
    lanes = 32 * down * across
    return Launch(template, (lanes * _ceil(rows, 64 * down), _ceil(n, 32 * across), 1), (lanes, 1, 1))


def _qmm_threadgroup_bytes(launch: Launch) -> int:
    down = int(launch.value("WARPS_M"))
    rows, columns = 64 * down, 32 * (int(launch.value("SIMD_GROUPS")) // down)
    parts = max(1, 64 // int(launch.value("GS")))
    return 2 * ((rows + columns) * 128 + rows * parts * 4 + columns * parts * 8)


AFFINE_QMM = SimtKernel(
    name="affine_qmm",
    source=_file("affine_qmm.metal"),
    inputs=("x", "w", "scales", "biases", "bias"),
    outputs=("y",),
    template=("T", "S", "O", "BITS", "GS", "SYMMETRIC", "HAS_BIAS", "FOLDED", "WARPS_M", "SIMD_GROUPS", "RESIDENT"),
    geometry=_qmm_geometry,
    threadgroup_bytes=_qmm_threadgroup_bytes,
    eligible=_qmm_eligible,
)

KERNELS = (AFFINE_QMV, AFFINE_MMA, AFFINE_BITS, AFFINE_QMM, AFFINE_QMM_SIMD)
