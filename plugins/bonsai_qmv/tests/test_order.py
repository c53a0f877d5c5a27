"""The order of sums that all fixed-point kernels for 1 to 16 rows share, bit for bit, as a model in numpy."""

from __future__ import annotations

import bonsai_cases as cases
import numpy as np
import pytest
from bonsai_cases import Case
from bonsai_qmv import reference as ref

from backend_core.testing import cpu_kernels as h

FIXED = {name: isa for name, isa in cases.isas().items() if name in ("avx512_vnni", "amx_int8")}
pytestmark = pytest.mark.skipif(not FIXED, reason="this processor has no AVX-512 VNNI")

CENTER = {1: 0, 2: 1, 4: 8, 8: 128}


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays, rounded once: in float64, rounded to odd, which a second rounding does not harm."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = total.view(np.int64) % 2 == 0
    return np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def model(case: Case, ratio: float | None) -> np.ndarray:
    """float32 (rows, n) of rows that fit fixed point, before the layer's bias."""
    x, groups = case.x.values.astype(np.float64), case.scales.raw.shape[1]
    largest = np.abs(x).max(1, keepdims=True).astype(np.float32) * np.float32(1.0078125)
    unit = 2.0 ** (np.floor(np.log2(largest.astype(np.float64))) - 22)
    v = np.rint(x / unit).astype(np.int64).reshape(len(x), groups, -1)
    codes = ref.unpack(case.w.raw, case.bits).astype(np.int64).reshape(-1, groups, v.shape[2]) - CENTER[case.bits]
    exact = np.einsum("mgk,ngk->mng", v, codes).astype(np.float32)
    total = np.broadcast_to(v.sum(2)[:, None].astype(np.float32), exact.shape)
    scale = np.broadcast_to(case.scales.values.astype(np.float32), exact.shape)
    bias = np.broadcast_to(case.biases.values.astype(np.float32), exact.shape)
    center = np.full(exact.shape, CENTER[case.bits] - (ratio or 0), np.float32)
    offset = fma(center, scale, bias if ratio is None else np.zeros_like(scale))
    sums = np.zeros((4, *exact.shape[:2]), np.float32)
    for g in range(groups):
        sums[g % 4] = fma(exact[..., g], scale[..., g], sums[g % 4])
        sums[g % 4] = fma(total[..., g], offset[..., g], sums[g % 4])
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) * unit.astype(np.float32)


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), f"{(got != want).sum()} of {got.size} differ"


def test_fma_rounds_once():
    one = np.ones(1, np.float32)
    tiny = one * np.float32(2.0**-60)
    half = one * np.float32(2.0**-24)  # half a unit in the last place of one: the tie goes to even
    assert fma(half, one, one) == 1
    assert fma(half, one * np.float32(1 + 2.0**-23), one) == np.float32(1 + 2.0**-23)
    assert fma(-tiny, one, np.float32(1 + 2.0**-23) * one) == np.float32(1 + 2.0**-23)


@pytest.mark.parametrize("isa", FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("group", ref.GROUP_SIZES)
@pytest.mark.parametrize("bits", CENTER)
def test_order(bits, group, isa):
    """Ragged n, groups that end anywhere in a line and in a set of four, rows that begin in the middle of a line."""
    for i, (rows, n, groups) in enumerate(((1, 24, 18), (1, 21, 18), (1, 3, 1), (2, 40, 3), (3, 1, 9), (5, 17, 8),
                                           (6, 33, 16), (11, 16, 21), (16, 70, 6), (1, 9, 300))):  # fmt: skip
        dtypes = ("float32", "float16", ("float16", "bfloat16")[i % 2])
        case = Case.random(i, bits, group, rows, n, group * groups, dtypes)
        same(case.run(isa=isa, threads=1 + i % 3).raw, model(case, None))


@pytest.mark.parametrize("isa", FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("bits,ratio", [(1, 0.5), (2, 1.0), (2, 2.0), (4, 8.0), (8, 128.0)])
def test_order_of_symmetric_layers(bits, ratio, isa):
    for rows in (1, 2, 16):
        case = Case.random(rows, bits, 64, rows, 19, 640, ("float32", "float16", "float16"))
        case.biases = h.Typed.of(-case.scales.values * ratio, "float16")
        assert case.facts(isa)[1:3] == [1, ratio]
        same(case.run(isa=isa).raw, model(case, ratio))


@pytest.mark.parametrize("isa", FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("bits", CENTER)
def test_sums_that_are_as_large_as_they_can_be(bits, isa):
    """Every code at its limit and every number the largest: no integer may overflow."""
    for group in ref.GROUP_SIZES:
        for rows in (1, 4):
            case = Case.random(bits, bits, group, rows, 8, group * 5)
            x = np.full((rows, group * 5), np.float32(2 / 1.0078125) * np.float32(1 - 2.0**-23), np.float32)
            x[1:] *= -1
            case.x = h.Typed.of(x, "float32")
            codes = np.zeros((8, group * 5), int)
            codes[4:] = (1 << bits) - 1
            case.w = h.Typed(ref.pack(codes, bits), "uint32")
            case.biases = h.Typed.of(-CENTER[bits] * case.scales.values, "float32")
            assert case.facts(isa)[1:3] == [1, CENTER[bits]]
            same(case.run(isa=isa).raw, model(case, CENTER[bits]))
