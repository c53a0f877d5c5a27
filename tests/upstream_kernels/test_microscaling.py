"""mlx's kernels for microscaling formats (mxfp4, nvfp4, mxfp8), unmodified: vectors, several vectors, tiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from upstream_kernels.affine import TYPES, rounded
from upstream_kernels.geometry import GEOMETRIES

from backend_core.reference import decode, rounding_bound, worst_ratio
from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

#: format -> group and bits.
FORMATS = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
#: name -> kernel, type, format, further template arguments.
KERNELS: dict[str, tuple[str, str, str, str]] = {
    "fast_mxfp4": ("fp_qmv_fast", "half", "mxfp4", "false"),
    "fast_nvfp4": ("fp_qmv_fast", "bfloat16_t", "nvfp4", "false"),
    "fast_nvfp4_scaled": ("fp_qmv_fast", "half", "nvfp4", "false, false, true"),
    "fast_mxfp8": ("fp_qmv_fast", "float", "mxfp8", "false"),
    "qmv_mxfp4": ("fp_qmv", "half", "mxfp4", "false"),
    "qmv_nvfp4": ("fp_qmv", "half", "nvfp4", "false"),
    "qmv_mxfp8": ("fp_qmv", "bfloat16_t", "mxfp8", "false"),
    "wide_mxfp4": ("fp_qmv_wide", "half", "mxfp4", "4, 16, false"),
    "wide_mxfp8": ("fp_qmv_wide", "half", "mxfp8", "3, 16, false"),
    "t_mxfp4": ("fp_qmm_t", "half", "mxfp4", "false, false"),
    "t_nvfp4": ("fp_qmm_t", "bfloat16_t", "nvfp4", "false, false"),
    "t_mxfp8": ("fp_qmm_t", "float", "mxfp8", "false, false"),
}
TEXT = "\n".join(
    [
        *(f'#include "mlx/backend/metal/kernels/{h}"' for h in (
            "utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h")),
        *(f'instantiate_kernel("{n}", {k}, {t}, {FORMATS[f][0]}, {FORMATS[f][1]}, {more})'
          for n, (k, t, f, more) in KERNELS.items()),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """weight (n, k * bits / 32) uint32, scales (n, k / group) uint8, x (m, k) in the kernel's type."""

    weight: np.ndarray
    scales: np.ndarray
    x: Any


def inputs(name: str, m: int, n: int, k: int) -> Problem:
    _, metal, mode, _ = KERNELS[name]
    rng = np.random.default_rng([m, n, k])
    weight, scales = mx.quantize(mx.array(rng.standard_normal((n, k)).astype(np.float32)), mode=mode)
    return Problem(np.array(weight), np.array(scales), rounded(rng.standard_normal((m, k)), metal))


def launch(upstream: Path, name: str, p: Problem, factor: float = 1.0) -> lab.Result:
    kernel, metal, _, more = KERNELS[name]
    geometry = GEOMETRIES[kernel]
    (m, k), n = p.x.shape, len(p.weight)
    y = rounded(np.zeros((m, n)), metal)
    batch = [np.zeros(1, t) for t in (np.int32, np.int32, np.int64, np.int32, np.int32, np.int64, np.int64)]
    scales = [p.scales] if kernel == "fp_qmv_wide" else [p.scales, np.array([factor], np.float32)]
    rows = [m] if geometry.with_rows else []
    values = [p.weight, *scales, p.x, y, k, n, *rows, *batch]
    return lab.run_msl(
        TEXT, name, dict(enumerate(values)), grid=geometry.grid(m, n, more),
        threadgroup=geometry.threads, outputs=[len(scales) + 2], include_dirs=[upstream],
    )  # fmt: skip


def check(y: np.ndarray, name: str, p: Problem, factor: float = 1.0) -> None:
    """Asserts that y is x times the transposed matrix, in float64 and as mlx computes it on the CPU in float32."""
    _, metal, mode, _ = KERNELS[name]
    group, bits = FORMATS[mode]
    dtype = TYPES[metal][0]
    w = factor * decode(mode, bits, group, p.weight, p.scales, None)
    x = lab.to_float32(p.x)
    y64, size = x.astype(np.float64) @ w.T, np.abs(x).astype(np.float64) @ np.abs(w).T
    bound = rounding_bound(y64, size, x.shape[1], dtype)
    actual = lab.to_float32(y).astype(np.float64)
    assert worst_ratio(actual, y64, bound, dtype) <= 1.0
    stock = factor * np.array(
        mx.quantized_matmul(mx.array(x), mx.array(p.weight), mx.array(p.scales), mode=mode), dtype=np.float64
    )
    assert worst_ratio(actual, stock, bound + rounding_bound(y64, size, x.shape[1], "float32"), dtype) <= 1.0


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        ("fast_mxfp4", 1, 16, 512),
        ("fast_mxfp4", 2, 8, 1024),
        ("fast_nvfp4", 1, 8, 512),
        ("fast_mxfp8", 1, 8, 512),
        ("qmv_mxfp4", 1, 5, 96),
        ("qmv_nvfp4", 2, 12, 208),
        ("qmv_mxfp8", 1, 8, 160),
    ],
)
def test_fp_qmv(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    p = inputs(name, m, n, k)
    result = launch(upstream, name, p).check()
    check(result.outputs[0], name, p)
    counts = result.report.buffers
    assert counts["w"].unique_read == p.weight.nbytes
    assert counts["scales"].unique_read == p.scales.nbytes
    assert counts["global_scale"].bytes_read == 0
    assert counts["y"].bytes_written == counts["y"].unique_written == result.outputs[0].nbytes


def test_fp_qmv_with_a_scale_of_the_tensor(upstream: Path) -> None:
    """The unit of nvfp4 codes is the tensor's scale over the largest code: 448 * 6."""
    p = inputs("fast_nvfp4_scaled", 1, 8, 512)
    result = launch(upstream, "fast_nvfp4_scaled", p, factor=3.5 * 448 * 6).check()
    check(result.outputs[0], "fast_nvfp4_scaled", p, factor=3.5)


@pytest.mark.parametrize(
    ("name", "m", "n", "k"), [("wide_mxfp4", 4, 8, 512), ("wide_mxfp4", 5, 5, 544), ("wide_mxfp8", 3, 4, 96)]
)
def test_fp_qmv_wide(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    p = inputs(name, m, n, k)
    result = launch(upstream, name, p).check()
    check(result.outputs[0], name, p)
    assert result.report.buffers["w"].unique_read == p.weight.nbytes
    assert result.report.buffers["y"].bytes_written == result.outputs[0].nbytes


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [("t_mxfp4", 32, 32, 64), ("t_mxfp4", 33, 40, 96), ("t_nvfp4", 5, 7, 64), ("t_mxfp8", 7, 33, 32)],
)
def test_fp_qmm_t(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    p = inputs(name, m, n, k)
    result = launch(upstream, name, p).check()
    check(result.outputs[0], name, p)
    counts = result.report.buffers
    assert counts["w"].bytes_read == -(-m // 32) * p.weight.nbytes
    assert counts["x"].bytes_read == -(-n // 32) * p.x.nbytes
