"""mlx's quantized matrix-matrix kernels, unmodified: tiles in threadgroup memory, products of SIMD-group matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from upstream_kernels.affine import TYPES, Affine, check, rounded
from upstream_kernels.affine_launch import Instance, launch

from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

KERNELS: dict[str, Instance] = {
    "t_4": ("affine_qmm_t", "half", 64, 4, "true, false"),
    "t_4_any": ("affine_qmm_t", "half", 64, 4, "false, false"),
    "t_1_any": ("affine_qmm_t", "half", 128, 1, "false, false"),
    "t_2_any": ("affine_qmm_t", "bfloat16_t", 128, 2, "false, false"),
    "t_8_any": ("affine_qmm_t", "float", 32, 8, "false, false"),
    "n_4": ("affine_qmm_n", "half", 64, 4, "false"),
    "vm_4": ("affine_qvm", "half", 32, 4, "false"),
    "vm_2": ("affine_qvm", "float", 64, 2, "false"),
}


def inputs(name: str, m: int, n: int, k: int) -> tuple[Affine, np.ndarray]:
    """A matrix (n, k), or (k, n) for kernels that do not transpose it, and x (m, k)."""
    kernel, metal, group, bits, _ = KERNELS[name]
    rng = np.random.default_rng([m, n, k])
    shape = (n, k) if kernel == "affine_qmm_t" else (k, n)
    return Affine.random(rng, *shape, metal, group, bits), rounded(rng.standard_normal((m, k)), metal)


def tiled(w: Affine, x: np.ndarray, transposed: bool) -> np.ndarray:
    """Tiles hold the matrix in the type of x, so its values are rounded."""
    lost = w.rounding_of_values()
    return np.abs(lab.to_float32(x).astype(np.float64)) @ (lost.T if transposed else lost)


def assert_tiles_are_read_once(counts: lab.BufferCounts, tiles: int, bits: int) -> None:
    """The text names a byte once per code in it; whether that is one load is up to the compiler."""
    assert counts.bytes_read in {tiles * counts.nbytes, 8 // bits * tiles * counts.nbytes}
    assert counts.unique_read == counts.nbytes


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        ("t_4", 32, 32, 64),
        ("t_4", 33, 64, 128),  # one row in the second tile
        ("t_4_any", 5, 40, 192),
        ("t_4_any", 64, 63, 64),
        ("t_1_any", 7, 33, 256),
        ("t_2_any", 34, 8, 128),
        ("t_8_any", 32, 47, 96),
    ],
)
def test_qmm_t(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    w, x = inputs(name, m, n, k)
    tiles = -(-m // 32), -(-n // 32)
    result = launch(upstream, KERNELS, name, w, x, n).check()
    check(result.outputs[0], x, w, extra=tiled(w, x, True))
    report = result.report
    assert_tiles_are_read_once(report.buffers["w"], tiles[0], w.bits)
    assert report.buffers["x"].bytes_read == tiles[1] * x.nbytes
    assert report.buffers["y"].bytes_written == report.buffers["y"].unique_written == result.outputs[0].nbytes
    # Two tiles of 32 x 32, each row padded by 16 bytes.
    assert report.threadgroup_bytes == 2 * 32 * (32 * x.itemsize + 16)


@pytest.mark.parametrize(("m", "n", "k"), [(32, 64, 32), (33, 128, 40), (3, 64, 65), (40, 64, 31)])
def test_qmm_n(upstream: Path, m: int, n: int, k: int) -> None:
    w, x = inputs("n_4", m, n, k)
    tiles = -(-m // 32), n // 32
    result = launch(upstream, KERNELS, "n_4", w, x, n).check()
    check(result.outputs[0], x, w, transposed=False, extra=tiled(w, x, False))
    assert_tiles_are_read_once(result.report.buffers["w"], tiles[0], w.bits)
    counts = result.report.buffers["x"]
    assert counts.unique_read == x.nbytes
    # The tile behind the last whole one along k may read element 0 in place of what is not there.
    assert counts.bytes_read >= tiles[1] * x.nbytes
    assert counts.bytes_read == tiles[1] * x.nbytes or k % 32


@pytest.mark.parametrize(
    ("name", "m", "n", "k"), [("vm_4", 1, 64, 64), ("vm_4", 3, 96, 70), ("vm_4", 1, 32, 5), ("vm_2", 2, 64, 33)]
)
def test_qvm(upstream: Path, name: str, m: int, n: int, k: int) -> None:
    w, x = inputs(name, m, n, k)
    result = launch(upstream, KERNELS, name, w, x, n).check()
    check(result.outputs[0], x, w, transposed=False)
    assert result.report.buffers["w"].bytes_read == m * w.weight.nbytes
    assert result.report.buffers["x"].bytes_read == n // 32 * x.nbytes


def test_a_launch_with_too_many_groups_is_seen(upstream: Path) -> None:
    """A second layer of threadgroups computes everything again: nothing is wrong but the stores."""
    w, x = inputs("t_4", 32, 32, 64)
    result = launch(upstream, KERNELS, "t_4", w, x, 32, layers=2)
    assert result.report.kinds() == {"race-same-value"}
    assert result.report.buffers["y"].bytes_written == 2 * result.outputs[0].nbytes


def test_types_are_those_of_the_table() -> None:
    """Half the distance of 1 to the next number, for the types the tests use."""
    for metal, (_, half_step) in TYPES.items():
        above = lab.to_float32(rounded(np.array([1 + 2.1 * half_step, 1 + 0.9 * half_step]), metal)).astype(np.float64)
        assert list(above) == [1 + 2 * half_step, 1.0]
