"""The kernel through its C ABI: accuracy, independence of rows and threads, masks, strides, edges."""

import itertools

import cider_cases as cases
import numpy as np
import pytest
from cider_cases import Case, seed_of
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_core.testing import cpu_kernels as h

DTYPES = list(itertools.product(cases.FLOATS, repeat=3))
KEYS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025)
ROWS = (*range(1, 18), 33, 64, 65)
RATIOS = (1, 2, 3, 4, 8, 16)
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512), (80, 72), (7, 5), (1, 1),
        (33, 100))  # fmt: skip
MASKS = (None, "causal", "bool", "window", "additive")


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


def same(a, b):
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("keys", KEYS)
def test_numbers_of_keys(keys, isa):
    for i, rows in enumerate((1, 3, 16, 17, 65)):
        if rows > keys or (isa == 0 and rows * keys > 20000):
            continue
        mask = MASKS[(i + keys) % 5]
        dtypes = DTYPES[seed_of(keys, rows) % 27]
        case = Case.random(keys + rows, 1, 6, 2, rows, keys, 64, 48, dtypes, mask, sinks=i % 2 == 0)
        case.check(case.run(isa=isa, threads=1 + i % 2))


@pytest.mark.parametrize("rows", ROWS)
def test_numbers_of_rows(rows, isa):
    for i, mask in enumerate(MASKS):
        ratio = RATIOS[(rows + i) % 6]
        if isa == 0 and rows * ratio > 200:
            continue
        case = Case.random(rows, 1 + i % 2, ratio, 1 + i % 2 if ratio % 2 == 0 else 1, rows, 130 + rows, 40, mask=mask)
        case.check(case.run(isa=isa))


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios(ratio, isa):
    for rows, mask in ((1, None), (4, "causal"), (20, "causal")):
        case = Case.random(ratio, 2, 2 * ratio, 2, rows, 140, 32, mask=mask, dtypes=("float32", "float16", "float16"))
        case.check(case.run(isa=isa))


@pytest.mark.parametrize("d,dv", DIMS)
def test_head_dims(d, dv, isa):
    for rows, dtypes in ((1, ("float32",) * 3), (5, ("float32", "bfloat16", "float16")), (18, ("float16",) * 3)):
        case = Case.random(d, 1, 4, 2, rows, 70, d, dv, dtypes, "causal")
        case.check(case.run(isa=isa))


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_dtypes(dtypes, isa):
    for rows, mask in ((1, None), (4, "additive"), (33, "window")):
        case = Case.random(rows, 1, 3, 1, rows, 150, 64, 64, dtypes, mask, sinks=rows == 4)
        case.check(case.run(isa=isa))


def test_long_context(isa):
    for rows in (1, 4) if isa else (1,):
        case = Case.random(rows, 1, 3, 1, rows, 4097, 64, mask="causal", dtypes=("float32", "float16", "float16"))
        case.check(case.run(isa=isa, threads=2))


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 3), st.sampled_from(RATIOS), st.integers(1, 40), st.integers(1, 200),
    st.integers(1, 70), st.integers(1, 70), st.sampled_from(DTYPES), st.sampled_from(MASKS), st.booleans(),
    st.sampled_from(list(cases.isas().values())), st.integers(1, 3), st.floats(0, 30),
)  # fmt: skip
def test_any_problem(b, hkv, ratio, rows, keys, d, dv, dtypes, mask, sinks, isa, threads, spread):
    case = Case.random(keys, b, hkv * ratio, hkv, rows, keys, d, dv, dtypes, mask, sinks, spread)
    case.check(case.run(isa=isa, threads=threads))


