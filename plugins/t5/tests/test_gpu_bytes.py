"""The matrix kernel on bytes: its quotients, which rows of x it makes integers of, and what it asks of weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from t5_gpu import KERNELS, excess, problem, run, typed, values
from t5_ternary import gpu_offers, reference

from backend_core.testing import lab

MMA = KERNELS["t5_mma"]


@pytest.fixture(autouse=True, scope="module")
def compiler() -> None:
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))


def checked(p, **over):
    return run(MMA, p, device="cuda", **over).check(("threadgroup-memory",))


def times_read(result) -> float:
    """How often a byte of the weights was read: rows that are no integers take a second time."""
    w = result.report.buffers["w"]
    return w.bytes_read / w.unique_read


def test_a_third_in_half_precision_gives_the_quotients() -> None:
    third, offset = np.array([0x3555, 0x62AA], np.uint16).view(np.float16).astype(np.float64)
    byte = np.arange(256)
    number = (1280.0 + byte).astype(np.float16)
    for i in range(1, 5):
        # A multiplication and an addition of such numbers are exact in float64: one rounding, as fma has.
        number = (number.astype(np.float64) * third + offset).astype(np.float16)
        np.testing.assert_array_equal(number.view(np.uint16) & 0xFF, byte // 3**i)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_numbers_that_meet_zeros(group, dtype) -> None:
    """The largest number of each group is 2^e times the others and meets weights of zero; another row has no such."""
    n, k, rng = 16, 2048, np.random.default_rng(1)
    x = rng.standard_normal((8, k)) * 2.0**-14
    for row, e in enumerate((0, 2, 4, 6, 8, 10, 12, 14)):
        x[row, ::group] *= 2.0**e
    trits = rng.integers(0, 3, (n, k)).astype(np.uint8)
    trits[:, ::group] = 1
    p = problem(group, dtype, n, k, 8)
    p.x, p.w = typed(x, dtype), reference.pack(trits, group)
    y = checked(p).outputs[0]
    assert excess(p, y) <= 1.0
    alone = [checked(p.part(slice(i, i + 1))) for i in range(8)]
    assert [result.outputs[0][0].tobytes() for result in alone] == [row.tobytes() for row in y]
    # The first rows are integers, the last are not.
    assert times_read(alone[0]) == 1 and times_read(alone[-1]) == 2


def test_scales_that_differ_within_a_row() -> None:
    p = problem(128, "float16", 16, 1024, 2)
    factors = np.where(np.arange(8) % 2 == 0, 1.0, 3.9)
    p.scales = typed(np.ones((16, 1)) * factors * 0.02, "float16")
    ratio = gpu_offers.ratio_of(mx.array(values(p.scales)), 0.3)
    assert ratio in (64, 96, 128)
    result = checked(p, ratio=ratio)
    assert excess(p, result.outputs[0]) <= 1.0


def test_rows_of_zeros_are_integers() -> None:
    p = problem(128, "float16", 16, 1024, 2)
    x = np.array(values(p.x))
    x[0] = 0
    x[1, 300:] = 0
    p.x = typed(x, "float16")
    result = checked(p.part(slice(0, 1)))
    assert not values(result.outputs[0]).any() and times_read(result) == 1
    assert excess(p, checked(p).outputs[0]) <= 1.0


def test_what_is_asked_of_scales_and_zeros() -> None:
    def ratio(*rows: list[float]) -> int:
        return gpu_offers.ratio_of(mx.array(rows, mx.float16), 0.3)

    assert ratio([0.5, 0.5], [2.0, 2.0]) == 16
    assert ratio([0.5, -0.7], [0.0, 0.0]) == 24
    for scales in ([1.0, 9.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="scales of a row differ"):
            ratio(scales)
    with pytest.raises(ValueError, match="60% of a row are zero"):
        gpu_offers.ratio_of(mx.ones((1, 2), mx.float16), 0.6)


@pytest.mark.parametrize("group", [64, 128])
def test_share_of_zeros(group) -> None:
    trits = np.zeros((3, 384), np.uint8)
    trits[1, :96] = 1
    trits[2, 200:] = 2
    assert gpu_offers.zeros_of(mx.array(reference.pack(trits, group)), 384, group) == 96 / 384
