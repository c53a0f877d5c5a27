"""The kernel through its C ABI: accuracy, independence of rows and threads, strides, edges."""

import ctypes
import itertools
import mmap
import os

import numpy as np
import pytest
import t5_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from t5_cases import Case, seed_of
from t5_ternary import plugin, reference

from backend_core.testing import cpu_kernels as h

GROUPS = (64, 128)
ROWS = (*range(1, 18), 31, 33, 63, 65, 129)
DTYPES = list(itertools.product(cases.FLOATS, repeat=2))


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


@pytest.mark.parametrize("group", GROUPS)
def test_float64_bound(group, isa):
    """Every number of rows; n, k and dtypes vary with it."""
    for i, rows in enumerate(ROWS):
        n, k = (1, 24, 8, 37, 65, 40)[i % 6], group * (1, 5, 3, 2, 17)[i % 5]
        dtypes = DTYPES[seed_of(group, rows) % 9] if i % 2 else ("float32", "float16")
        case = Case.random(i, group, rows, n, k, dtypes, bias=i % 3 == 0)
        case.check(case.run(isa=isa, threads=2 if rows in (5, 129) else 1))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(GROUPS), st.integers(1, 40), st.integers(1, 50), st.integers(1, 9), st.sampled_from(DTYPES),
    st.booleans(), st.sampled_from(list(cases.isas().values())), st.integers(1, 3), st.floats(0, 1),
)  # fmt: skip
def test_any_problem(group, rows, n, groups, dtypes, bias, isa, threads, zeros):
    case = Case.random(rows, group, rows, n, group * groups, dtypes, bias, zeros)
    case.check(case.run(isa=isa, threads=threads))


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_dtypes(dtypes, isa):
    for rows in (1, 5, 33):
        case = Case.random(rows, 64, rows, 19, 192, dtypes, bias=True)
        case.check(case.run(isa=isa))


