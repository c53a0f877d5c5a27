"""mlx's quantized matrix-vector kernels, unmodified: right values, counted bytes, and the faults they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from upstream_kernels.affine import TYPES, Affine, check, rounded
from upstream_kernels.affine_launch import Instance, launch

from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

KERNELS: dict[str, Instance] = {
    "fast_1": ("affine_qmv_fast", "half", 128, 1, "false"),
    "fast_2": ("affine_qmv_fast", "float", 32, 2, "false"),
    "fast_4": ("affine_qmv_fast", "half", 64, 4, "false"),
    "fast_8": ("affine_qmv_fast", "bfloat16_t", 64, 8, "false"),
    "partial_4": ("affine_qmv_fast", "half", 64, 4, "false, true"),
    "qmv_1": ("affine_qmv", "half", 128, 1, "false"),
    "qmv_2": ("affine_qmv", "bfloat16_t", 32, 2, "false"),
    "qmv_3": ("affine_qmv", "float", 64, 3, "false"),
    "qmv_4": ("affine_qmv", "half", 64, 4, "false"),
    "qmv_6": ("affine_qmv", "half", 32, 6, "false"),
    "wide_1": ("affine_qmv_wide", "half", 128, 1, "5, 4, false"),
    "wide_2": ("affine_qmv_wide", "bfloat16_t", 32, 2, "2, 32, false"),
    "wide_4": ("affine_qmv_wide", "half", 64, 4, "4, 8, false"),
    "quad_4": ("affine_qmv_quad", "half", 64, 4, "128, false"),
}


def inputs(name: str, m: int, n: int, k: int) -> tuple[Affine, np.ndarray]:
    _, metal, group, bits, _ = KERNELS[name]
    rng = np.random.default_rng([m, n, k])
    return Affine.random(rng, n, k, metal, group, bits), rounded(rng.standard_normal((m, k)), metal)


def sums_of_x(name: str, x: np.ndarray, w: Affine) -> np.ndarray | None:
    """With 1 bit, mlx adds 8 neighbours of x in x' type before it multiplies the sum with the bias: 7 roundings."""
    if w.bits != 1:
        return None
    return 7 * TYPES[w.metal][1] * (np.abs(lab.to_float32(x).astype(np.float64)) @ w.bias_sizes().T)


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        ("fast_1", 1, 64, 512),  # less than one step along k
        ("fast_1", 1, 8, 1536),  # one step and the rest
        ("fast_1", 2, 8, 2048),
        ("fast_2", 2, 16, 512),
        ("fast_4", 1, 64, 512),
        ("fast_4", 3, 8, 1024),
        ("fast_8", 1, 16, 512),
        ("partial_4", 1, 13, 512),
        ("partial_4", 2, 3, 1024),
        ("partial_4", 1, 20, 512),
    ],
)
def test_qmv_fast(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    w, x = inputs(name, m, n, k)
    result = launch(upstream, KERNELS, name, w, x, n).check()
    check(result.outputs[0], x, w, extra=sums_of_x(name, x, w))
    counts = result.report.buffers
    # Each weight once per row of x; rows past the end read the last row again.
    tiles_of_4 = -(-n // 4)
    assert counts["w"].bytes_read == m * tiles_of_4 * 4 * w.weight.nbytes // n
    assert counts["w"].unique_read == w.weight.nbytes
    # x once per 4 rows of w.
    assert counts["x"].bytes_read == tiles_of_4 * x.nbytes
    assert counts["y"].bytes_written == counts["y"].unique_written == result.outputs[0].nbytes


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        ("qmv_1", 1, 7, 128),
        ("qmv_1", 1, 20, 1152),
        ("qmv_2", 2, 12, 96),
        ("qmv_3", 1, 8, 192),
        ("qmv_3", 2, 5, 320),
        ("qmv_4", 1, 1, 64),
        ("qmv_4", 2, 60, 640),
        ("qmv_4", 1, 8, 512),
        ("qmv_6", 1, 6, 96),
        ("qmv_6", 2, 12, 160),
    ],
)
def test_qmv(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    w, x = inputs(name, m, n, k)
    result = launch(upstream, KERNELS, name, w, x, n).check()
    check(result.outputs[0], x, w, extra=sums_of_x(name, x, w))
    counts = result.report.buffers
    assert counts["w"].bytes_read == m * w.weight.nbytes
    assert counts["w"].unique_read == w.weight.nbytes
    assert counts["y"].bytes_written == result.outputs[0].nbytes


@pytest.mark.parametrize(("n", "twice"), [(9, 3), (13, 3), (15, 1)])
def test_qmv_computes_the_last_rows_twice(upstream: Path, n: int, twice: int) -> None:
    """Where 4 does not divide the rows, the last tile moves back over its neighbour and stores the same again."""
    w, x = inputs("qmv_4", 1, n, 320)
    result = launch(upstream, KERNELS, "qmv_4", w, x, n)
    assert result.report.kinds() == {"race-same-value"}
    assert {f.buffer for f in result.report.faults} == {"y"}
    assert sum(f.count for f in result.report.faults) == twice
    check(result.outputs[0], x, w)
    counts = result.report.buffers
    assert counts["y"].bytes_written == (n + twice) * 2
    assert counts["w"].bytes_read == (n + twice) * w.weight.nbytes // n


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        ("wide_4", 4, 16, 512),
        ("wide_4", 5, 13, 576),  # one row of x alone, rows of w past the end
        ("wide_4", 1, 7, 64),  # fewer groups than lanes
        ("wide_1", 5, 16, 512),
        ("wide_1", 8, 30, 1152),
        ("wide_2", 2, 2, 1024),
        ("wide_2", 3, 5, 1056),
    ],
)
def test_qmv_wide(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    w, x = inputs(name, m, n, k)
    together, lanes = (int(v) for v in KERNELS[name][4].split(",")[:2])
    rows = 2 * 32 // lanes
    tiles = -(-m // together), -(-n // rows)
    result = launch(upstream, KERNELS, name, w, x, n).check()
    check(result.outputs[0], x, w)
    counts = result.report.buffers
    # Each weight once per tile of x' rows, that is what the kernel is for. The text names a byte once per code in it;
    # whether that is one load is up to the compiler.
    once = tiles[0] * tiles[1] * rows * w.weight.nbytes // n
    assert counts["w"].bytes_read in {once, 8 // w.bits * once}
    assert counts["w"].unique_read == w.weight.nbytes
    assert counts["y"].bytes_written == counts["y"].unique_written == result.outputs[0].nbytes


@pytest.mark.parametrize("n", [64, 128])
def test_qmv_quad(upstream: Path, n: int) -> None:
    w, x = inputs("quad_4", 2, n, 128)
    result = launch(upstream, KERNELS, "quad_4", w, x, n).check()
    check(result.outputs[0], x, w)
    assert result.report.buffers["w"].bytes_read == 2 * w.weight.nbytes


@pytest.mark.parametrize(("n", "missing"), [(60, 4), (72, 56)])
def test_qmv_quad_reads_scales_past_the_end(upstream: Path, n: int, missing: int) -> None:
    """mlx 0.32.4 reads scale and bias before it asks whether the row exists; 64 rows share a threadgroup."""
    w, x = inputs("quad_4", 1, n, 128)
    result = launch(upstream, KERNELS, "quad_4", w, x, n)
    found = {(f.kind, f.buffer, f.source.strip()) for f in result.report.faults}
    if lab.find_compiler().gcc:
        read = "out-of-bounds-read"
        assert found == {(read, "scales", "U s = sl[0];"), (read, "biases", "U b = bl[0];")}
        assert sum(f.count for f in result.report.faults) == 2 * 4 * missing
    else:
        assert not found  # clang moves the loads behind the question
    check(result.outputs[0], x, w)  # what was read is not used


@pytest.mark.parametrize(("name", "n", "k"), [("fast_1", 64, 512), ("qmv_1", 7, 128)])
def test_1_bit_rounds_sums_of_x(upstream: Path, name: str, n: int, k: int) -> None:
    """mlx 0.32.4 adds 8 neighbours of x in half before it goes on in float: more than `rounding` admits."""
    w, x = inputs(name, 1, n, k)
    result = launch(upstream, KERNELS, name, w, x, n).check()
    with pytest.raises(AssertionError):
        check(result.outputs[0], x, w)


def test_a_wrong_code_is_seen(upstream: Path) -> None:
    """The comparison can fail: one code of 4 bits off by one is more than rounding."""
    w, x = inputs("fast_4", 1, 8, 512)
    x[0, 0] = 1.0
    weight = w.weight.copy()
    weight[3, 0] ^= 1
    wrong = Affine(w.metal, w.group, w.bits, weight, w.scales, w.biases)
    result = launch(upstream, KERNELS, "fast_4", wrong, x, 8).check()
    with pytest.raises(AssertionError):
        check(result.outputs[0], x, w)
