"""mlx's kernels over rows, unmodified: softmax, logsumexp, cross entropy, in one step and in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from upstream_kernels.affine import TYPES, rounded

from backend_core.reference import ulp, worst_ratio
from backend_core.reference_ops import logsumexp, logsumexp_bound
from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

TEXT = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/softmax.h"
#include "mlx/backend/metal/kernels/logsumexp.h"
#include "mlx/backend/metal/kernels/cross_entropy.h"
instantiate_kernel("softmax_half", softmax_single_row, half, float)
instantiate_kernel("softmax_bfloat16_t", softmax_single_row, bfloat16_t, float)
instantiate_kernel("softmax_float", softmax_single_row, float)
instantiate_kernel("softmax_looped_half", softmax_looped, half, float)
instantiate_kernel("softmax_looped_float", softmax_looped, float)
instantiate_kernel("logsumexp_half", logsumexp, half)
instantiate_kernel("logsumexp_bfloat16_t", logsumexp, bfloat16_t)
instantiate_kernel("logsumexp_looped_float", logsumexp_looped, float)
instantiate_kernel("cross_entropy_half", cross_entropy, half)
instantiate_kernel("cross_entropy_float", cross_entropy, float)
"""
#: Each lane takes four neighbours.
READS = 4
SHARED = 2 * 32 * 4  # a maximum and a sum per SIMD group


def width(n: int, looped: bool) -> int:
    """Threads of a group: as many SIMD groups as the row needs, or all that Metal allows."""
    return 1024 if looped else -(-n // (32 * READS)) * 32


def rows(m: int, n: int, metal: str) -> Any:
    """Logits with a spread of 30, in the type; a column of -inf, if there is more than one."""
    values = np.random.default_rng([m, n]).standard_normal((m, n)) * 5
    if n > 1:
        values[:, n // 2] = -np.inf
    return rounded(values, metal)


def launch(upstream: Path, name: str, values: list[Any], m: int, threads: int, output: int) -> lab.Result:
    return lab.run_msl(
        TEXT, name, dict(enumerate(values)), grid=(m * threads, 1, 1), threadgroup=(threads, 1, 1), outputs=[output],
        include_dirs=[upstream],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "m", "n"),
    [
        ("softmax_half", 3, 128),
        ("softmax_half", 2, 127),  # the last lane has three
        ("softmax_half", 2, 1),
        ("softmax_bfloat16_t", 2, 1000),
        ("softmax_float", 1, 4096),  # 1024 threads, 32 SIMD groups
        ("softmax_looped_half", 2, 4097),
        ("softmax_looped_half", 1, 33),  # most lanes have nothing
        ("softmax_looped_float", 1, 9001),
    ],
)
def test_softmax(upstream: Path, name: str, m: int, n: int) -> None:
    metal = name.removeprefix("softmax_").removeprefix("looped_")
    x, looped = rows(m, n, metal), "looped" in name
    result = launch(upstream, name, [x, rounded(np.zeros((m, n)), metal), n], m, width(n, looped), 1).check()
    x64 = lab.to_float32(x).astype(np.float64)
    y64 = np.exp(x64 - logsumexp(x64))
    dtype = TYPES[metal][0]
    # An exponential of a difference up to 40, a sum of positive terms, a reciprocal and a product.
    lost = 2.0**-24 * (64 + 4 * np.log2(n + 1)) * y64
    actual = lab.to_float32(result.outputs[0]).astype(np.float64)
    assert worst_ratio(actual, y64, ulp(y64, dtype) + lost, dtype) <= 1.0
    stock = np.array(mx.softmax(mx.array(lab.to_float32(x)), axis=-1), dtype=np.float64)
    assert worst_ratio(actual, stock, ulp(y64, dtype) + 2 * lost + ulp(y64, "float32"), dtype) <= 1.0
    counts = result.report.buffers
    assert counts["in"].bytes_read == (2 if looped else 1) * x.nbytes
    assert counts["out"].bytes_written == counts["out"].unique_written == x.nbytes
    assert result.report.threadgroup_bytes == SHARED


@pytest.mark.parametrize(
    ("name", "m", "n"),
    [
        ("logsumexp_half", 3, 128),
        ("logsumexp_half", 2, 1),
        ("logsumexp_bfloat16_t", 2, 777),
        ("logsumexp_looped_float", 2, 5003),
        ("logsumexp_looped_float", 1, 3),
    ],
)
def test_logsumexp(upstream: Path, name: str, m: int, n: int) -> None:
    metal = name.removeprefix("logsumexp_").removeprefix("looped_")
    x, looped = rows(m, n, metal), "looped" in name
    result = launch(upstream, name, [x, rounded(np.zeros(m), metal), n], m, width(n, looped), 1).check()
    y64 = logsumexp(lab.to_float32(x).astype(np.float64))[:, 0]
    dtype = TYPES[metal][0]
    bound = logsumexp_bound(y64, n, dtype)
    actual = lab.to_float32(result.outputs[0]).astype(np.float64)
    assert worst_ratio(actual, y64, bound, dtype) <= 1.0
    stock = np.array(mx.logsumexp(mx.array(lab.to_float32(x)), axis=-1), dtype=np.float64)
    assert worst_ratio(actual, stock, bound + logsumexp_bound(y64, n, "float32"), dtype) <= 1.0
    assert result.report.buffers["in"].bytes_read == x.nbytes
    assert result.report.buffers["out"].bytes_written == result.outputs[0].nbytes


@pytest.mark.parametrize(("name", "m", "n"), [("cross_entropy_half", 3, 500), ("cross_entropy_float", 2, 4100)])
def test_cross_entropy(upstream: Path, name: str, m: int, n: int) -> None:
    metal = name.removeprefix("cross_entropy_")
    x = rows(m, n, metal)
    targets = np.random.default_rng(m).integers(0, n // 2, m).astype(np.int32)
    targets[0] -= n  # counted from the end
    result = launch(upstream, name, [x, targets, np.zeros(m, np.float32), n], m, width(n, n > 4096), 2).check()
    x64 = lab.to_float32(x).astype(np.float64)
    y64 = logsumexp(x64)[:, 0] - x64[np.arange(m), targets % n]
    bound = logsumexp_bound(y64, n, "float32")
    assert worst_ratio(result.outputs[0].astype(np.float64), y64, bound, "float32") <= 1.0
    assert result.report.buffers["targets"].unique_read == targets.nbytes


def test_fewer_threads_than_the_loop_is_made_for(upstream: Path) -> None:
    """softmax_looped folds 32 partial results whether or not there are so many SIMD groups: only 1024 threads do."""
    x = rows(1, 2048, "half")
    result = launch(upstream, "softmax_looped_half", [x, np.zeros_like(x), 2048], 1, 512, 1)
    found = {(f.kind, f.buffer) for f in result.report.faults}
    assert found == {("uninitialised-read", "local_max"), ("uninitialised-read", "local_normalizer")}