@pytest.mark.parametrize("group", GROUPS)
def test_every_byte_in_every_place(group, isa):
    """Against one-hot x: each output is a single weight, so that nothing averages out."""
    size = 13 * group // 64
    k = 2 * group
    for place in range(0, 2 * size, 1 if isa == cases.isas().get("avx512_vnni", cases.best()) else 5):
        digits = 5 if place % size < size - 1 else (3 if group == 128 else 4)
        codes = np.arange(3**digits)
        trits = np.ones((len(codes), k), np.uint8)
        first = place // size * group + place % size * 5
        for i in range(digits):
            trits[:, first + i] = codes // 3**i % 3
        x = np.zeros((digits, k), np.float32)
        x[range(digits), range(first, first + digits)] = 1
        w = h.Typed(reference.pack(trits, group), "uint8")
        case = Case(h.Typed(x, "float32"), w, h.Typed.of(np.full((len(codes), 2), 0.5), "float16"), group)
        want = np.array([codes // 3**i % 3 - 1.0 for i in range(digits)]) * 0.5
        assert np.array_equal(case.run(isa=isa).raw, want)
        # Fixed point, which one-hot rows do not fit.
        noise = np.random.default_rng(place).standard_normal((digits, k))
        case.x = h.Typed.of(noise, "float16")
        case.check(case.run(isa=isa))


@pytest.mark.parametrize(
    "k,group", [(64, 64), (128, 128), (320, 64), (1152, 128), (9856, 128), (33792, 128), (17024, 64)]
)
def test_depths(k, group, isa):
    """k that is no multiple of any block, and k beyond one block of x or of scales."""
    for rows in (1, 3, 16, 18):
        case = Case.random(k, group, rows, 5 if k > 5000 else 11, k)
        case.check(case.run(isa=isa))


def test_equal_terms_do_not_drift(isa):
    """All terms equal: each addition to a partial sum rounds the same way."""
    for rows, k in ((1, 16384), (16, 4096), (17, 256), (17, 4096)):
        case = Case.random(0, 128, rows, 3, k)
        case.w = h.Typed(reference.pack(np.full((3, k), 2), 128), "uint8")
        for value in (1.0 + 2.0**-23, 1.3333334, 1.7):
            case.x = h.Typed.of(np.full((rows, k), value), "float32")
            case.scales = h.Typed.of(np.ones_like(case.scales.raw), "float32")
            case.check(case.run(isa=isa))


@pytest.mark.parametrize("group", GROUPS)
def test_rows_do_not_depend_on_each_other(group, isa):
    for n, k, dtypes in (
        (37, group * 5, ("float16", "float16")), (8, group * 2, ("bfloat16", "float16")),
        (45, 1152, ("float32", "float32")),
    ):  # fmt: skip
        case = Case.random(n, group, 16, n, k, dtypes, bias=True)
        # Some rows do not fit fixed point.
        case.x.raw[3, 5] = h.Typed.of(np.array([3e4]), dtypes[0]).raw[0]
        case.x.raw[9] = 0
        single = [case.run(isa=isa, x=case.x.view(lambda a, i=i: a[i : i + 1])).raw for i in range(16)]
        alone = np.concatenate(single).view(np.uint8)
        for rows in range(2, 17):
            for first in (0, 16 - rows):
                part = case.x.view(lambda a, a0=first, m=rows: a[a0 : a0 + m])
                y = case.run(isa=isa, x=part, threads=1 + rows % 2).raw
                assert np.array_equal(y.view(np.uint8), alone[first : first + rows]), (rows, first)


def test_outputs_do_not_depend_on_n(isa):
    """A matrix cut off anywhere gives the bits of the whole, as long as what is known of its weights is the same."""
    for rows in (1, 3, 7, 16):
        case = Case.random(rows, 64, rows, 40, 320)
        params = case.params(isa)
        whole = case.run(isa=isa).raw
        for n in (1, 2, 7, 8, 9, 24, 39):
            y = h.Typed.blank((rows, n), "float32")
            inputs = [case.x, case.w.view(lambda a, n=n: a[:n]), case.scales.view(lambda a, n=n: a[:n])]
            h.call(cases.library(), plugin.SYMBOL, inputs, y, params, isa=isa)
            assert np.array_equal(y.raw, whole[:, :n]), (rows, n)


@pytest.mark.parametrize("rows,n,k", [(1, 600, 1024), (7, 600, 1024), (16, 301, 2048), (65, 200, 320), (300, 70, 128)])
def test_threads_do_not_change_bits(rows, n, k, isa):
    if isa == 0:
        n //= 2
    case = Case.random(rows, 64, rows, n, k)
    one = case.run(isa=isa).raw
    for threads in (2, 3, 8):
        assert np.array_equal(case.run(isa=isa, threads=threads).raw, one)


@pytest.mark.parametrize("rows", [6, 40])
def test_strides_of_x(rows, isa):
    rng = np.random.default_rng(rows)
    for dtype in cases.FLOATS:
        big = h.Typed.of(rng.standard_normal((rows, 2, 260)), dtype)
        case = Case.random(rows, 64, rows, 21, 128, (dtype, "float32"))
        for change in (
            lambda a: a[:, 1, 3:131],
            lambda a: a[:, 0, ::2][:, :128],
            lambda a: a[::-1, 0, 127::-1],
            lambda a: a[: rows // 2, :, :128].transpose(1, 0, 2),
            lambda a: np.broadcast_to(a[0, 0, :128], (rows, 128)),
            lambda a: a[0, 0, :128],
        ):
            x = big.view(change)
            case.check(case.run(isa=isa, x=x), x)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_strides_of_weights(rows, isa):
    case = Case.random(rows, 128, rows, 21, 384, bias=True)
    w, s, b = case.w.raw, case.scales.raw, case.bias.raw
    want = case.run(isa=isa).raw
    wide_w = np.full((42, 100), 250, np.uint8)
    wide_w[::2, 9:87] = w
    columns = np.asfortranarray(w)
    for change in (lambda a: wide_w[::2, 9:87], lambda a: columns, lambda a: w[::-1].copy()[::-1]):
        case.w = h.Typed(change(w), "uint8")
        assert np.array_equal(case.run(isa=isa).raw, want)
    case.w = h.Typed(w, "uint8")
    wide_s = np.full((21, 6), 77, s.dtype)
    wide_s[:, ::2] = s
    case.scales = h.Typed(wide_s[:, ::2], "float16")
    case.bias = h.Typed(np.repeat(b, 3)[::3], "float16")
    assert np.array_equal(case.run(isa=isa).raw, want)


def page_end(a: np.ndarray):
    """A copy of `a` that ends right before a page that faults on any access; and the mapping, to be kept."""
    size = os.sysconf("SC_PAGE_SIZE")
    pages = (a.nbytes + size - 1) // size
    memory = mmap.mmap(-1, (pages + 1) * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * size), ctypes.c_size_t(size), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(memory, a.dtype, a.size, pages * size - a.nbytes).reshape(a.shape)
    copy[...] = a
    return copy, memory


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_is_read_beyond_the_arrays(group, isa):
    keep = []
    for rows, n, groups in ((1, 3, 1), (5, 9, 3), (16, 8, 5), (20, 17, 2)):
        case = Case.random(rows, group, rows, n, group * groups, ("float16", "float16"), bias=True)
        want = case.run(isa=isa).raw
        for name in ("x", "w", "scales", "bias"):
            typed = getattr(case, name)
            copy, memory = page_end(typed.raw)
            keep.append(memory)
            setattr(case, name, h.Typed(copy, typed.dtype))
        assert np.array_equal(case.run(isa=isa).raw, want)


def test_nan_and_infinity_stay_where_they_are(isa):
    case = Case.random(3, 128, 4, 20, 512, ("float32", "float32"), zeros=0.0)
    case.x.raw[1, 7] = np.inf
    case.x.raw[2, 9] = np.nan
    case.scales.raw[5, 2] = np.nan
    y = case.run(isa=isa).raw
    assert np.isnan(y[:, 5]).all() and np.isnan(y[2]).all()
    rest = np.delete(np.arange(20), 5)
    assert np.isfinite(y[[0, 3]][:, rest]).all() and np.isinf(y[1, rest]).all()


def test_outliers(isa):
    """Rows whose largest number dwarfs the others, most of all where it meets a weight of zero."""
    for size, k, zeros in itertools.product((1e1, 1e3, 1e5, 1e7, 1e20), (128, 4096), (0.1, 0.5, 0.9)):
        case = Case.random(k, 128, 4, 16, k, ("float32", "float32"), zeros=zeros)
        trits = reference.unpack(case.w.raw, 128)
        trits[:, 5] = 1
        case.w = h.Typed(reference.pack(trits, 128), "uint8")
        x = case.x.raw.copy()
        x[1, 5] = size
        x[2, 5::128] = size
        x[3] *= np.exp(np.random.default_rng(k).normal(0, np.log10(size), k))
        case.x = h.Typed(x.astype(np.float32), "float32")
        case.check(case.run(isa=isa))


@pytest.mark.parametrize("group", GROUPS)
def test_facts(group):
    case = Case.random(1, group, 1, 5, 512, zeros=0.4)
    w = np.abs(case.weights())
    spread, zeros = case.facts()
    assert spread == pytest.approx((np.sqrt((w**2).mean(1)) / w.mean(1)).max(), rel=1e-4)
    assert zeros == pytest.approx((w == 0).mean(1).max(), abs=1e-6)
    case.scales.raw[2, 1] = np.inf
    assert case.facts()[0] == np.inf


def test_all_zero_and_empty(isa):
    case = Case.random(0, 128, 3, 9, 256, zeros=1.0)
    assert not case.run(isa=isa).raw.any()
    case = Case.random(0, 128, 3, 9, 256)
    case.x = h.Typed(np.zeros_like(case.x.raw), "float32")
    assert not case.run(isa=isa).raw.any()
    for rows, n in ((0, 5), (3, 0)):
        case = Case.random(0, 128, rows, n, 256)
        assert case.run(isa=isa).raw.shape == (rows, n)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c: setattr(c, "group", 32), "group_size must be 64 or 128"),
        (lambda c: setattr(c, "w", c.w.view(lambda a: a[:, :25])), r"W must be uint8 \(n, k / 64 \* 13\)"),
        (lambda c: setattr(c, "scales", c.scales.view(lambda a: a[:2])), "scales must be"),
        (lambda c: setattr(c, "x", c.x.view(lambda a: a[:, :100])), "multiple of group_size"),
        (lambda c: setattr(c, "bias", h.Typed(np.zeros(3, np.float32), "float32")), "bias must be"),
        (lambda c: setattr(c, "scales", h.Typed(np.zeros((9, 2), np.uint8), "uint8")), "must be float32, float16"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    case = Case.random(0, 128, 1, 9, 256)
    change(case)
    with pytest.raises(ValueError, match=message):
        case.run(isa=0)
