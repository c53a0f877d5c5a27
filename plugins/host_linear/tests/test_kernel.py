"""The kernel through its C ABI: accuracy, independence of rows and threads, strides, edges."""

import linear_cases as cases
import numpy as np
import pytest
from host_linear import reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import FLOATS, FORMATS, MODES, Case, seed_of

from backend_core.testing import cpu_kernels as h

ROWS = (*range(1, 19), 23, 31, 32, 33, 48, 49, 63, 64, 65, 127, 129)


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


@pytest.mark.parametrize("form", FORMATS)
def test_float64_bound(form, isa):
    """Every number of rows; n, k and dtypes vary with it."""
    for i, rows in enumerate(ROWS):
        n = (1, 24, 8, 37, 65, 40, 97)[i % 7]
        k = (1, 77, 33, 15, 288, 64, 16, 519)[i % 8]
        if isa == 0 and rows > 20:
            n, k = min(n, 9), min(k, 70)
        dtype = FLOATS[seed_of(form, rows) % 3] if i % 2 else "float32"
        case = Case.random(i, form, rows, n, k, dtype, FLOATS[i % 3] if i % 4 == 0 else None)
        case.check(case.run(isa=isa, threads=2 if rows in (5, 129) else 1))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 110), st.integers(1, 600), st.sampled_from(FLOATS),
    st.sampled_from((None, *FLOATS)), st.sampled_from(list(cases.isas().values())), st.integers(1, 3),
)  # fmt: skip
def test_any_problem(form, rows, n, k, dtype, bias, isa, threads):
    case = Case.random(rows, form, rows, n, k, dtype, bias)
    case.check(case.run(isa=isa, threads=threads))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMATS)
def test_dtypes(form, dtype):
    for rows, bias in ((1, "float16"), (5, None), (33, "bfloat16"), (40, dtype)):
        case = Case.random(rows, form, rows, 19, 100, dtype, bias)
        case.check(case.run())


@pytest.mark.parametrize("form", FORMATS)
def test_depths(form, isa):
    """k beyond one block, and around the ends of blocks."""
    for k in (255, 257, 511, 512, 544, 4095, 4097, 9000):
        for rows in (1, 16, 40) if k < 600 else (1, 3, 18):
            case = Case.random(k, form, rows, 11, k)
            case.check(case.run(isa=isa))


def test_equal_terms_do_not_drift(isa):
    """All terms equal: each addition to a partial sum rounds the same way."""
    for rows, k in ((1, 16384), (16, 4096), (40, 256), (40, 4096)):
        case = Case.random(0, "float32", rows, 3, k)
        case.w = h.Typed.of(np.ones((3, k)), "float32")
        for value in (1.0 + 2.0**-23, 1.3333334, 1.7):
            case.x = h.Typed.of(np.full((rows, k), value), "float32")
            case.check(case.run(isa=isa))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_do_not_depend_on_each_other(form, isa):
    for n, k, dtype in ((37, 333, "float16"), (8, 64, "bfloat16"), (41, 1100, "float32")):
        case = Case.random(n, form, 16, n, k, dtype, "float16")
        single = [case.run(isa=isa, x=case.x.view(lambda a, i=i: a[i : i + 1])).raw for i in range(16)]
        alone = np.concatenate(single).view(np.uint8)
        for rows in range(2, 17):
            for first in (0, 16 - rows):
                part = case.x.view(lambda a, a0=first, m=rows: a[a0 : a0 + m])
                y = case.run(isa=isa, x=part, threads=1 + rows % 2).raw
                assert np.array_equal(y.view(np.uint8), alone[first : first + rows]), (rows, first)


