"""The kernel through its C ABI: accuracy, independence of rows and threads, strides, edges."""

import itertools

import bonsai_cases as cases
import numpy as np
import pytest
from bonsai_cases import Case, seed_of
from bonsai_qmv import reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_core.testing import cpu_kernels as h

ROWS = (*range(1, 18), 31, 33, 63, 64, 65, 127, 129)
DTYPES = list(itertools.product(cases.FLOATS, repeat=3))


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


@pytest.mark.parametrize("group", ref.GROUP_SIZES)
@pytest.mark.parametrize("bits", ref.BITS)
def test_float64_bound(bits, group, isa):
    """Every number of rows; n, k and dtypes vary with it."""
    for i, rows in enumerate(ROWS):
        n = (1, 24, 8, 37, 65, 40)[i % 6]
        k = group * (1, 5, 3, 2, 17)[i % 5]
        if isa == 0 and rows > 20:
            n, k = min(n, 9), group * 2
        dtypes = DTYPES[seed_of(bits, group, rows) % 27] if i % 2 else ("float32",) * 3
        case = Case.random(i, bits, group, rows, n, k, dtypes, bias=i % 3 == 0)
        case.check(case.run(isa=isa, threads=2 if rows in (5, 129) else 1))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(ref.BITS), st.sampled_from(ref.GROUP_SIZES), st.integers(1, 40), st.integers(1, 50),
    st.integers(1, 9), st.sampled_from(DTYPES), st.booleans(), st.sampled_from(list(cases.isas().values())),
    st.integers(1, 3), st.floats(-20, 20),
)  # fmt: skip
def test_any_problem(bits, group, rows, n, groups, dtypes, bias, isa, threads, center):
    case = Case.random(rows, bits, group, rows, n, group * groups, dtypes, bias, center)
    case.check(case.run(isa=isa, threads=threads))


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_dtypes(dtypes):
    for bits, rows in ((4, 1), (2, 5), (8, 33)):
        case = Case.random(bits, bits, 64, rows, 19, 192, dtypes, bias=True)
        case.check(case.run())


@pytest.mark.parametrize("k,group", [(96, 32), (160, 32), (544, 32), (576, 64), (9856, 128), (4224, 64)])
def test_depths(k, group, isa):
    """k that is no multiple of any block, and k beyond one block of x or of scales."""
    for rows in (1, 3, 16, 18):
        case = Case.random(k, 4, group, rows, 11, k)
        case.check(case.run(isa=isa))


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("bits", ref.BITS)
def test_large_biases(bits, rows, isa):
    """Weights near zero next to large biases: the bias must not be taken out of the sum."""
    case = Case.random(bits, bits, 64, rows, 16, 512)
    scale = np.full((16, 8), 1.0, np.float32)
    code = (1 << bits) - 1
    codes = np.full((16, 512), code)
    case.w = h.Typed(ref.pack(codes, bits), "uint32")
    case.scales = h.Typed.of(scale, "float32")
    case.biases = h.Typed.of(-code * scale * np.float32(1 + 2.0**-20), "float32")
    case.check(case.run(isa=isa))


def test_equal_terms_do_not_drift(isa):
    """All terms equal: each addition to a partial sum rounds the same way."""
    for rows, k in ((1, 16384), (16, 4096), (17, 256), (17, 4096)):
        case = Case.random(0, 4, 128, rows, 3, k)
        for value in (1.0 + 2.0**-23, 1.3333334, 1.7):
            case.x = h.Typed.of(np.full((rows, k), value), "float32")
            case.scales = h.Typed.of(np.zeros_like(case.scales.raw), "float32")
            case.biases = h.Typed.of(np.ones_like(case.biases.raw), "float32")
            case.check(case.run(isa=isa))


