"""The fixed-point kernels: what is known of the weights, and which rows of x are taken as integers."""

from __future__ import annotations

import bonsai_cases as cases
import numpy as np
import pytest
from bonsai_cases import Case
from bonsai_qmv import plugin
from bonsai_qmv import reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_core.testing import cpu_kernels as h

VNNI = cases.isas().get("avx512_vnni")
pytestmark = pytest.mark.skipif(VNNI is None, reason="this processor has no AVX-512 VNNI")
FIXED = {name: isa for name, isa in cases.isas().items() if name in ("avx512_vnni", "amx_int8", "amx_bf16")}


@pytest.fixture(params=FIXED.values() if FIXED else [0], ids=FIXED.keys() if FIXED else ["none"])
def fixed(request):
    """The instruction sets of this machine that have fixed-point kernels."""
    return request.param

CENTER = {1: 0, 2: 1, 3: 4, 4: 8, 5: 16, 6: 32, 8: 128}


def symmetric_case(bits, group, rows, n, k, ratio, dtype="float16", seed=0):
    case = Case.random(seed, bits, group, rows, n, k, ("float32", dtype, dtype))
    case.biases = h.Typed.of(-case.scales.values * ratio, dtype)
    return case


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", ref.BITS)
def test_spread(bits, group):
    case = Case.random(bits, bits, group, 1, 5, 256, ("float32", "float16", "float16"))
    codes = ref.unpack(case.w.raw, bits)[:, :256].astype(float)
    scaled = np.repeat(case.scales.values, group, 1) * (codes - CENTER[bits])
    mean = np.abs(case.weights()).mean(1)
    want = np.sqrt(np.maximum((scaled**2).mean(1), (case.weights() ** 2).mean(1))) / mean
    offset = np.abs(case.biases.values + CENTER[bits] * case.scales.values).max(1)
    want += 0.52 / np.sqrt(256) * offset / mean
    spread, symmetric, ratio, zeros = case.facts(VNNI)
    size = np.abs(case.weights())
    assert zeros == pytest.approx((size < size.mean(1, keepdims=True) / 8).mean(1).max(), abs=0.01)
    assert spread == pytest.approx(want.max(), rel=1e-5)
    assert (symmetric, ratio) == (0, 0.0)