@pytest.mark.parametrize("form", ["float16", "bfloat16", "float32", "nvfp4"])
def test_rows_do_not_depend_on_blocks_of_k(form, isa):
    """Blocks of k, tiles of rows and threads differ from one number of rows to the next, the bits do not."""
    for k in (31, 480, 513, 1100, 4500) if isa else (31, 480, 2100):
        case = Case.random(k, form, 17, 27, k, "float32", "float32")
        case.x.raw[3, k // 2], case.x.raw[9, k - 2] = np.nan, -np.inf
        single = [case.run(isa=isa, x=case.x.view(lambda a, i=i: a[i : i + 1])).raw for i in range(16)]
        alone = np.concatenate(single)
        assert np.isnan(alone[3]).all() and not np.isfinite(alone[9]).any()
        finite = np.isfinite(case.x.raw).all(axis=1)
        sound = Case(form, case.x.view(lambda a, ok=finite: a[ok]), case.w, case.scales, case.bias)
        sound.check(sound.run(isa=isa, threads=3))
        for rows in range(2, 17):
            y = case.run(isa=isa, x=case.x.view(lambda a, m=rows: a[:m]), threads=1 + rows % 8).raw
            assert np.array_equal(y.view(np.uint32), alone[:rows].view(np.uint32)), (k, rows)


@pytest.mark.parametrize("form", ["float16", "nvfp4"])
def test_outputs_do_not_depend_on_n(form, isa):
    """A matrix cut off anywhere gives the bits of the whole."""
    for rows in (1, 3, 7, 16, 40):
        case = Case.random(rows, form, rows, 100, 320)
        whole = case.run(isa=isa).raw
        for n in (1, 2, 7, 8, 9, 24, 39, 49, 99):
            scales = case.scales and case.scales.view(lambda a, n=n: a[:n])
            part = Case(form, case.x, case.w.view(lambda a, n=n: a[:n]), scales)
            assert np.array_equal(part.run(isa=isa).raw, whole[:, :n]), (rows, n)


@pytest.mark.parametrize(
    "rows,n,k", [(1, 600, 1024), (7, 600, 1024), (16, 301, 2048), (65, 200, 320), (600, 70, 96), (200, 17, 64)]
)
def test_threads_do_not_change_bits(rows, n, k, isa):
    form = FORMATS[rows % len(FORMATS)]
    if isa == 0:
        n //= 2
    case = Case.random(rows, form, rows, n, k)
    one = case.run(isa=isa)
    case.check(one)
    for threads in range(2, 9):
        assert np.array_equal(case.run(isa=isa, threads=threads).raw, one.raw)


def test_many_rows(isa):
    """More rows than are laid out at a time."""
    case = Case.random(3, "bfloat16", 1043 if isa else 530, 13, 40, "float16", "bfloat16")
    case.check(case.run(isa=isa))


@pytest.mark.parametrize("rows", [6, 40])
def test_strides_of_x(rows):
    rng = np.random.default_rng(rows)
    for form, dtype in zip(FORMATS, FLOATS * 2, strict=True):
        big = h.Typed.of(rng.standard_normal((rows, 2, 260)), dtype)
        case = Case.random(rows, form, rows, 21, 128, dtype)
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


def _placed(a: np.ndarray, offset: int, gap: int) -> np.ndarray:
    """A copy of `a` whose first row begins `offset` bytes after a multiple of 64, with NaN all around its rows."""
    size = a.itemsize
    lines = np.full((a.shape[0] + 2) * (a.shape[1] + gap) + 128 // size, np.nan, a.dtype)
    begin = (-lines.ctypes.data % 64 + offset) // size + 64 // size
    view = np.ndarray(a.shape, a.dtype, lines, begin * size, ((a.shape[1] + gap) * size, size))
    view[...] = a
    assert view.ctypes.data % 64 == offset
    return view


@pytest.mark.parametrize("form", ["float16", "float32"])
def test_bits_do_not_depend_on_where_weights_lie(form, isa):
    size = 2 if form == "float16" else 4
    for k, gap in ((320, 0), (1088, 64), (4096, 0)) if isa else ((320, 64),):
        case = Case.random(k, form, 16, 29, k, "float32", "float32")
        want = np.concatenate([case.run(isa=isa, x=case.x.view(lambda a, i=i: a[i : i + 1])).raw for i in range(16)])
        case.check(h.Typed(want, case.out_dtype))
        for offset in (0, size, 24, 32, 40, 64 - size):
            there = Case(form, case.x, h.Typed(_placed(case.w.raw, offset, gap), form), None, case.bias)
            for rows in (1, 6, 7, 8, 11, 16):
                y = there.run(isa=isa, x=case.x.view(lambda a, m=rows: a[:m]), threads=1 + rows % 3).raw
                assert np.array_equal(y.view(np.uint8), want[:rows].view(np.uint8)), (k, offset, rows)


def test_sums_of_minus_zero_keep_their_sign_wherever_weights_lie(isa):
    """Products that vanish are -0, and so is their sum; zeros that fill up a row of W must not change that."""
    x, w = np.full((16, 1024), 1e-30, np.float32), np.full((9, 1024), -1e-30, np.float32)
    for offset in (0, 24):
        case = Case("float32", h.Typed(x, "float32"), h.Typed(_placed(w, offset, 0), "float32"))
        signs = [np.signbit(case.run(isa=isa, x=case.x.view(lambda a, m=m: a[:m])).raw) for m in (1, 7, 16)]
        assert all((s == signs[0][0, 0]).all() for s in signs)


@pytest.mark.parametrize("form", FORMATS)
def test_strides_of_weights(form):
    case = Case.random(1, form, 3, 16, 256, bias="float32")
    want = case.run().raw
    for change in (
        lambda n, m: np.zeros((2 * n, m))[::2],
        lambda n, m: np.zeros((m, n)).T,
        lambda n, m: np.zeros((n, 3 * m + 1))[:, m : 2 * m],
        lambda n, m: np.zeros((n, 2 * m))[::-1, ::2],
    ):

        def strided(a, change=change):
            view = change(*a.raw.shape)
            base = np.ones(view.base.shape, a.raw.dtype)
            start = view.__array_interface__["data"][0] - view.base.__array_interface__["data"][0]
            size = a.raw.itemsize
            out = np.ndarray(a.raw.shape, a.raw.dtype, base, start // 8 * size,
                             tuple(s // 8 * size for s in view.strides))  # fmt: skip
            out[...] = a.raw
            return h.Typed(out, a.dtype)

        bias = h.Typed(np.repeat(case.bias.raw, 3)[::3], "float32")
        for rows in (3, 40):
            x = h.Typed.of(np.resize(case.x.raw, (rows, 256)), "float32")
            other = Case(form, x, strided(case.w), case.scales and strided(case.scales), bias)
            got = other.run()
            other.check(got)
            if rows == 3:
                assert np.array_equal(got.raw, want)


def test_no_rows_and_no_outputs():
    case = Case.random(0, "float16", 4, 8, 64)
    assert case.run(x=case.x.view(lambda a: a[:0])).raw.shape == (0, 8)
    empty = Case("float16", case.x, case.w.view(lambda a: a[:0]))
    assert empty.run().raw.shape == (4, 0)


@pytest.mark.parametrize("form", ["float16", "mxfp4"])
@pytest.mark.parametrize("rows", [5, 16, 50])
def test_nan_and_inf_stay_in_their_rows(rows, form, isa):
    case = Case.random(rows, form, rows, 20, 192)
    if form == "mxfp4":  # no weight is zero, so that infinity stays infinite or becomes NaN everywhere
        case.w = h.Typed(ref.pack(1 + ref.unpack(case.w.raw, 4) % 7, 4), "uint32")
    clean = case.run(isa=isa).raw
    x = case.x.raw.copy()
    x[1, 100], x[rows - 1, 7] = np.nan, np.inf
    y = case.run(isa=isa, x=h.Typed(x, "float32")).raw
    assert np.isnan(y[1]).all() and np.isinf(y[rows - 1]).all()
    rest = [i for i in range(rows) if i not in (1, rows - 1)]
    assert np.array_equal(y[rest], clean[rest])


@pytest.mark.parametrize("form", FLOATS)
def test_nan_and_inf_in_weights(form, isa):
    for rows in (1, 6, 40):
        case = Case.random(rows, form, rows, 30, 70)
        clean = case.run(isa=isa).raw
        w = case.w.values.copy()
        w[3, 5], w[29, 69] = np.nan, -np.inf
        case.w = h.Typed.of(w, form)
        y = case.run(isa=isa).raw
        assert np.isnan(y[:, 3]).all()
        assert np.array_equal(y[:, 29], np.where(case.x.values[:, 69] > 0, -np.inf, np.inf).astype(y.dtype))
        rest = [i for i in range(30) if i not in (3, 29)]
        assert np.array_equal(y[:, rest], clean[:, rest])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_results(dtype, isa):
    """Too large becomes inf, small becomes subnormal, halves round to even, NaN stays NaN."""
    # Finite in float32, too large for dtype.
    big, more = (60000.0, 60000.0) if dtype == "float16" else (3.3895313892515355e38, 1.2e36)
    tie = 2.0**-11 if dtype == "float16" else 2.0**-8
    w = np.array([[big, more], [-big, -more], [2.0**-24, 0], [1.0, tie], [1.0, 3 * tie], [np.nan, 0]])
    for rows in (1, 16, 40):
        case = Case(dtype, h.Typed.of(np.ones((rows, 2)), dtype), h.Typed.of(w, dtype))
        y = case.run(isa=isa).values
        want = [np.inf, -np.inf, 2.0**-24, 1.0, 1.0 + 4 * tie]
        assert (y[:, :5] == want).all() and np.isnan(y[:, 5]).all()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_number_is_read_exactly(dtype, rows, isa):
    """All 65536 bit patterns, as activations and as weights, in and out again."""
    patterns = np.arange(65536, dtype=np.uint16)
    raw = patterns.view(np.float16) if dtype == "float16" else patterns
    finite = raw[np.isfinite(h.Typed(raw, dtype).values)].reshape(-1, 16)
    count = len(finite) // rows * rows
    values = h.Typed(finite[:count], dtype)
    ones = h.Typed.of(np.eye(16), dtype)
    for first in range(0, count, rows * (1 if rows == 64 else 9)):
        x = values.view(lambda a, i=first: a[i : i + rows])
        assert np.array_equal(Case(dtype, x, ones).run(isa=isa).values, x.values)
    unit = h.Typed.of(np.eye(rows, 16), dtype)
    y = Case(dtype, unit, values).run(isa=isa).values
    assert np.array_equal(y[:16], values.values.T)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("mode", MODES)
def test_every_code_and_scale(mode, rows, isa):
    """All pairs of scale and element, NaN and infinity included, in every place of a group."""
    bits, group = ref.MODES[mode]
    codes = np.arange(1 << bits)
    scales = np.repeat(np.arange(256), len(codes)).astype(np.uint8)[:, None]
    for at in (0, 5, group - 1):
        w = np.zeros((len(scales), group), np.uint8)
        w[:, at] = np.tile(codes, 256)
        x = np.zeros((rows, group), np.float32)
        x[:, at] = 1.0
        case = Case(mode, h.Typed.of(x, "float32"), h.Typed(ref.pack(w, bits), "uint32"), h.Typed(scales, "uint8"))
        with np.errstate(over="ignore"):
            want = case.weights()[:, at].astype(np.float32)
        # A zero times the infinite or NaN weights beside it is NaN.
        want[~np.isfinite(case.weights()).all(axis=1)] = np.nan
        y = case.run(isa=isa).raw
        alone = np.isinf(want) | (np.abs(want) < 2.0**-126)
        assert np.array_equal(np.isnan(y[0]), np.isnan(want))
        assert np.array_equal(y[0][~alone], want[~alone], equal_nan=True)
        assert np.allclose(y[0][alone], want[alone], rtol=0, atol=2.0**-126, equal_nan=True)
        assert (y.view(np.uint32) == y[0].view(np.uint32)).all()


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_past_the_end_is_read(form, isa):
    """Every buffer ends at a page that must not be touched."""
    for rows, n, k, dtype in (
        (1, 1, 1, "float16"), (3, 9, 47, "float32"), (16, 5, 33, "bfloat16"), (1, 8, 384, "float32"),
        (19, 3, 80, "float16"), (40, 3, 17, "float16"), (33, 65, 300, "float32"),
    ):  # fmt: skip
        case = Case.random(rows, form, rows, n, k, dtype, dtype)
        kept = []
        for name in ("x", "w", "scales", "bias"):
            if (a := getattr(case, name)) is not None:
                copy, memory = cases.page_end(a.raw)
                kept.append(memory)
                setattr(case, name, h.Typed(copy, a.dtype))
        case.check(case.run(isa=isa))


def _wrong_words(case):
    case.w = case.w.view(lambda a: a[:, :-1])


def _wrong_scales(case):
    case.scales = case.scales.view(lambda a: a[:, :-1])


def _wrong_bias(case):
    case.bias = h.Typed.of(np.zeros(7), "float32")


def _wrong_dtype(case):
    case.w = h.Typed(case.w.raw.astype(np.uint32), "uint32")


@pytest.mark.parametrize(
    "form,change,message",
    [
        ("float32", _wrong_words, "last dimensions of x and W differ"),
        ("float32", _wrong_dtype, "dense W must be float"),
        ("float16", _wrong_bias, "bias must be"),
        ("mxfp4", _wrong_words, "k \\* bits / 32"),
        ("nvfp4", _wrong_scales, "scales must be uint8"),
        ("mxfp8", _wrong_bias, "bias must be"),
    ],
)
def test_what_does_not_fit_is_refused(form, change, message):
    case = Case.random(0, form, 2, 8, 64)
    change(case)
    with pytest.raises(ValueError, match=f"host_linear_matmul: .*{message}"):
        case.run()
