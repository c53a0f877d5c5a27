"""The matrix kernel on bytes: its quotients, which rows of x it makes integers of, and what it asks of weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from t5_gpu import KERNELS, excess, problem, run
from t5_ternary import gpu_offers, reference

from backend_core.testing.lab_device import typed, values

MMA = KERNELS["t5_mma"]


pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]


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
    ratio = gpu_offers.ratio_of(mx.array(values(p.scales)))
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


@pytest.mark.parametrize("exponent", [-110, -60, 84, 125, 127])
def test_large_numbers_that_meet_zeros_at_the_ends_of_bfloat16(exponent) -> None:
    """Squares of units are zero or infinite there."""
    n, k, rng = 16, 1024, np.random.default_rng(2)
    x = rng.uniform(-1, 1, (1, k)) * 2.0 ** (exponent - 14)
    x[:, ::128] = 2.0**exponent
    trits = rng.integers(0, 3, (n, k)).astype(np.uint8)
    trits[:, ::128] = 1
    p = problem(128, "bfloat16", n, k, 1)
    p.x, p.w = typed(x, "bfloat16"), reference.pack(trits, 128)
    result = checked(p, zeros=gpu_offers.zeros_of(mx.array(p.w), 128))
    assert excess(p, result.outputs[0]) <= 1.0
    assert times_read(result) == 2


def test_nothing_left_is_not_nothing_there() -> None:
    """The larger half of a group's numbers are equal and meet zeros, the others are too small to be seen in a sum."""
    n, k, rng = 16, 1024, np.random.default_rng(3)
    x, trits = np.zeros((1, k)), rng.choice((0, 2), (n, k)).astype(np.uint8)
    x[:, :64], x[:, 64:128] = 2.0**14, 2.0**-16
    trits[:, :64], trits[:, 64:128] = 1, 2
    p = problem(128, "float16", n, k, 1)
    p.x, p.w = typed(x, "float16"), reference.pack(trits, 128)
    p.scales = typed(np.full((n, k // 128), 0.5), "float16")
    assert gpu_offers.zeros_of(mx.array(p.w), 128) == 64
    assert excess(p, checked(p).outputs[0]) <= 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_group_with_many_zeros(dtype) -> None:
    """They meet that group's large numbers; no other group has any, or numbers of x that would make up for it."""
    n, k, many, rng = 16, 8192, 80, np.random.default_rng(4)
    x, trits = np.zeros((1, k)), rng.choice((0, 2), (n, k)).astype(np.uint8)
    x[:, :many] = rng.choice((-2020.0, 2020.0), many)
    x[:, many:128] = rng.standard_normal(128 - many) * 2.0**-9
    trits[:, :many] = 1
    p = problem(128, dtype, n, k, 1)
    p.x, p.w = typed(x, dtype), reference.pack(trits, 128)
    p.scales = typed(np.full((n, k // 128), 0.5), dtype)
    zeros = gpu_offers.zeros_of(mx.array(p.w), 128)
    assert zeros == 80
    assert excess(p, checked(p, zeros=zeros).outputs[0]) <= 1.0


def test_what_is_asked_of_scales() -> None:
    def ratio(*rows: list[float], dtype: mx.Dtype = mx.float16) -> int:
        return gpu_offers.ratio_of(mx.array(rows, dtype))

    assert ratio([0.5, 0.5], [2.0, 2.0]) == 16
    assert ratio([0.5, -0.7], [0.0, 0.0]) == 24
    for scales in ([1.0, 9.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="scales of a row differ"):
            ratio(scales)
    for size in (2.0**-61, 2.0**61):
        with pytest.raises(ValueError, match=r"scales are from .* the kernel takes 8.67e-19 to 1.15e\+18"):
            ratio([size, size], dtype=mx.bfloat16)


@pytest.mark.parametrize("group", [64, 128])
def test_weights_of_zero_in_a_group(group) -> None:
    def zeros(share: float) -> int:
        trits = np.zeros((3, 384), np.uint8)
        trits[1, 128 : 128 + int(share * group)] = 1
        return gpu_offers.zeros_of(mx.array(reference.pack(trits, group)), group)

    assert [zeros(s) for s in (0.0, 0.5, 0.5 + 1 / group, 0.625, 0.65, 0.75)] == [64, 64, 80, 80, 96, 96]
    with pytest.raises(ValueError, match=r"100% of a group's weights are zero; .* up to 75%"):
        zeros(1.0)


@pytest.mark.parametrize(("group", "rows"), [(128, 1), (64, 2), (128, 4)])
def test_tiles_of_several_turns(group, rows) -> None:
    # More tiles than a threadgroup has room for the sums of at once: 64 pieces, 17 tiles of 4 octets.
    p = problem(group, "float16", 16 * 35 + 3, 4096, rows)
    assert excess(p, checked(p, blocks=2).outputs[0]) <= 1.0


@pytest.mark.parametrize(("group", "dtype", "k"), [(128, "float16", 9 * 1024), (64, "bfloat16", 64 * 37)])
def test_rows_have_the_bits_they_have_alone_whatever_the_geometry(group, dtype, k) -> None:
    p = problem(group, dtype, 40, k, 5)
    alone = [checked(p.part(slice(i, i + 1))).outputs[0][0].tobytes() for i in range(5)]
    for simd_groups, depth in ((0, 0), (1, 2), (3, 3), (4, 2)):
        y = checked(p, simd_groups=simd_groups, depth=depth).outputs[0]
        assert [row.tobytes() for row in y] == alone, f"{simd_groups} SIMD groups, {depth} pieces"


def test_a_geometry_that_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no such launch has room in threadgroup memory"):
        MMA.launch(rows=1, n=16, k=17408, group_size=128, x_dtype="float16", scales_dtype="float16",
                   out_dtype="float16", device="cuda", simd_groups=30, depth=4)  # fmt: skip