@pytest.mark.parametrize(
    "bits,ratio", [(1, 0.5), (1, 1.0), (2, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (6, 32.0), (8, 128.0)]
)
def test_symmetric_weights_do_not_need_their_biases(bits, ratio, fixed):
    rows = 3 if 8 % bits == 0 else 20
    if rows > 16 and fixed == VNNI:
        pytest.skip("these bits have no fixed-point kernel without AMX")
    case = symmetric_case(bits, 64, rows, 11, 448, ratio)
    assert case.facts(fixed)[1:3] == [1, ratio]
    y = case.run(isa=fixed)
    case.check(y)
    params = [bits, 64, *case.facts(fixed)]
    wrong = h.Typed.of(np.full_like(case.biases.values, np.nan), "float16")
    blind = h.Typed(np.full(y.raw.shape, 7, y.raw.dtype), y.dtype)
    h.call(cases.library(), plugin.SYMBOL, [case.x, case.w, case.scales, wrong], blind, params, isa=fixed)
    assert np.array_equal(blind.raw, y.raw)


def test_one_bias_off_by_a_bit_is_not_symmetric():
    case = symmetric_case(2, 128, 1, 9, 512, 1.0)
    assert case.facts(VNNI)[1] == 1
    raw = case.biases.raw.copy()
    raw.view(np.uint16)[8, 3] ^= 1
    case.biases = h.Typed(raw, "float16")
    assert case.facts(VNNI)[1:3] == [0, 0.0]


def test_first_scales_of_zero_do_not_hide_the_ratio():
    case = symmetric_case(4, 64, 1, 4, 256, 8.0)
    scales = case.scales.values.copy()
    scales[0, :] = 0
    case.scales = h.Typed.of(scales, "float16")
    case.biases = h.Typed.of(-scales * 8.0, "float16")
    assert case.facts(VNNI)[1:3] == [1, 8.0]
    case.check(case.run(isa=VNNI))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_left_to_float32(bad):
    case = Case.random(1, 4, 64, 2, 8, 128)
    case.scales.raw[3, 1] = bad
    assert case.facts(VNNI)[0] == np.inf
    y = case.run(isa=VNNI).raw
    assert not np.isfinite(y[:, 3]).any() and np.isfinite(np.delete(y, 3, 1)).all()


@pytest.mark.parametrize("bits", ref.BITS)
def test_outliers(bits):
    """Rows whose largest number dwarfs the others, most of all where it meets a weight of zero."""
    for size in (1e1, 1e3, 1e5, 1e7, 1e20):
        for k in (128, 4096):
            case = symmetric_case(bits, 128, 4, 16, k, float(CENTER[bits] or 0.5), "float32")
            codes = ref.unpack(case.w.raw, bits)[:, :k].copy()
            codes[:, 5] = CENTER[bits]
            case.w = h.Typed(ref.pack(codes, bits), "uint32")
            x = case.x.raw.copy()
            x[1, 5] = size
            x[2, 5::128] = size
            x[3] *= np.exp(np.random.default_rng(k).normal(0, np.log10(size), k))
            case.x = h.Typed.of(x, "float32")
            case.check(case.run(isa=VNNI))


@pytest.mark.parametrize("rows", [1, 7, 17])
def test_codes_that_are_all_zero(rows, fixed):
    """Weights are biases then, and differ by group."""
    for k, size in ((256, 1e3), (1024, 1e4), (4096, 1e6)):
        case = Case.random(k, 1, 128, rows, 32, k)
        biases = case.biases.values.copy()
        biases[:, 0] *= 1e-3
        case.w, case.biases = h.Typed(np.zeros_like(case.w.raw), "uint32"), h.Typed.of(biases, "float32")
        x = case.x.values.copy()
        x[:, 5] = size
        case.x = h.Typed.of(x, "float32")
        case.check(case.run(isa=fixed))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_groups_of_zeros(bits, fixed):
    """Every second group, so that a sample of every second one sees nothing else."""
    for first in (0, 1):
        case = Case.random(bits, bits, 64, 5, 1, 1024)
        for name in ("scales", "biases"):
            values = getattr(case, name).values.copy()
            values[:, first::2] = 0
            setattr(case, name, h.Typed.of(values, "float32"))
        assert case.facts(VNNI)[0] > 0
        x = case.x.values.copy()
        x[:, 64 * first] = 1e5
        case.x = h.Typed.of(x, "float32")
        case.check(case.run(isa=fixed))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_biases_much_larger_than_weights_differ(bits, fixed):
    """A large x in a group of zeros; what the sum over its group is rounded by meets the bias."""
    for rows in (1, 8, 17):
        case = Case.random(bits, bits, 64, rows, 24, 1024)
        biases = case.biases.values.copy()
        scales = np.abs(biases) * 0.01 / ((1 << bits) - 1)
        scales[:, 0] = biases[:, 0] = 0
        x = case.x.values.copy()
        x[:, 3] = 1e4
        case.scales, case.biases, case.x = (h.Typed.of(a, "float32") for a in (scales, biases, x))
        case.check(case.run(isa=fixed))


def test_weights_that_nearly_cancel_are_left_to_float32():
    for bits, k in ((4, 512), (8, 1024)):
        case = Case.random(bits, bits, 64, 3, 8, k)
        case.w = h.Typed(np.full_like(case.w.raw, 0xFFFFFFFF), "uint32")
        biases = -case.scales.values * ((1 << bits) - 1)
        case.biases = h.Typed.of(biases * (1 + 2.0**-9), "float32")
        assert case.facts(VNNI)[0] == np.inf
        case.check(case.run(isa=VNNI))


@pytest.mark.parametrize("rows", [17, 40])
def test_prompts_whose_large_numbers_meet_weights_of_zero(rows, fixed):
    for bits, group, k, size in ((2, 32, 64, 1e3), (4, 32, 1024, 1e5), (2, 128, 128, 1e5), (4, 64, 1024, 1e6)):
        center = float(CENTER[bits])
        case = symmetric_case(bits, group, rows, 24, k, center, "float32")
        codes = ref.unpack(case.w.raw, bits)[:, :k].copy()
        codes[:, 5] = CENTER[bits]
        case.w = h.Typed(ref.pack(codes, bits), "uint32")
        # A bias that is zero's neighbour, so that it is read.
        case.biases = h.Typed.of(case.biases.values * (1 + 2.0**-20), "float32")
        x = case.x.values.copy()
        x[:, 5] = size
        case.x = h.Typed.of(x, "float32")
        case.check(case.run(isa=fixed))


def test_rows_of_one_number_and_none():
    case = Case.random(3, 2, 64, 4, 8, 256)
    x = np.zeros((4, 256), np.float32)
    x[1, 77], x[2, 200], x[3] = 3e-40, -1.5, 1e-30
    case.x = h.Typed.of(x, "float32")
    y = case.run(isa=VNNI)
    case.check(y)
    assert not y.raw[0].any()


def test_digits_at_their_limits():
    """Numbers right below and at powers of two, where the highest digit is largest."""
    for value in (1.0, np.nextafter(np.float32(1), np.float32(0)), 1.9921875, 1.984375, 127 / 64, np.float32(0.99609)):
        for bits in ref.BITS:
            case = Case.random(bits, bits, 32, 2, 8, 544)
            sign = np.where(np.random.default_rng(bits).random((2, 544)) < 0.5, -1, 1)
            case.x = h.Typed.of(sign * value, "float32")
            case.check(case.run(isa=VNNI))


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_rows_that_do_not_fit_among_rows_that_do(rows):
    """Each row is what it is alone, whichever kernel takes it."""
    case = Case.random(rows, 4, 64, rows, 13, 704, ("float32", "float16", "float16"), bias=True)
    x = case.x.raw.copy()
    x[::2, 9] = 1e9
    x[1] = 0
    case.x = h.Typed.of(x, "float32")
    together = case.run(isa=VNNI, threads=2).raw
    case.check(h.Typed(together, case.out_dtype))
    for m in range(rows):
        alone = case.run(isa=VNNI, x=case.x.view(lambda a, m=m: a[m : m + 1])).raw
        assert np.array_equal(alone[0], together[m])


def spiked(case, spikes, seed=0):
    """`case` with some numbers of every row made that many times as large."""
    x = case.x.values.copy()
    rng = np.random.default_rng(seed)
    for row in x:
        at = rng.choice(x.shape[-1], len(spikes), replace=False)
        row[at] = spikes * np.where(row[at] < 0, -1, 1)
    case.x = h.Typed.of(x, "float32")
    return case


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_large_numbers_that_fill_groups_of_weights_of_zero(bits, group, fixed):
    """The sums of such a group are large, cancel, and are rounded first."""
    top, k = (1 << bits) - 1, 8 * group
    for size in (20, 60, 200, 500, 2000):
        for share in (0.1, 0.3, 1.0):
            case = Case.random(size, bits, group, 3, 16, k)
            case.biases = h.Typed.of(-top * case.scales.values, "float32")
            rng = np.random.default_rng(size)
            x = case.x.values.copy()
            codes = np.full((16, k), CENTER[bits])
            for at in (slice(group, 2 * group), slice(5 * group, 6 * group)):
                codes[:, at] = top
                x[:, at] = np.where(rng.random(group) < share, size * rng.uniform(0.5, 1, group), x[:, at])
            case.x, case.w = h.Typed.of(x, "float32"), h.Typed(ref.pack(codes, bits), "uint32")
            case.check(case.run(isa=fixed))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([32, 64, 128]), st.integers(2, 12), st.integers(1, 40),
    st.integers(1, 5), st.floats(-3, 3), st.lists(st.floats(1, 5), min_size=1, max_size=9), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_large_numbers(bits, group, groups, n, rows, center, powers, seed):
    """Large numbers, up to 10^5 times the others, most of all where they meet weights of zero whose bias is not."""
    case = Case.random(seed, bits, group, rows, n, groups * group, ("float32", "float16", "float16"), center=center)
    spiked(case, [10.0**p for p in powers], seed)
    codes = ref.unpack(case.w.raw, bits)[:, : groups * group].copy()
    nearest = np.clip(np.rint(-case.biases.values / case.scales.values), 0, (1 << bits) - 1)
    at = np.abs(case.x.raw).argmax(1)
    codes[::2, at] = nearest[::2, at // group]
    case.w = h.Typed(ref.pack(codes, bits), "uint32")
    case.check(case.run(isa=VNNI))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_few_rows_are_what_each_is_alone(bits, group, fixed):
    """Sets of sixteen outputs and the rest of one; groups that end in the middle of a line, and of what is brought into
    lanes at a time. With AMX, one row takes the kernel of VNNI."""
    for groups in (1, 2, 5, 17, 35):
        kinds = ("float32", "float16", "bfloat16") if groups == 5 else ("float32", "float16", "float16")
        case = Case.random(groups, bits, group, 5, 55, groups * group, kinds, bias=groups == 17)
        alone = np.concatenate(
            [case.run(isa=VNNI, x=case.x.view(lambda a, m=m: a[m : m + 1])).raw for m in range(5)]
        )
        case.check(h.Typed(alone, case.out_dtype))
        for rows in (2, 3, 4, 5):
            together = case.run(isa=fixed, threads=2, x=case.x.view(lambda a, n=rows: a[:n])).raw
            assert np.array_equal(together.view(np.uint32), alone[:rows].view(np.uint32)), (groups, rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_scales_of_every_kind_are_brought_into_lanes(dtype, transposed, fixed):
    """Sixteen groups of sixteen outputs, which have a way of their own for half types, and what is left of both."""
    for bits, group, groups, n in ((4, 64, 35, 40), (8, 32, 16, 16), (2, 128, 18, 33), (1, 32, 48, 17)):
        case = Case.random(groups, bits, group, 3, n, groups * group, ("float32", dtype, dtype))
        if transposed:
            case.scales, case.biases = (
                h.Typed(np.asfortranarray(a.raw), a.dtype) for a in (case.scales, case.biases)
            )
        together = case.run(isa=fixed, threads=2)
        case.check(together)
        for m in range(3):
            alone = case.run(isa=VNNI, x=case.x.view(lambda a, m=m: a[m : m + 1])).raw
            assert np.array_equal(alone[0].view(np.uint32), together.raw[m].view(np.uint32)), (bits, m)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ref.BITS), st.sampled_from([32, 64, 128]), st.integers(1, 9), st.integers(1, 40),
    st.integers(1, 17), st.floats(-8, 8), st.floats(0, 3), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_layer(bits, group, groups, n, rows, center, tail, seed):
    """Any bias and any tail of x stay inside the bound; `tail` 0 is normal, 3 has factors of thousands."""
    case = Case.random(seed, bits, group, rows, n, groups * group, ("float32", "float16", "float16"), center=center)
    x = case.x.raw * np.exp(np.random.default_rng(seed).normal(0, tail, case.x.raw.shape))
    case.x = h.Typed.of(x, "float32")
    case.check(case.run(isa=VNNI))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", ref.BITS)
def test_prompts(bits, group, fixed):
    """Many rows: tiles that are full and not, rows that fit fixed point and rows that do not."""
    for rows, n, groups in ((17, 24, 3), (33, 7, 1), (64, 40, 5), (129, 16, 2)):
        dtypes = ("float32", "bfloat16", "bfloat16") if groups == 5 else ("float16",) * 3
        case = Case.random(rows, bits, group, rows, n, groups * group, dtypes, bias=rows == 64)
        x = case.x.values.copy()
        x[3, 5] = 300
        x[rows - 1, 0] = np.inf
        x[5, 2] = np.nan
        x[7] = 0
        case.x = h.Typed.of(x, dtypes[0])
        y = case.run(isa=fixed, threads=1 + rows % 3)
        finite = [i for i in range(rows) if i not in (5, rows - 1)]
        part = Case(case.x.view(lambda a, f=finite: a[f]), *_weights(case))
        part.check(h.Typed(y.raw[finite], y.dtype))
        assert not np.isfinite(y.values[[5, rows - 1]]).any()


def _weights(case):
    return case.w, case.scales, case.biases, case.bits, case.group, case.bias


def test_prompts_do_not_depend_on_threads(fixed):
    case = Case.random(1, 4, 64, 70, 130, 512)
    one = case.run(isa=fixed).raw
    for threads in (2, 3, 8):
        assert np.array_equal(case.run(isa=fixed, threads=threads).raw, one)


def test_many_rows_that_do_not_fit(fixed):
    case = Case.random(2, 4, 32, 40, 20, 96)
    x = case.x.raw.copy()
    x[::2, 9] = 1e9
    case.x = h.Typed.of(x, "float32")
    case.check(case.run(isa=fixed))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", ref.BITS)
def test_large_numbers_that_meet_small_weights(bits, group, fixed):
    """Half of the inputs is ignored and large; scales that undo those of x. What counts is sum|w * x|."""
    k = 1024
    rng = np.random.default_rng(bits)
    for ratio in (3e1, 3e2, 1e4, 1e6):
        for rows in (1, 4, 40):
            case = Case.random(bits, bits, group, rows, 24, k, ("float32",) * 3)
            x, scales, biases = case.x.raw.copy(), case.scales.raw.copy(), case.biases.raw.copy()
            x[:, : k // 2] *= ratio
            scales[:, : k // 2 // group] = biases[:, : k // 2 // group] = 0
            case.x, case.scales, case.biases = (h.Typed.of(a, "float32") for a in (x, scales, biases))
            case.check(case.run(isa=fixed))
    for reach in (2, 4, 8, 12):
        case = Case.random(bits, bits, group, 33, 24, k, ("float32",) * 3)
        up = 2.0 ** rng.uniform(-reach, reach, k // group)
        case.x = h.Typed.of(case.x.raw * np.repeat(up, group), "float32")
        case.scales, case.biases = (h.Typed.of(a.raw / up, "float32") for a in (case.scales, case.biases))
        case.check(case.run(isa=fixed))
        case.check(case.run(isa=fixed, x=case.x.view(lambda a: a[:5])), case.x.view(lambda a: a[:5]))