@pytest.mark.parametrize("mask", ["causal", None, "bool", "window", "additive"])
def test_rows_do_not_depend_on_each_other(mask, isa):
    """Verifying rows together gives the bits of single steps, each with the keys that it sees."""
    shapes = [(2, 1, 64, 96), (3, 3, 127, 64), (6, 2, 129, 80), (8, 1, 300, 32), (5, 5, 17, 128), (16, 1, 260, 33)]
    for i, (hq, hkv, keys, d) in enumerate(shapes):
        if isa == 0 and hq > 6:
            continue
        dtypes = (("float32", "float16", "float16"), ("float32",) * 3, ("bfloat16",) * 3)[i % 3]
        whole = Case.random(i, 1 + i % 2, hq, hkv, 16, keys, d, dtypes=dtypes, mask=mask, sinks=i % 2 == 1, spread=3.0)
        alone = [whole.row(j).run(isa=isa).raw for j in range(16)]
        for rows in (2, 3, 5, 8, 13, 16):
            # The last `rows` of the sixteen, with all keys.
            part = whole.change(q=whole.q.view(lambda a, m=rows: a[:, :, 16 - m :]))
            if isinstance(mask, str) and mask != "causal":
                part.mask = whole.mask.view(lambda a, m=rows: a[..., 16 - m :, :])
            y = part.run(isa=isa, threads=1 + rows % 2).raw
            for j in range(rows):
                assert same(np.ascontiguousarray(y[:, :, j : j + 1]), alone[16 - rows + j]), (hq, hkv, rows, j)


def test_hidden_keys_at_the_end_change_nothing(isa):
    """A bool mask over a cache that is longer than what is seen gives the bits of the short cache."""
    for rows, keys in ((1, 130), (3, 200), (7, 64)):
        case = Case.random(keys, 1, 4, 2, rows, 400, 64, spread=2.0)
        shown = np.zeros((rows, 400), bool)
        shown[:, :keys] = True
        long = case.change(mask=h.Typed(shown, "bool")).run(isa=isa).raw
        cut = case.change(k=case.k.view(lambda a, n=keys: a[:, :, :n]), v=case.v.view(lambda a, n=keys: a[:, :, :n]))
        assert same(cut.run(isa=isa).raw, long)


def test_causally_hidden_values_do_not_matter(isa):
    """NaN in the draft's later keys and values reaches later rows only."""
    case = Case.random(3, 1, 3, 1, 5, 100, 64, mask="causal")
    want = case.run(isa=isa).raw
    for a in (case.k, case.v):
        a.raw[:, :, -1] = np.nan
    got = case.run(isa=isa).raw
    assert np.array_equal(got[:, :, :4], want[:, :, :4]) and np.isnan(got[:, :, 4]).all()


@pytest.mark.parametrize("rows,keys,mask", [(1, 1030, None), (5, 700, "causal"), (16, 300, "bool"), (70, 200, "causal"),
                                            (40, 300, "window"), (100, 130, None)])  # fmt: skip
def test_threads_do_not_change_bits(rows, keys, mask, isa):
    case = Case.random(rows, 2, 6, 2, rows, keys, 64, mask=mask, dtypes=("float32", "float16", "bfloat16"))
    if isa == 0:
        case = Case.random(rows, 1, 2, 1, rows, keys, 64, mask=mask)
    one = case.run(isa=isa)
    case.check(one)
    for threads in range(2, 9):
        assert same(case.run(isa=isa, threads=threads).raw, one.raw)


@pytest.mark.parametrize("rows", [1, 6, 20])
def test_strides(rows, isa):
    """Caches are slices of larger buffers; queries are transposed; elements may even lie apart or backwards."""
    rng = np.random.default_rng(rows)
    d, n = 48, 150
    q = h.Typed.of(rng.standard_normal((2, 6, rows, d)), "float32")
    for dtype in ("float32", "float16", "bfloat16"):
        k = h.Typed.of(rng.standard_normal((2, 2, n, d)), dtype)
        v = h.Typed.of(rng.standard_normal((2, 2, n, d)), dtype)
        plain = Case(q, k, v, 0.2, "causal")
        want = plain.run(isa=isa)
        plain.check(want)

        def inside(a):
            big = np.full((a.shape[0], a.shape[1], a.shape[2] + 106, a.shape[3] + 7), 7, a.dtype)
            view = big[:, :, 3 : 3 + a.shape[2], 5 : 5 + a.shape[3]]
            view[...] = a
            return view

        def turned(*axes):
            back = np.argsort(axes)
            return lambda a: np.ascontiguousarray(a.transpose(axes)).transpose(back)

        layouts = {
            "cache": (lambda a: a, inside, inside),
            "heads last": (turned(0, 2, 1, 3), turned(0, 2, 1, 3), turned(0, 2, 1, 3)),
            "elements apart": (turned(0, 1, 3, 2), turned(3, 2, 1, 0), turned(0, 1, 3, 2)),
            "backwards": (lambda a: a[..., ::-1].copy()[..., ::-1],) * 3,
            "reversed keys": (inside, lambda a: a[:, :, ::-1].copy()[:, :, ::-1], inside),
        }
        for name, (fq, fk, fv) in layouts.items():
            case = Case(q.view(fq), k.view(fk), v.view(fv), 0.2, "causal")
            assert same(case.run(isa=isa).raw, want.raw), name
    shared = Case(q, k.view(lambda a: np.broadcast_to(a[:1, :1], a.shape)), v, 0.2)
    shared.check(shared.run(isa=isa))


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_masks_broadcast(rows, isa):
    rng = np.random.default_rng(0)
    b, hq, keys = 2, 4, 140
    base = Case.random(1, b, hq, 2, rows, keys, 32)
    few = [(), (1,), (keys,), (rows, 1), (1, keys), (hq, 1, 1)]
    for shape in (*few, *itertools.product((1, b), (1, hq), (1, rows), (1, keys))):
        for values in (rng.random(shape) < 0.7, rng.standard_normal(shape)):
            values = np.asarray(values)
            mask = h.Typed(values, "bool") if values.dtype == bool else h.Typed.of(values, "float32")
            case = base.change(mask=mask)
            case.check(case.run(isa=isa))
    wide = h.Typed(rng.random((rows, 2 * keys)) < 0.5, "bool").view(lambda a: a[:, ::2])
    case = base.change(mask=wide)
    case.check(case.run(isa=isa))


