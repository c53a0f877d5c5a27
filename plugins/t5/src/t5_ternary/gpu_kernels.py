"""The Metal and CUDA kernels: what each can do and how it is started.

Facts that geometry and eligibility take: ``rows`` (M), ``n``, ``k``, ``group_size``, ``x_dtype``, ``scales_dtype``,
``out_dtype``, ``has_bias``, ``device``.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

from backend_core.simt import Launch, SimtKernel

from .layout import GROUP_BYTES

FLOATS = ("float32", "float16", "bfloat16")
#: Rows of x in one pass of the matrix-vector kernel over the weights.
MOST_ROWS = 8
#: SIMD groups of a threadgroup of the matrix-vector kernel.
QMV_SIMD_GROUPS = 4
#: Multiprocessors that the matrix kernel fills, an H200's; others take more or fewer turns.
MULTIPROCESSORS = 132
#: Threadgroup memory of the matrix kernel for x, by device.
X_BYTES = {"metal": 24576, "cuda": 149504}
#: Threads of a threadgroup of the matrix kernel: a multiprocessor has 65536 registers.
MOST_SIMD_GROUPS = 14
#: What a multiprocessor of compute capability 9.0 has for the threadgroups that it holds at once: SIMD groups, as their
#: lanes' registers allow for few and for 8 rows, and threadgroup memory.
RESIDENT, RESIDENT_OF_8, RESIDENT_BYTES = 27, 24, 231424


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


def quads_of(k: int, group_size: int) -> int:
    """Quads of pieces of 16 bytes in a row of weights."""
    return _ceil(k // group_size * GROUP_BYTES[group_size], 64)


def _mma_eligible(*, group_size: int, x_dtype: str, scales_dtype: str, k: int, n: int = 1, device: str = "metal",
                  **_: Any) -> str:  # fmt: skip
    if reason := _qmv_eligible(group_size=group_size, x_dtype=x_dtype, scales_dtype=scales_dtype, k=k):
        return reason
    if x_dtype not in ("float16", "bfloat16") or scales_dtype != x_dtype:
        return f"dtypes {x_dtype} and {scales_dtype}"
    if n * k // group_size >= 1 << 31:
        return f"{n} x {k} weights have too many groups"
    return "" if _mma_at_once(1, k, group_size, device) else f"a row of {k} has no room in threadgroup memory"


def mma_simd_groups(k: int, group_size: int) -> int:
    """SIMD groups of a threadgroup of the matrix kernel: many, with little left over in K.

    They decide in which order sums are made, so they must not depend on the number of rows.
    """
    quads = quads_of(k, group_size)
    return min(range(1, min(quads, MOST_SIMD_GROUPS) + 1), key=lambda s: (_ceil(quads, s) * s > quads * 1.06, -s))


def _mma_at_once(rows: int, k: int, group_size: int, device: str) -> int:
    """Rows of x in one pass over the weights, 0 if not even one has room."""
    fit = [r for r in (1, 2, 4, 8) if r * quads_of(k, group_size) * 640 <= X_BYTES[device]]
    return next((r for r in fit if rows <= r), fit[-1] if fit else 0)


def _mma_geometry(*, rows: int, n: int, k: int, group_size: int, x_dtype: str, out_dtype: str, has_bias: bool = False,
                  device: str = "metal", simd_groups: int = 0, per_multiprocessor: int = 0, blocks: int = 0,
                  **_: Any) -> Launch:  # fmt: skip
    simd_groups = simd_groups or mma_simd_groups(k, group_size)
    at_once, quads = _mma_at_once(rows, k, group_size, device), quads_of(k, group_size)
    whole = k // group_size * GROUP_BYTES[group_size] % 16 == 0
    template = (
        ("T", x_dtype), ("O", out_dtype), ("GS", group_size), ("ROWS", at_once), ("SIMD_GROUPS", simd_groups),
        ("WHOLE", whole), ("ROOM", quads), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    lanes, passes = 32 * simd_groups, _ceil(rows, at_once)
    together = (RESIDENT if at_once < 8 else RESIDENT_OF_8) // simd_groups
    together = min(together, RESIDENT_BYTES // (1024 + _threadgroup_bytes(at_once, quads, simd_groups)))
    resident = MULTIPROCESSORS * (per_multiprocessor or max(1, together))
    blocks = blocks or min(_ceil(n, 16), max(resident // passes, 1))
    return Launch(template, (lanes * blocks, passes, 1), (lanes, 1, 1))


def _threadgroup_bytes(rows: int, room: int, simd_groups: int) -> int:
    return rows * (640 * room + 128 * simd_groups)


def _mma_threadgroup_bytes(launch: Launch) -> int:
    return _threadgroup_bytes(*(int(launch.value(name)) for name in ("ROWS", "ROOM", "SIMD_GROUPS")))


T5_MMA = SimtKernel(
    name="t5_mma",
    source=_file("t5_mma.metal"),
    inputs=("x", "w", "scales", "bias"),
    outputs=("y",),
    template=("T", "O", "GS", "ROWS", "SIMD_GROUPS", "WHOLE", "ROOM", "HAS_BIAS"),
    geometry=_mma_geometry,
    threadgroup_bytes=_mma_threadgroup_bytes,
    eligible=_mma_eligible,
)

KERNELS = (T5_QMV, T5_MMA)
