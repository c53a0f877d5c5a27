"""The kernels for many rows: what each can do and how it is started. Facts are those of `gpu_kernels`."""

from __future__ import annotations

import importlib.resources
from typing import Any

from backend_core.simt import Launch, SimtKernel
from backend_core.simt.tiles import rows_of_tiles, tile_rows, tiles_bytes, tiles_launch

from .layout import GROUP_BYTES

FLOATS = ("float32", "float16", "bfloat16")
#: Rows of a tile on CUDA.
QMM_ROWS = 128


def _file(name: str) -> Any:
    return importlib.resources.files("t5_ternary") / "kernels" / name


def _eligible(*, group_size: int, x_dtype: str, scales_dtype: str, k: int, **_: Any) -> str:
    if group_size not in GROUP_BYTES:
        return f"groups of {group_size}"
    if x_dtype not in FLOATS or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    return "" if k > 0 and k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


def _simd_eligible(*, device: str = "metal", **facts: Any) -> str:
    return _eligible(**facts) if device == "metal" else "SIMD-group matrices are Metal's"


def _simd_geometry(*, rows: int, n: int, group_size: int, x_dtype: str, scales_dtype: str, out_dtype: str,
                   has_bias: bool = False, **_: Any) -> Launch:  # fmt: skip
    tile = x_dtype if x_dtype == scales_dtype else "float32"
    template = (
        ("T", tile), ("O", out_dtype), ("GS", group_size), ("TILE_ROWS", tile_rows(rows)), ("HAS_BIAS", has_bias),
    )  # fmt: skip
    return tiles_launch(template, rows, n)


T5_QMM_SIMD = SimtKernel(
    name="t5_qmm_simd",
    source=_file("t5_qmm_simd.metal"),
    inputs=("x", "w", "scales", "bias"),
    outputs=("y",),
    template=("T", "O", "GS", "TILE_ROWS", "HAS_BIAS"),
    geometry=_simd_geometry,
    threadgroup_bytes=lambda launch: tiles_bytes(int(launch.value("TILE_ROWS")), str(launch.value("T"))),
    eligible=_simd_eligible,
    devices=("metal",),
)


def _qmm_eligible(*, x_dtype: str, scales_dtype: str, **facts: Any) -> str:
    if scales_dtype != x_dtype or x_dtype == "float32":
        return f"dtypes {x_dtype} and {scales_dtype}"
    return _eligible(x_dtype=x_dtype, scales_dtype=scales_dtype, **facts)


def _qmm_geometry(*, rows: int, n: int, group_size: int, x_dtype: str, out_dtype: str, has_bias: bool = False,
                  device: str = "metal", warps: tuple[int, int] = (0, 0), per_multiprocessor: int = 0,
                  **_: Any) -> Launch:  # fmt: skip
    down, across = warps if warps[0] else (QMM_ROWS // 64, 4) if device == "cuda" else (1, 1)
    template = (
        ("T", x_dtype), ("O", out_dtype), ("GS", group_size), ("HAS_BIAS", has_bias), ("WARPS_M", down),
        ("SIMD_GROUPS", down * across), ("RESIDENT", per_multiprocessor or 1),
    )  # fmt: skip
    lanes = 32 * down * across
    return Launch(template, (lanes * -(-rows // (64 * down)), -(-n // (32 * across)), 1), (lanes, 1, 1))


def _qmm_threadgroup_bytes(launch: Launch) -> int:
    down = int(launch.value("WARPS_M"))
    return 2 * 128 * (64 * down + 32 * (int(launch.value("SIMD_GROUPS")) // down))


T5_QMM = SimtKernel(
    name="t5_qmm",
    source=_file("t5_qmm.metal"),
    inputs=("x", "w", "scales", "bias"),
    outputs=("y",),
    template=("T", "O", "GS", "HAS_BIAS", "WARPS_M", "SIMD_GROUPS", "RESIDENT"),
    geometry=_qmm_geometry,
    threadgroup_bytes=_qmm_threadgroup_bytes,
    eligible=_qmm_eligible,
)


def rows_of(kernel: SimtKernel, rows: int) -> int:
    """Rows of the tiles that make `rows` rows."""
    return rows_of_tiles(rows) if kernel is T5_QMM_SIMD else -(-rows // QMM_ROWS) * QMM_ROWS