@pytest.mark.parametrize("bits", ref.BITS)
def test_rows_do_not_depend_on_each_other(bits, isa):
    group = (32, 64, 128)[bits % 3]
    for n, k, dtypes in (
        (37, group * 5, ("float16",) * 3),
        (8, group * 2, ("bfloat16", "float16", "float16")),
        (45, 1152, ("float32",) * 3),  # several blocks of x from 8 rows on
    ):
        case = Case.random(bits, bits, group, 16, n, k, dtypes, bias=True)
        single = [case.run(isa=isa, x=case.x.view(lambda a, i=i: a[i : i + 1])).raw for i in range(16)]
        alone = np.concatenate(single).view(np.uint8)
        for rows in range(2, 17):
            for first in (0, 16 - rows):
                part = case.x.view(lambda a, a0=first, m=rows: a[a0 : a0 + m])
                y = case.run(isa=isa, x=part, threads=1 + rows % 2).raw
                assert np.array_equal(y.view(np.uint8), alone[first : first + rows]), (rows, first)


def test_outputs_do_not_depend_on_n(isa):
    """A matrix cut off anywhere gives the bits of the whole."""
    for rows in (1, 3, 7, 16):
        case = Case.random(rows, 4, 64, rows, 40, 320)
        whole = case.run(isa=isa).raw
        for n in (1, 2, 7, 8, 9, 24, 39):
            part = Case(case.x, case.w.view(lambda a, n=n: a[:n]), case.scales.view(lambda a, n=n: a[:n]),
                        case.biases.view(lambda a, n=n: a[:n]), 4, 64)  # fmt: skip
            assert np.array_equal(part.run(isa=isa).raw, whole[:, :n]), (rows, n)


@pytest.mark.parametrize(
    "rows,n,k", [(1, 600, 1024), (2, 1000, 1024), (7, 600, 1024), (16, 301, 2048), (65, 200, 320), (300, 70, 96)]
)
def test_threads_do_not_change_bits(rows, n, k, isa):
    if isa == 0:
        n //= 2
    case = Case.random(rows, 4, 32, rows, n, k)
    one = case.run(isa=isa).raw
    for threads in range(2, 9):
        assert np.array_equal(case.run(isa=isa, threads=threads).raw, one)


