"""The order of sums that all fixed-point kernels for 1 to 16 rows share, bit for bit, as a model in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import t5_cases as cases
from t5_cases import Case
from t5_ternary import reference

from backend_core.testing import cpu_kernels as h

FIXED = {name: isa for name, isa in cases.isas().items() if name in ("avx512_vnni", "amx")}
pytestmark = pytest.mark.skipif(not FIXED, reason="this processor has no AVX-512 VNNI with VBMI")
GROUPS = (64, 128)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays, rounded once: in float64, rounded to odd, which a second rounding does not harm."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = total.view(np.int64) % 2 == 0
    return np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def model(case: Case) -> np.ndarray:
    """float32 (rows, n) of rows that fit fixed point, with the layer's bias."""
    x, groups = case.x.values.astype(np.float64), case.scales.raw.shape[1]
    largest = np.abs(x).max(1, keepdims=True).astype(np.float32) * np.float32(1.0078125)
    unit = 2.0 ** (np.floor(np.log2(largest.astype(np.float64))) - 22)
    v = np.rint(x / unit).astype(np.int64).reshape(len(x), groups, -1)
    codes = reference.unpack(case.w.raw, case.group).astype(np.int64).reshape(-1, groups, case.group) - 1
    exact = np.einsum("mgk,ngk->mng", v, codes).astype(np.float32)
    scale = np.broadcast_to(case.scales.values.astype(np.float32), exact.shape)
    sums = np.zeros((4, *exact.shape[:2]), np.float32)
    for g in range(groups):
        sums[g % 4] = fma(exact[..., g], scale[..., g], sums[g % 4])
    y = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * unit.astype(np.float32)
    return y + case.bias.values.astype(np.float32) if case.bias else y


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
@pytest.mark.parametrize("group", GROUPS)
def test_order(group, isa):
    """Every number of rows; ragged n; one to nine groups, so that strips and sets of four end anywhere, and more
    groups than are prepared at a time."""
    for rows in range(1, 17):
        deep = ((35, 66), (16, 257)) if rows in (1, 6, 16) else ()
        for n, groups in ((1 + 3 * rows, 1 + rows % 9), (17, 4), *deep):
            dtypes = ("float32", ("float16", "bfloat16", "float32")[rows % 3])
            case = Case.random(rows, group, rows, n, group * groups, dtypes, bias=n % 2 == 0)
            same(case.run(isa=isa, threads=1 + rows % 3).raw, model(case))


@pytest.mark.parametrize("isa", FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("group", GROUPS)
def test_every_digit_in_every_place(group, isa):
    """Weights of 1 and -1 one at a time, all others 0: a digit that met another number, or none, would be seen."""
    places = 256 + group
    trits = np.ones((2 * places, places), np.uint8)
    trits[range(places), range(places)] = 2
    trits[range(places, 2 * places), range(places)] = 0
    w = h.Typed(reference.pack(trits, group), "uint8")
    scales = h.Typed.of(np.ones((2 * places, places // group)), "float32")
    for rows in (1, 3, 7, 16):
        x = np.random.default_rng(rows).integers(1, 1 << 22, (rows, places)).astype(np.float32)
        case = Case(h.Typed(x, "float32"), w, scales, group)
        # What is known of the weights is a layer's with as many zeros as others; one weight a row fits nothing.
        y = h.Typed.blank((rows, 2 * places), "float32")
        h.call(cases.library(), cases.plugin.SYMBOL, [case.x, w, scales], y, [group, 1.0, 0.5], isa=isa)
        assert np.array_equal(y.raw, np.concatenate([x, -x], 1)), rows


@pytest.mark.parametrize("isa", FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("group", GROUPS)
def test_sums_that_are_as_large_as_they_can_be(group, isa):
    """Every weight the same and every number the largest: no integer may overflow."""
    for rows, size in ((1, 5), (4, 5), (11, 3)):
        x = np.full((rows, group * size), np.float32(2 / 1.0078125) * np.float32(1 - 2.0**-23), np.float32)
        x[1:] *= -1
        trits = np.zeros((8, group * size), np.uint8)
        trits[4:] = 2
        case = Case.random(rows, group, rows, 8, group * size)
        case.x, case.w = h.Typed.of(x, "float32"), h.Typed(reference.pack(trits, group), "uint8")
        same(case.run(isa=isa).raw, model(case))


@pytest.mark.skipif(len(FIXED) < 2, reason="this processor has no AMX-INT8")
@pytest.mark.parametrize("group", GROUPS)
def test_instruction_sets_agree(group):
    """Also where some rows do not fit fixed point, and with any strides of the scales."""
    for rows in (1, 2, 5, 6, 10, 11, 16):
        case = Case.random(rows, group, rows, 41, 1152, ("float16", "float32"), bias=True)
        case.x.raw[rows // 2, 7] = 6e4
        case.scales = h.Typed(np.repeat(case.scales.raw, 2, 1)[:, ::2], "float32")
        a, b = (case.run(isa=isa, threads=2).raw for isa in FIXED.values())
        assert a.tobytes() == b.tobytes(), rows
