"""The binary matrix kernel for 1-bit weights, in the lab against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from bonsai_qmv import gpu_offers, reference
from bonsai_qmv.gpu_bits import AFFINE_BITS, most_uneven, unevenness, unusual
from gpu_harness import excess, problem, run

from backend_core.simt import families
from backend_core.sites import LinearSite
from backend_core.testing.lab_device import typed, values

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]


def checked(p, **over):
    # Launches on CUDA may ask for more threadgroup memory than Metal has.
    return run(AFFINE_BITS, p, device="cuda", **over).check(("threadgroup-memory",))


@pytest.mark.parametrize(
    ("dtype", "scales", "n", "groups", "rows", "symmetric", "bias"),
    [
        ("float16", "", 24, 16, 1, 1, False),
        ("float16", "", 7, 9, 2, 0, True),
        ("bfloat16", "float32", 24, 11, 4, 0, False),
        ("bfloat16", "", 40, 10, 8, 1, False),
        ("float16", "float16", 16, 9, 3, 2, False),
        ("float16", "float32", 33, 16, 16, 1, True),
        ("bfloat16", "float16", 8, 24, 5, 0, False),
    ],
)
def test_results(dtype, scales, n, groups, rows, symmetric, bias) -> None:
    p = problem(1, 128, dtype, n, 128 * groups, rows, scales=scales, symmetric=symmetric, bias=bias, seed=rows)
    result = checked(p, simd_groups=3, depth=3)
    assert excess(p, result.outputs[0]) <= 1.0
    buffers = result.report.buffers
    assert buffers["w"].unique_read == n * groups * 16
    assert buffers["biases"].bytes_read == 0 or not symmetric
    assert bias or buffers["bias"].bytes_read == 0


def test_rows_have_the_bits_they_have_alone_whatever_the_geometry() -> None:
    p = problem(1, 128, "float16", 40, 128 * 17, 16, symmetric=1)
    alone = [checked(p.part(slice(i, i + 1))).outputs[0][0].tobytes() for i in range(16)]
    for rows in range(2, 17):
        y = checked(p.part(slice(0, rows))).outputs[0]
        assert [row.tobytes() for row in y] == alone[:rows], f"{rows} rows"
    for simd_groups, depth in ((1, 2), (4, 2), (5, 3)):
        y = checked(p, simd_groups=simd_groups, depth=depth).outputs[0]
        assert [row.tobytes() for row in y] == alone


def test_each_byte_of_the_weights_is_read_once_for_all_rows_that_have_room() -> None:
    n, k = 64, 2048
    for symmetric, rows in ((0, 1), (1, 8)):
        buffers = checked(problem(1, 128, "float16", n, k, rows, symmetric=symmetric)).report.buffers
        assert buffers["w"].bytes_read == buffers["w"].unique_read == n * k // 8
        assert buffers["scales"].bytes_read == buffers["scales"].unique_read == n * k // 128 * 2
        assert buffers["biases"].unique_read == (0 if symmetric else n * k // 128 * 2)
        assert buffers["y"].bytes_written == buffers["y"].unique_written == rows * n * 2


@pytest.mark.parametrize("symmetric", [0, 1])
def test_tiles_of_several_turns(symmetric) -> None:
    # More tiles than a threadgroup has room for the sums of at once: 64 pieces, 17 tiles of 4 octets.
    p = problem(1, 128, "float16", 16 * 35 + 3, 128 * 32, 1, symmetric=symmetric)
    result = run(AFFINE_BITS, p, device="cuda", blocks=2).check(("threadgroup-memory",))
    assert excess(p, result.outputs[0]) <= 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_very_different_size(dtype) -> None:
    """One number of a group is up to 2^20 times as large as the others, and meets the smallest weight there can be."""
    n, k, rng = 24, 128 * 34, np.random.default_rng(3)
    ratio = most_uneven(k)
    p = problem(1, 128, dtype, n, k, 6, seed=5)
    x = rng.standard_normal((6, k)) * 2.0**-12
    x[:, ::128] = [[2.0**e] for e in (0, 2, 4, 5, 6, 8)]
    codes = np.ones((n, k), np.int64)
    codes[:, ::128] = 0
    p.x, p.w = typed(x, dtype), reference.pack(codes, 1)
    small = typed(rng.uniform(0.01, 0.03, (n, k // 128)), dtype)
    p.biases = small
    p.scales = typed(values(small) * (ratio - 1.05), dtype)
    assert unevenness(mx.array(values(p.scales)), mx.array(values(p.biases))) <= ratio
    assert excess(p, checked(p).outputs[0]) <= 1.0


def test_sums_of_equal_numbers_do_not_drift() -> None:
    """A group of very small numbers makes a row be summed up in float32."""
    n, k = 16, 4096
    p = problem(1, 128, "bfloat16", n, k, 1, scales="float32")
    x = np.full((1, k), 1.3046875)
    x[:, :128] = 2.0**-60
    p.x, p.w = typed(x, "bfloat16"), reference.pack(np.ones((n, k), np.int64), 1)
    p.scales, p.biases = (typed(np.full((n, k // 128), value), "float32") for value in (0.37, -0.21))
    assert excess(p, checked(p).outputs[0]) <= 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_stays_in_its_row(value) -> None:
    p = problem(1, 128, "float16", 24, 1152, 5, bias=True)
    clean = checked(p).outputs[0]
    x = np.array(values(p.x))
    x[2, 17] = value
    p.x = typed(x, "float16")
    y = checked(p).outputs[0]
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(y[others], clean[others])
    with np.errstate(invalid="ignore"):
        want, _ = p.expected()
    np.testing.assert_array_equal(values(y)[2], want[2])


def test_zeros_and_subnormal_numbers() -> None:
    p = problem(1, 128, "float16", 16, 1152, 3)
    x = np.array(values(p.x))
    x[0] = 0
    x[1] *= 2.0**-24
    x[2, 256:] = 0
    p.x = typed(x, "float16")
    y = checked(p).outputs[0]
    assert not values(y)[0].any()
    assert excess(p, y) <= 1.0


def test_views_that_begin_between_multiples_of_16_bytes() -> None:
    p = problem(1, 128, "float16", 24, 128 * 16, 2)
    whole = checked(p).outputs[0]
    for name in ("x", "w", "scales", "biases"):
        a = getattr(p, name)
        memory = np.zeros(a.size + 1, a.dtype)
        memory[1:] = a.ravel()
        setattr(p, name, memory[1:].reshape(a.shape))
        np.testing.assert_array_equal(checked(p).outputs[0], whole)
        setattr(p, name, a)


@pytest.mark.parametrize("symmetric", [0, 1])
@pytest.mark.parametrize("exponent", [-126, -60, 119, 122, 124])
def test_numbers_at_the_ends_of_bfloat16(exponent, symmetric) -> None:
    """All of one sign: their sum over a group is more than float32 holds, where products with weights are not."""
    p = problem(1, 128, "bfloat16", 16, 1152, 2, symmetric=symmetric)
    p.scales = typed(np.full((16, 9), 2.0**-12 if exponent > 0 else 0.5), "bfloat16")
    p.biases = typed(values(p.scales) * -0.5, "bfloat16")
    p.x = typed(np.random.default_rng(1).uniform(1, 1.9, (2, 1152)) * 2.0**exponent, "bfloat16")
    assert excess(p, checked(p).outputs[0]) <= 1.0


def test_weights_far_from_usual_numbers() -> None:
    def of(*weights: float) -> str:
        size = mx.array([weights], mx.float32)
        return unusual(size * 2, -size)

    assert not of(2.0**-50, 0.0, 0.02, 2.0**50)
    assert "from 4.44e-16" in of(2.0**-51, 1.0)
    assert "to 2.25e+15" in of(1.0, 2.0**51)


def test_unevenness() -> None:
    def of(scales: list[float], biases: list[float]) -> float:
        return unevenness(mx.array([scales], mx.float16), mx.array([biases], mx.float16))

    assert of([2.0, 0.0], [-1.0, 0.0]) == 1
    assert of([3.0, 2.0], [-1.0, -1.0]) == 2
    assert of([1.0], [-1.0]) == of([1.0], [0.0]) == np.inf
    assert not of([float("nan")], [1.0]) <= 2


def test_layers_with_uneven_weights_are_declined_with_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(families, "generation", {"cuda": (9, 0)}.get)
    facts = {"path": "p", "n": 16, "k": 4096, "mode": "affine", "bits": 1, "group_size": 128, "weight_dtype": "uint32",
             "scales_dtype": "float16", "x_dtype": "float16", "out_dtype": "float16", "device": "cuda"}  # fmt: skip
    offer = gpu_offers.offers(LinearSite(**facts))[0]
    assert offer.name == "affine_bits_cuda"
    layer = {"weight": mx.zeros((16, 128), mx.uint32), "scales": mx.ones((16, 32), mx.float16),
             "biases": mx.zeros((16, 32), mx.float16)}  # fmt: skip
    with pytest.raises(ValueError, match=r"inf times as large .* up to 1\.12"):
        offer.build(layer)


def test_formats_it_does_not_serve() -> None:
    common = {"bits": 1, "group_size": 128, "x_dtype": "float16", "scales_dtype": "float16", "k": 2048,
              "device": "cuda"}  # fmt: skip
    assert not AFFINE_BITS.eligible(**common)
    for other, reason in (
        ({"bits": 2}, "2 bits"), ({"group_size": 64}, "groups of 64"), ({"x_dtype": "float32"}, "float32"),
        ({"k": 1024}, "exact enough"), ({"k": 128 * 1000}, "no room"), ({"n": 1 << 28}, "too many groups"),
    ):  # fmt: skip
        assert reason in AFFINE_BITS.eligible(**{**common, **other})