@pytest.mark.parametrize("rows", [6, 40])
def test_strides_of_x(rows):
    rng = np.random.default_rng(rows)
    for dtype in cases.FLOATS:
        big = h.Typed.of(rng.standard_normal((rows, 2, 260)), dtype)
        case = Case.random(rows, 4, 64, rows, 21, 128, (dtype, "float32", "float32"))
        for change in (
            lambda a: a[:, 1, 3:131],
            lambda a: a[:, 0, ::2][:, :128],
            lambda a: a[::-1, 0, 127::-1],
            lambda a: a[: rows // 2, :, :128],
            lambda a: a[: rows // 2, :, :128].transpose(1, 0, 2),
            lambda a: np.broadcast_to(a[0, 0, :128], (rows, 128)),
            lambda a: np.broadcast_to(a[:, :1, :1], (rows, 1, 128)),
            lambda a: a[0, 0, :128],
        ):
            x = big.view(change)
            case.check(case.run(x=x), x)


def test_strides_of_weights():
    case = Case.random(1, 4, 32, 3, 16, 256)
    want = case.run().raw
    for axes in ("rows", "columns"):
        strided = []
        for a in (case.w, case.scales, case.biases):
            n, m = a.raw.shape
            room = np.full((2 * n, m) if axes == "rows" else (m, n), 1, a.raw.dtype)
            view = room[::2] if axes == "rows" else room.T
            view[...] = a.raw
            strided.append(h.Typed(view, a.dtype))
        for rows in (3, 20):
            other = Case(h.Typed.of(np.resize(case.x.raw, (rows, 256)), "float32"), *strided, 4, 32)
            got = other.run()
            other.check(got)
            if rows == 3:
                assert np.array_equal(got.raw, want)


def test_no_rows_and_no_outputs():
    case = Case.random(0, 4, 64, 4, 8, 64)
    assert case.run(x=case.x.view(lambda a: a[:0])).raw.shape == (0, 8)
    empty = Case(case.x, case.w.view(lambda a: a[:0]), case.scales.view(lambda a: a[:0]),
                 case.biases.view(lambda a: a[:0]), 4, 64)  # fmt: skip
    assert empty.run().raw.shape == (4, 0)


@pytest.mark.parametrize("rows", [5, 16, 30])
def test_nan_and_inf_stay_in_their_rows(rows, isa):
    case = Case.random(rows, 4, 64, rows, 20, 192)
    clean = case.run(isa=isa).raw
    x = case.x.raw.copy()
    x[1, 100], x[rows - 1, 7] = np.nan, np.inf
    y = case.run(isa=isa, x=h.Typed(x, "float32")).raw
    assert np.isnan(y[1]).all() and not np.isfinite(y[rows - 1]).any()
    rest = [i for i in range(rows) if i not in (1, rows - 1)]
    assert np.array_equal(y[rest], clean[rest])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_results(dtype, isa):
    """Too large becomes inf, small becomes subnormal, halves round to even, NaN stays NaN."""
    case = Case.random(0, 8, 32, 1, 6, 32, (dtype,) * 3)
    case.w = h.Typed(ref.pack(np.ones((6, 32), int), 8), "uint32")
    one = np.zeros((1, 32), np.float32)
    one[0, 0] = 1.0
    case.x = h.Typed.of(one, dtype)
    # Finite in float32, too large for dtype.
    big, more = (60000.0, 60000.0) if dtype == "float16" else (3.3895313892515355e38, 1.2e36)
    case.biases = h.Typed.of(np.array([[big], [-big], [2.0**-24], [1.0], [0.0], [np.nan]]), dtype)
    tie = 2.0**-11 if dtype == "float16" else 2.0**-8
    case.scales = h.Typed.of(np.array([[more], [-more], [0.0], [tie], [3 * tie], [0.0]]), dtype)
    y = case.run(isa=isa).values[0]
    assert y[0] == np.inf and y[1] == -np.inf and y[2] == 2.0**-24 and y[3] == 1.0 and np.isnan(y[5])
    assert y[4] == 3 * tie


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_number_is_read_exactly(dtype, isa):
    """All 65536 bit patterns, as activations, in and out again."""
    patterns = np.arange(65536, dtype=np.uint16)
    raw = patterns.view(np.float16) if dtype == "float16" else patterns
    everything = h.Typed(raw, dtype)
    finite = np.isfinite(everything.values)
    x = np.zeros((int(finite.sum()), 32), raw.dtype)
    x[:, 5] = raw[finite]
    case = Case.random(0, 1, 32, 1, 1, 32, (dtype,) * 3)
    case.w = h.Typed(ref.pack(np.ones((1, 32), int), 1), "uint32")
    case.scales = h.Typed.of(np.ones((1, 1)), dtype)
    case.biases = h.Typed.of(np.zeros((1, 1)), dtype)
    want = everything.values[finite]
    for rows in (16, 512):
        for first in range(0, len(want), rows * 64 if rows == 16 else rows):
            part = x[first : first + rows]
            y = case.run(isa=isa, x=h.Typed(part, dtype)).values[:, 0]
            assert np.array_equal(y, want[first : first + rows])


@pytest.mark.parametrize("bits", ref.BITS)
def test_nothing_past_the_end_is_read(bits, isa):
    """Every buffer ends at a page that must not be touched."""
    for group, rows, n, blocks, dtype in (
        (32, 1, 1, 1, "float16"), (32, 3, 9, 3, "float32"), (64, 16, 5, 1, "bfloat16"),
        (128, 1, 8, 3, "float32"), (32, 19, 3, 5, "float16"), (128, 33, 65, 2, "float32"),
    ):  # fmt: skip
        case = Case.random(bits, bits, group, rows, n, group * blocks, (dtype,) * 3, bias=True)
        kept = []
        for name in ("x", "w", "scales", "biases", "bias"):
            a = getattr(case, name)
            copy, memory = cases.page_end(a.raw)
            kept.append(memory)
            setattr(case, name, h.Typed(copy, a.dtype))
        case.check(case.run(isa=isa))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"bits": 7}, "bits must be"),
        ({"group": 16}, "group_size must be"),
        ({"bits": 8}, "k \\* bits / 32"),
        ({"group": 128}, "multiple of group_size"),
        ({"group": 32}, "scales and biases must be"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case = Case.random(0, 4, 64, 2, 8, 64 * 3)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=f"bonsai_affine_matmul: .*{message}"):
        case.run(isa=0)
