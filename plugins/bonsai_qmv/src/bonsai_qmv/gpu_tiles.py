"""The Metal kernel for many rows: what it can do and how it is started. Facts are those of `gpu_kernels`."""

from __future__ import annotations

import importlib.resources
from typing import Any

from backend_core.simt import Launch, SimtKernel
from backend_core.simt.tiles import COLUMNS, tile_rows, tiles_bytes, tiles_launch

FLOATS = ("float32", "float16", "bfloat16")


def _eligible(*, bits: int, group_size: int, x_dtype: str, scales_dtype: str, k: int, device: str = "metal",
              **_: Any) -> str:  # fmt: skip
    if device != "metal":
        return "SIMD-group matrices are Metal's"
    if bits not in (1, 2, 4) or group_size not in (32, 64, 128):
        return f"{bits} bits in groups of {group_size}"
    if x_dtype not in FLOATS or scales_dtype not in FLOATS:
        return f"dtypes {x_dtype} and {scales_dtype}"
    return "" if k % group_size == 0 else f"k = {k} is not a multiple of {group_size}"


def _geometry(*, rows: int, n: int, bits: int, group_size: int, x_dtype: str, scales_dtype: str, out_dtype: str,
              symmetric: int = 0, has_bias: bool = False, whole: bool = True, **_: Any) -> Launch:  # fmt: skip
    tile = x_dtype if x_dtype == scales_dtype else "float32"
    # Weights that are values of the tile's dtype, scale and all.
    exact = (bits == 1 and symmetric in (1, 2)) or bits == symmetric == 2
    template = (
        ("T", tile), ("O", out_dtype), ("BITS", bits), ("GS", group_size), ("TILE_ROWS", tile_rows(rows)),
        ("SYMMETRIC", symmetric), ("HAS_BIAS", has_bias), ("WHOLE", tile == "float32" or (whole and exact)),
    )  # fmt: skip
    return tiles_launch(template, rows, n)


def _threadgroup_bytes(launch: Launch) -> int:
    rows = int(launch.value("TILE_ROWS"))
    return tiles_bytes(rows, str(launch.value("T"))) + 4 * rows + 8 * COLUMNS


AFFINE_QMM_SIMD = SimtKernel(
    name="affine_qmm_simd",
    source=importlib.resources.files("bonsai_qmv") / "kernels" / "affine_qmm_simd.metal",
    inputs=("x", "w", "scales", "biases", "bias"),
    outputs=("y",),
    template=("T", "O", "BITS", "GS", "TILE_ROWS", "SYMMETRIC", "HAS_BIAS", "WHOLE"),
    geometry=_geometry,
    threadgroup_bytes=_threadgroup_bytes,
    eligible=_eligible,
    devices=("metal",),
)