@pytest.mark.parametrize("rows", [2, 20])
def test_rows_that_see_nothing(rows, isa):
    case = Case.random(0, 1, 4, 2, rows, 150, 32, mask="bool")
    case.mask.raw[:, :, 1] = False
    mean = np.repeat(case.v.values.mean(axis=2), 2, axis=1)
    y = case.run(isa=isa)
    case.check(y)
    assert np.abs(y.values[:, :, 1] - mean).max() < 1e-5
    with_sinks = case.change(sinks=h.Typed.of(np.full(4, -200.0), "float32"))
    y = with_sinks.run(isa=isa)
    with_sinks.check(y)
    assert (y.values[:, :, 1] == 0).all()
    extra = np.zeros((rows, 150), np.float32)
    extra[1] = -np.inf
    additive = case.change(mask=h.Typed(extra, "float32"))
    y = additive.run(isa=isa)
    additive.check(y)
    assert np.isnan(y.values[:, :, 1]).all() and not np.isnan(y.values[:, :, 0]).any()
    short = Case.random(1, 1, 4, 2, rows, rows - 1, 32, mask="causal")  # fewer keys than rows
    short.check(short.run(isa=isa))


@pytest.mark.parametrize("rows", [1, 5, 18])
def test_nan_and_inf(rows, isa):
    for where in ("q", "k", "v"):
        for value in (np.nan, np.inf, -np.inf):
            case = Case.random(rows, 1, 3, 1, rows, 140, 16)
            a = getattr(case, where).raw
            a[0, 0, 0, 3] = value
            y = case.run(isa=isa).values
            q, k, v = case.q.values, case.k.values, case.v.values
            with np.errstate(all="ignore"):
                s = np.float32(case.scale) * q @ np.swapaxes(k, -1, -2)
                p = np.exp(s - s.max(axis=-1, keepdims=True))
                want = (p / p.sum(axis=-1, keepdims=True)) @ v
            assert np.array_equal(np.isnan(y), np.isnan(want)), (where, value)
            assert np.array_equal(np.isinf(y), np.isinf(want)), (where, value)


def test_extreme_scores(isa):
    """Scores far apart, equal, huge and tiny; weights that underflow count as nothing."""
    for rows in (1, 17):
        for spread in (0.0, 1e-30, 50.0, 1e4):
            case = Case.random(rows, 1, 2, 1, rows, 300, 32, spread=spread)
            case.check(case.run(isa=isa))
        case = Case.random(rows, 1, 2, 1, rows, 130, 32)
        for scale in (0.0, -2.0):
            other = case.change(scale=scale)
            other.check(other.run(isa=isa))
        rising = np.arange(130, dtype=np.float32) * 40 - 3000
        other = case.change(mask=h.Typed(rising, "float32"))
        other.check(other.run(isa=isa))
        other = case.change(mask=h.Typed(rising[::-1].copy(), "float32"))
        other.check(other.run(isa=isa))


