"""mlx's tiled matrix product (steel), unmodified: all four layouts, edges, batches, a third matrix added."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from upstream_kernels.affine import TYPES, rounded

from backend_core.reference import rounding_bound, worst_ratio
from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

#: name -> type, rows, columns and depth of a tile, SIMD groups along rows and columns, whether a and b are transposed.
KERNELS: dict[str, tuple[str, int, int, int, int, int, bool, bool]] = {
    "nt": ("half", 32, 32, 16, 2, 2, False, True),
    "nn": ("float", 64, 64, 16, 1, 2, False, False),
    "tn": ("bfloat16_t", 64, 32, 32, 2, 2, True, False),
    "tt": ("half", 64, 32, 8, 4, 1, True, True),
}
#: Indices of function constants.
ADD, SCALED, ALIGN_M, ALIGN_N, ALIGN_K = 100, 110, 200, 201, 202


def instance(name: str) -> str:
    metal, *numbers, a, b = KERNELS[name]
    listed = ", ".join(map(str, numbers))
    return f'instantiate_kernel("{name}", gemm, {metal}, {listed}, {str(a).lower()}, {str(b).lower()})'


TEXT = "\n".join(
    [
        '#include "mlx/backend/metal/kernels/utils.h"',
        '#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"',
        '#include "mlx/backend/metal/kernels/steel/gemm/kernels/steel_gemm_fused.h"',
        *map(instance, KERNELS),
    ]
)


@dataclass(frozen=True)
class Product:
    """a (batch, m, k) times b (batch, k, n); where a kernel wants one transposed, its last two axes are swapped."""

    a: Any
    b: Any
    c: Any  # (batch, m, n) to be added, or None
    alpha: float
    beta: float


def inputs(name: str, batch: int, m: int, n: int, k: int, alpha: float = 1, beta: float = 0) -> Product:
    metal, *_, a_transposed, b_transposed = KERNELS[name]
    rng = np.random.default_rng([batch, m, n, k])
    a = rounded(rng.standard_normal((batch, *((k, m) if a_transposed else (m, k)))), metal)
    b = rounded(rng.standard_normal((batch, *((n, k) if b_transposed else (k, n)))), metal)
    return Product(a, b, rounded(rng.standard_normal((batch, m, n)), metal) if beta else None, alpha, beta)


def launch(upstream: Path, name: str, p: Product, m: int, n: int, k: int, bind_scales: bool = True) -> lab.Result:
    metal, bm, bn, bk, wm, wn, *_ = KERNELS[name]
    batch = len(p.a)
    tiles = -(-n // bn), -(-m // bm)
    params = struct.pack(
        "8i3q3i4x", m, n, k, p.a.shape[2], p.b.shape[2], n, *tiles, m * k, n * k, m * n, 0, k // bk, 1
    )  # fmt: skip
    buffers: dict[int, Any] = {
        0: p.a, 1: p.b, 3: rounded(np.zeros((batch, m, n)), metal), 4: np.frombuffer(params, np.uint8),
    }  # fmt: skip
    if bind_scales:
        # Row and column steps of c, step between batches, factors.
        buffers[5] = np.frombuffer(struct.pack("2iq2f", n, 1, m * n, p.alpha, p.beta), np.uint8)
    if p.c is not None:
        buffers[2] = p.c
    constants = {
        ADD: p.c is not None, SCALED: (p.alpha, p.beta) != (1, 1), ALIGN_M: m % bm == 0, ALIGN_N: n % bn == 0,
        ALIGN_K: k % bk == 0,
    }  # fmt: skip
    return lab.run_msl(
        TEXT, name, buffers, grid=(tiles[0] * 32, tiles[1] * wn, batch * wm), threadgroup=(32, wn, wm),
        outputs=[3], constants=constants, include_dirs=[upstream],
    )  # fmt: skip


def check(y: np.ndarray, name: str, p: Product) -> None:
    """Asserts that y is alpha a b + beta c, in float64 and as mlx computes it on the CPU in float32."""
    metal, *_, a_transposed, b_transposed = KERNELS[name]
    dtype = TYPES[metal][0]
    a, b = lab.to_float32(p.a), lab.to_float32(p.b)
    a, b = a.swapaxes(1, 2) if a_transposed else a, b.swapaxes(1, 2) if b_transposed else b
    c = np.zeros(1, np.float32) if p.c is None else lab.to_float32(p.c)
    k = a.shape[2]
    y64 = p.alpha * (a.astype(np.float64) @ b.astype(np.float64)) + p.beta * c
    size = abs(p.alpha) * (np.abs(a).astype(np.float64) @ np.abs(b)) + abs(p.beta) * np.abs(c)
    bound = rounding_bound(y64, size, k, dtype)
    actual = lab.to_float32(y).astype(np.float64)
    assert worst_ratio(actual, y64, bound, dtype) <= 1.0
    stock = np.array(mx.addmm(mx.array(c), mx.array(a), mx.array(b), p.alpha, p.beta), dtype=np.float64)
    assert worst_ratio(actual, stock, bound + rounding_bound(y64, size, k, "float32"), dtype) <= 1.0


@pytest.mark.parametrize(
    ("name", "batch", "m", "n", "k"),
    [
        ("nt", 1, 32, 64, 48),
        ("nt", 1, 33, 31, 40),
        ("nt", 2, 5, 32, 16),
        ("nn", 1, 64, 64, 32),
        ("nn", 1, 70, 3, 17),
        ("tn", 1, 64, 32, 64),
        ("tn", 2, 24, 40, 33),
        ("tt", 1, 64, 64, 16),
        ("tt", 1, 65, 33, 9),
        ("tt", 1, 1, 1, 1),
    ],
)
def test_gemm(upstream: Path, name: str, batch: int, m: int, n: int, k: int) -> None:
    p = inputs(name, batch, m, n, k)
    result = launch(upstream, name, p, m, n, k).check()
    check(result.outputs[0], name, p)
    report = result.report
    _, bm, bn, bk, *_, a_transposed, b_transposed = KERNELS[name]
    counts = report.buffers
    assert counts["A"].unique_read == p.a.nbytes
    assert counts["B"].unique_read == p.b.nbytes
    if (m % bm, n % bn, k % bk) == (0, 0, 0):
        assert counts["A"].bytes_read == n // bn * p.a.nbytes
        assert counts["B"].bytes_read == m // bm * p.b.nbytes
    assert counts["D"].bytes_written == counts["D"].unique_written == result.outputs[0].nbytes
    size = p.a.itemsize
    rows = (bk * (bm * size + 16) if a_transposed else bm * (bk * size + 16),
            bn * (bk * size + 16) if b_transposed else bk * (bn * size + 16))  # fmt: skip
    assert report.threadgroup_bytes == sum(rows)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "alpha", "beta"),
    [("nt", 32, 32, 16, 1, 1), ("nt", 64, 37, 33, 0.5, -2), ("nn", 64, 64, 16, 2, 0.25), ("tt", 64, 3, 8, 1, 1)],
)
def test_addmm(upstream: Path, name: str, m: int, n: int, k: int, alpha: float, beta: float) -> None:
    p = inputs(name, 1, m, n, k, alpha, beta)
    result = launch(upstream, name, p, m, n, k).check()
    check(result.outputs[0], name, p)
    counts = result.report.buffers["C"]
    assert counts.bytes_read == counts.unique_read == p.c.nbytes


@pytest.mark.parametrize(("name", "m", "n", "k"), [("nt", 40, 37, 33), ("tt", 3, 70, 8), ("nn", 100, 64, 16)])
def test_addmm_reads_rows_past_the_end(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    """mlx 0.32.4 guards the columns of the third matrix at the edge, not its rows. What was read is not stored."""
    p = inputs(name, 1, m, n, k, 1, 1)
    result = launch(upstream, name, p, m, n, k)
    assert {(f.kind, f.buffer) for f in result.report.faults} == {("out-of-bounds-read", "C")}
    assert {f.source.strip() for f in result.report.faults} == {"c_elems[k] = C[offset_c + k * fdc];"}
    # A lane has the rows of a tile that are 8 * (SIMD groups) apart, and stops only if its first is past the end.
    _, bm, _, _, wm, *_ = KERNELS[name]
    left = m % bm
    rows = [r for r in range(left, bm) if r % (8 * wm) < left]
    assert sum(f.count for f in result.report.faults) == n * len(rows)
    check(result.outputs[0], name, p)


def test_gemm_reads_factors_that_it_may_not_have(upstream: Path) -> None:
    """mlx 0.32.4 names addmm_params, which does not exist without a third matrix; compilers drop the unused load."""
    p = inputs("nt", 1, 32, 32, 16)
    result = launch(upstream, "nt", p, 32, 32, 16, bind_scales=False)
    assert {f.kind for f in result.report.faults} == {"out-of-bounds-read"}
    assert all("addmm_params" in f.source for f in result.report.faults)
