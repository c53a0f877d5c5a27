"""mlx's matrix-vector kernels for plain matrices, unmodified: one vector, a transposed matrix, several vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from upstream_kernels.affine import TYPES, rounded

from backend_core.reference import rounding_bound, worst_ratio
from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

#: name -> kernel, type, SIMD groups along rows and columns, lanes of one along both, elements of a lane along both.
KERNELS: dict[str, tuple[str, str, int, int, int, int, int, int]] = {
    "rows": ("gemv", "half", 4, 1, 1, 32, 4, 4),
    "rows_short": ("gemv", "float", 1, 1, 8, 4, 4, 4),
    "rows_one": ("gemv", "bfloat16_t", 4, 1, 1, 32, 1, 4),
    "rows_split": ("gemv", "half", 1, 8, 1, 32, 4, 4),
    "columns": ("gemv_t", "half", 1, 2, 8, 4, 4, 4),
    "columns_one": ("gemv_t", "float", 1, 2, 8, 4, 4, 1),
}
#: name -> type, vectors of a threadgroup, lanes along the depth.
WIDE = {"wide_32": ("half", 4, 32), "wide_16": ("bfloat16_t", 5, 16)}
TEXT = "\n".join(
    [
        '#include "mlx/backend/metal/kernels/gemv.h"',
        *(f'instantiate_kernel("{n}", {k}, {t}, {", ".join(map(str, numbers))}, false, false)'
          for n, (k, t, *numbers) in KERNELS.items()),
        *(f'instantiate_kernel("{n}", gemv_wide, {t}, {v}, {lanes})' for n, (t, v, lanes) in WIDE.items()),
    ]
)  # fmt: skip


def inputs(metal: str, m: int, n: int, k: int, transposed: bool = False) -> tuple[Any, Any]:
    """A matrix (n, k), or (k, n) if transposed, and vectors (m, k)."""
    rng = np.random.default_rng([m, n, k])
    shape = (k, n) if transposed else (n, k)
    return rounded(rng.standard_normal(shape), metal), rounded(rng.standard_normal((m, k)), metal)


def check(y: np.ndarray, matrix: Any, x: Any, metal: str, transposed: bool = False) -> None:
    dtype = TYPES[metal][0]
    a, v = lab.to_float32(matrix), lab.to_float32(x)
    a = a if transposed else a.T
    y64 = v.astype(np.float64) @ a.astype(np.float64)
    size = np.abs(v).astype(np.float64) @ np.abs(a)
    bound = rounding_bound(y64, size, v.shape[1], dtype)
    actual = lab.to_float32(y).astype(np.float64).reshape(y64.shape)
    assert worst_ratio(actual, y64, bound, dtype) <= 1.0
    stock = np.array(mx.array(v) @ mx.array(a), dtype=np.float64)
    assert worst_ratio(actual, stock, bound + rounding_bound(y64, size, v.shape[1], "float32"), dtype) <= 1.0


def launch(upstream: Path, name: str, matrix: Any, x: Any, n: int) -> lab.Result:
    kernel, metal, bm, bn, sm, sn, tm, tn = KERNELS[name]
    k = x.shape[1]
    outputs = bn * sn * tn if kernel == "gemv_t" else bm * sm * tm
    step = np.zeros(1, np.int64)  # between batches; there is one
    buffers: dict[int, Any] = {
        0: matrix, 1: x, 2: rounded(np.zeros(1), metal), 3: rounded(np.zeros(n), metal), 4: k, 5: n, 6: matrix.shape[1],
        7: np.float32(1), 8: np.float32(0), 9: 1, 10: np.ones(1, np.int32), 11: step, 12: step, 13: step, 14: 1,
    }  # fmt: skip
    return lab.run_msl(
        TEXT, name, buffers, grid=(-(-n // outputs) * 32, bn, bm), threadgroup=(32, bn, bm), outputs=[3],
        include_dirs=[upstream],
    )  # fmt: skip


def faults(result: lab.Result) -> dict[tuple[str, str], str]:
    """Kind and buffer of each fault -> the line of the text."""
    return {(f.kind, f.buffer): f.source.strip() for f in result.report.faults}


@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        ("rows", 16, 128),
        ("rows", 20, 259),
        ("rows", 4, 3),
        ("rows_short", 32, 16),
        ("rows_short", 64, 21),
        ("rows_one", 3, 200),
        ("rows_one", 1, 1),
    ],
)
def test_gemv(upstream: Path, name: str, n: int, k: int) -> None:
    metal = KERNELS[name][1]
    matrix, x = inputs(metal, 1, n, k)
    result = launch(upstream, name, matrix, x, n).check()
    check(result.outputs[0], matrix, x, metal)
    assert result.report.buffers["mat"].bytes_read == matrix.nbytes
    assert result.report.buffers["out_vec"].bytes_written == result.outputs[0].nbytes


@pytest.mark.parametrize(("name", "n", "k"), [("columns", 32, 64), ("columns", 64, 35), ("columns_one", 8, 40)])
def test_gemv_of_a_transposed_matrix(upstream: Path, name: str, n: int, k: int) -> None:
    metal = KERNELS[name][1]
    matrix, x = inputs(metal, 1, n, k, transposed=True)
    result = launch(upstream, name, matrix, x, n).check()
    check(result.outputs[0], matrix, x, metal, transposed=True)
    assert result.report.buffers["mat"].bytes_read == matrix.nbytes


@pytest.mark.parametrize(("n", "k"), [(36, 21), (4, 64)])
def test_gemv_shuffles_with_lanes_that_left(upstream: Path, n: int, k: int) -> None:
    """With 8 rows to a SIMD group, lanes beyond the last row return first; what the others take there is not used."""
    matrix, x = inputs("float", 1, n, k)
    result = launch(upstream, "rows_short", matrix, x, n)
    line = "result[tm] += simd_shuffle_down(result[tm], sn);"
    assert faults(result) == {("simd-divergence", ""): line, ("inactive-lane", ""): line}
    check(result.outputs[0], matrix, x, "float")


@pytest.mark.parametrize(("name", "n", "k"), [("columns", 20, 35), ("columns", 4, 64), ("columns_one", 3, 40)])
def test_gemv_of_a_transposed_matrix_waits_in_a_branch(upstream: Path, name: str, n: int, k: int) -> None:
    """A barrier in a branch that lanes beyond the last column do not take: Metal leaves open what it does."""
    metal = KERNELS[name][1]
    matrix, x = inputs(metal, 1, n, k, transposed=True)
    result = launch(upstream, name, matrix, x, n)
    found = faults(result)
    assert found["barrier-divergence", ""] == "threadgroup_barrier(mem_flags::mem_none);"
    assert set(found) <= {("barrier-divergence", ""), ("simd-divergence", ""), ("inactive-lane", "")}


@pytest.mark.parametrize(("n", "k"), [(4, 1024), (8, 1100)])
def test_gemv_over_several_simd_groups_waits_in_a_branch(upstream: Path, n: int, k: int) -> None:
    """Only the first lanes of the SIMD groups wait, and their barrier orders no memory; then they read each other's."""
    matrix, x = inputs("half", 1, n, k)
    result = launch(upstream, "rows_split", matrix, x, n)
    assert faults(result) == {
        ("barrier-divergence", ""): "threadgroup_barrier(mem_flags::mem_none);",
        ("race", "tgp_memory"): "result[tm] += tgp_results[sgn * (blockM + TM) + tm];",
    }
    check(result.outputs[0], matrix, x, "half")  # in the order in which the lab runs them


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "columns"),
    [("wide_32", 4, 8, 1024, 1), ("wide_32", 3, 5, 1100, 1), ("wide_16", 10, 6, 600, 2), ("wide_16", 7, 4, 4, 1)],
)
def test_gemv_wide(upstream: Path, name: str, m: int, n: int, k: int, columns: int) -> None:
    """columns: threadgroups along the vectors; with fewer than the vectors need, they go on to the next ones."""
    metal, together, lanes = WIDE[name]
    matrix, x = inputs(metal, m, n, k)
    rows = -(-n // 4)
    step = np.zeros(1, np.int64)
    buffers: dict[int, Any] = {
        0: matrix, 1: x, 3: rounded(np.zeros((m, n)), metal), 4: k, 5: n, 6: m, 7: k, 8: k, 11: 1,
        12: np.ones(1, np.int32), 13: step, 14: step,
        # For out = alpha y + beta bias, which is off; the text reads these all the same, and compilers drop it.
        9: np.float32(1), 10: np.float32(0), 16: 0, 17: 0,
    }  # fmt: skip
    result = lab.run_msl(
        TEXT, name, buffers, grid=(columns * 32, rows * lanes // 8, 1), threadgroup=(32, lanes // 8, 1), outputs=[3],
        include_dirs=[upstream],
    ).check()  # fmt: skip
    check(result.outputs[0], matrix, x, metal)
    # The matrix once per tile of vectors; rows past the end read the last one again.
    assert result.report.buffers["mat"].bytes_read == -(-m // together) * rows * 4 * matrix.nbytes // n
    assert result.report.buffers["out_vec"].bytes_written == result.outputs[0].nbytes