@pytest.mark.parametrize("rows", [1, 17])
def test_exponential(rows, isa):
    """Of two keys with scores 0 and x the second has weight e^x / (1 + e^x): what e^x is off by shows in full."""
    n = 400
    x = -np.sort(np.random.default_rng(0).uniform(0.0, 86.0, n)).astype(np.float32)
    x[:3] = -1e-8, -0.34657359, -0.0
    q = h.Typed.of(np.ones((n, 1, rows, 1)), "float32")
    k = h.Typed.of(np.stack([np.zeros(n), x], axis=1).reshape(n, 1, 2, 1), "float32")
    v = h.Typed.of(np.tile(np.float32([0, 1]), n).reshape(n, 1, 2, 1), "float32")
    y = Case(q, k, v, 1.0).run(isa=isa).values[..., 0].astype(np.float64)
    e = np.exp(x.astype(np.float64))[:, None, None]
    assert np.abs(y * (1 + e) / e - 1).max() <= 3.5 * 2.0**-23
    assert np.abs(y[x < -20] / e[x < -20] - 1).max() <= 2 * 2.0**-23


def test_float16_overflow_is_inf(isa):
    case = Case.random(0, 1, 1, 1, 1, 20, 16, dtypes=("float16", "float16", "float32"))
    case.v.raw[...] = 1e6
    case = case.change(v=h.Typed.of(case.v.raw, "float16"))
    assert np.isinf(case.run(isa=isa).values).all()


def test_empty(isa):
    for mask in (None, "causal"):
        for sinks in (False, True):
            case = Case.random(0, 1, 2, 1, 3, 0, 8, mask=mask, sinks=sinks)
            assert (case.run(isa=isa).values == 0).all()
    for b, rows, dv in ((0, 2, 8), (1, 0, 8), (1, 2, 0)):
        assert Case.random(0, b, 2, 1, rows, 5, 8, dv).run(isa=isa).raw.size == 0


@pytest.mark.parametrize("rows", [1, 12, 17])
def test_nothing_beyond_the_arrays_is_read(rows, isa):
    for dtypes in (("float32",) * 3, ("float16",) * 3, ("bfloat16",) * 3):
        case = Case.random(rows, 1, 4, 2, rows, 65, 37, 21, dtypes, "bool", sinks=True)
        want = case.run(isa=isa).raw
        keep = []
        for name in ("q", "k", "v", "mask", "sinks"):
            a = getattr(case, name)
            copy, memory = cases.page_end(a.raw)
            keep.append(memory)
            setattr(case, name, h.Typed(copy, a.dtype))
        assert same(case.run(isa=isa).raw, want)


def test_wrong_calls_are_refused():
    good = Case.random(0, 1, 4, 2, 2, 5, 8)
    y = h.Typed(np.zeros((1, 4, 2, 8), np.float32), "float32")

    def refuse(match, inputs=None, out=y, params=(1.0, 0, 0)):
        with pytest.raises(ValueError, match=match):
            h.call(cases.library(), "cider_attention", inputs or [good.q, good.k, good.v], out, list(params), isa=0)

    refuse("parameters", params=(1.0,))
    refuse("mask must be 0", params=(1.0, 3, 0))
    refuse("expects inputs", params=(1.0, 2, 0))
    refuse("four dimensions", [good.q.view(lambda a: a[0]), good.k, good.v])
    refuse("k must be", [good.q, good.k.view(lambda a: a[..., :4]), good.v])
    refuse("v must be", [good.q, good.k, good.v.view(lambda a: a[:, :, :4])])
    refuse("multiple", [good.q.view(lambda a: a[:, :3]), good.k, good.v], h.Typed(y.raw[:, :3].copy(), "float32"))
    refuse("y must be", out=h.Typed(np.zeros((1, 4, 2, 7), np.float32), "float32"))
    refuse("broadcast", [good.q, good.k, good.v, h.Typed(np.ones((2, 4), bool), "bool")], params=(1.0, 2, 0))
    refuse("sinks", [good.q, good.k, good.v, h.Typed(np.ones(3, np.float32), "float32")], params=(1.0, 0, 1))
    refuse("float32, float16", [good.q, good.k, h.Typed(np.ones((1, 2, 5, 8), bool), "bool")])
