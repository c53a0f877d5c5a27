"""The kernels through their C ABI: accuracy, independence of rows and threads, strides, edges."""

import host_ops_cases as cases
import numpy as np
import pytest
from host_ops_cases import FLOATS, OPS, Case, same_bits, seed_of
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_core.testing import cpu_kernels as h

ROWS = (*range(1, 18), 63, 64, 65, 127, 129)
DIMS = (1, 7, 16, 63, 64, 576, 577)
DTYPES = [(a, b, c) for a in FLOATS for b in FLOATS for c in FLOATS]
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 1e30, -1e30, 3e38, -3e38]


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


@pytest.mark.parametrize("name", OPS)
def test_float64_bound(name, isa):
    """Every number of rows with some length, and every length with some number of rows; dtypes vary."""
    shapes = [(rows, DIMS[i % 7]) for i, rows in enumerate(ROWS)] + [(1 + i % 3, n) for i, n in enumerate(DIMS)]
    for i, shape in enumerate(shapes):
        dtypes = DTYPES[seed_of(name, shape, isa) % 27] if i % 2 else ("float32",) * 3
        case = Case.random(name, shape, dtypes)
        case.check(case.run(isa, threads=1 + i % 2), (shape, dtypes))


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("name", OPS)
def test_dtypes(name, dtypes):
    case = Case.random(name, (3, 77), dtypes)
    case.check(case.run())


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(list(OPS)), st.integers(1, 5), st.integers(1, 1100), st.sampled_from(DTYPES),
    st.sampled_from(list(cases.isas().values())), st.integers(1, 3), st.sampled_from([1e-3, 1.0, 50.0, 1e4]),
)  # fmt: skip
def test_any_problem(name, rows, n, dtypes, isa, threads, size):
    case = Case.random(name, (rows, n), dtypes, size)
    case.check(case.run(isa, threads))


@pytest.mark.parametrize("name", OPS)
def test_shapes(name, isa):
    """One dimension, several batches, no rows."""
    for shape in ((40,), (2, 3, 40), (2, 1, 3, 17), (0, 40), (2, 0, 3, 5)):
        case = Case.random(name, shape)
        case.check(case.run(isa), shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPS)
def test_strides(name, dtype):
    """Views give the bits of their copies."""
    whole = Case.random(name, (4, 6, 80), (dtype,) * 3)
    views = (
        lambda a: a[:, 1],
        lambda a: a[::2, ::-1],
        lambda a: a[..., ::2],
        lambda a: a[..., ::-1],
        lambda a: a[..., 13:70],
        lambda a: a.transpose(1, 0, 2),
        lambda a: a.transpose(2, 0, 1),
        lambda a: np.broadcast_to(a[:1], (3, 6, 80)),
        lambda a: np.broadcast_to(a[..., :1], (4, 6, 33)),
    )
    for i, change in enumerate(views):
        view = whole.viewed(change)
        n = view.arrays[0].raw.shape[-1]
        view.vectors = [h.Typed(np.resize(v.raw, n), v.dtype) for v in whole.vectors]
        copy = view.with_arrays(*(h.Typed(np.ascontiguousarray(a.raw), a.dtype) for a in view.arrays))
        out = view.run()
        view.check(out, i)
        assert same_bits(out, copy.run()), i


def test_inputs_with_different_strides(isa):
    for name in ("swiglu", "residual", "residual_rms_norm"):
        case = Case.random(name, (6, 5, 40))
        turned = h.Typed(np.ascontiguousarray(case.arrays[1].raw.transpose(1, 0, 2)).transpose(1, 0, 2), "float32")
        assert same_bits(case.with_arrays(case.arrays[0], turned).run(isa), case.run(isa))


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].vectors])
def test_parameters_with_strides(name):
    case = Case.random(name, (3, 40), ("float16",) * 3)
    strided = [h.Typed(np.repeat(v.raw, 3)[::3], v.dtype) for v in case.vectors]
    assert same_bits(Case(case.op, case.arrays, strided).run(), case.run())


@pytest.mark.parametrize("name", OPS)
def test_rows_do_not_depend_on_each_other(name, isa):
    for n, dtype in ((577, "float32"), (64, "float16"), (7, "bfloat16")):
        case = Case.random(name, (65, n), (dtype,) * 3)
        alone = [case.viewed(lambda a, i=i: a[i : i + 1]).run(isa) for i in range(17)]
        for rows in (2, 3, 5, 16, 17, 65):
            out = case.viewed(lambda a, m=rows: a[:m]).run(isa, threads=1 + rows % 2)
            for i in range(min(rows, 17)):
                assert same_bits([y.view(lambda a, i=i: a[i : i + 1]) for y in out], alone[i]), (rows, i)


@pytest.mark.parametrize("name", OPS)
def test_threads_do_not_change_bits(name, isa):
    for shape in ((3, 40000), (300, 300)):
        case = Case.random(name, shape)
        one = case.run(isa)
        for threads in (2, 3, 8):
            assert same_bits(case.run(isa, threads), one)


def test_decode_does_not_wake_the_pool():
    x, y = h.Typed.of(np.ones((1, 576)), "float32"), h.Typed.blank((1, 576), "float32")
    assert h.call(str(cases.library()), "host_ops_rms_norm", [x], [y], [1e-5], threads=8, isa=cases.best()) == 0
    x, y = h.Typed.of(np.ones((512, 576)), "float32"), h.Typed.blank((512, 576), "float32")
    assert h.call(str(cases.library()), "host_ops_rms_norm", [x], [y], [1e-5], threads=8, isa=cases.best()) > 8


@pytest.mark.parametrize("name", OPS)
def test_memory_outside_is_left_alone(name, isa):
    keep = []

    def guarded(a):
        copy, memory = cases.page_end(a)
        keep.append(memory)
        return copy

    for n, dtype in ((1, "float32"), (15, "float32"), (577, "float32"), (33, "bfloat16"), (7, "float16")):
        case = Case.random(name, (3, n), (dtype,) * 3)
        bound = Case(case.op, [a.view(guarded) for a in case.arrays], [v.view(guarded) for v in case.vectors])
        assert same_bits(bound.run(isa), case.run(isa))


# Numbers at the edges


@pytest.mark.parametrize("name", cases.ELEMENTWISE)
def test_functions_over_the_whole_range(name, isa):
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            SPECIAL, [-88.7, -103.9, -104.5, -108.6, -126, -127, 88.7, 126, 127, 9.01, 10, 11, 0.5625, 15, -14.4, -15],
            rng.uniform(-130, 130, 4000), rng.normal(0, 2, 3000), rng.uniform(-1e-3, 1e-3, 500),
            np.sign(rng.normal(size=1500)) * np.exp(rng.uniform(-100, 88, 1500)),
        ]
    )  # fmt: skip
    gate = h.Typed.of(x, "float32")
    case = Case.random(name, x.shape)
    with np.errstate(all="ignore"):
        case.arrays[0] = gate
        case.check(case.run(isa))


@pytest.mark.parametrize("name", cases.ELEMENTWISE)
def test_negative_infinity_and_nan(name, isa):
    """As in stock: -inf times 0 is NaN, but a cap keeps it, and limits and squares make numbers of infinities."""
    case = Case.random(name, (3,))
    case.arrays[0] = h.Typed.of(np.array([np.nan, -np.inf, np.inf]), "float32")
    y = case.run(isa)[0].values
    assert np.isnan(y[0])
    low = {"softcap": -cases.CAP, "relu2": 0.0}
    assert y[1] == low[name] if name in low else np.isnan(y[1])
    if name == "softcap":
        assert y[2] == cases.CAP
    else:
        assert np.isfinite(y[2]) if name == "swiglu_oai" else np.isinf(y[2])


def test_half_precision_overflows_to_infinity(isa):
    big = h.Typed.of(np.array([[60000.0, -60000.0, 1.0]]), "float16")
    for name in ("residual", "swiglu"):
        y = Case.random(name, (1, 3), ("float16",) * 3).with_arrays(big, big).run(isa)[0].values
        assert y[0, 0] == np.inf and abs(y[0, 2]) < 3
    case = Case.random("rms_norm", (1, 3), ("float16",) * 3).with_arrays(big)
    case.vectors = [h.Typed.of(np.full(3, 60000.0), "float16")]
    y = case.run(isa)[0].values
    assert y[0, 0] == np.inf and y[0, 1] == -np.inf and 0 < y[0, 2] < 10


def test_nan_stays_nan_when_rounded(isa):
    """Whatever its bits: rounding them as those of a number could give 0."""
    bits = np.tile(np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32), 10)
    x = h.Typed(bits.view(np.float32), "float32")
    for dtype in FLOATS:
        out = h.Typed.blank((40,), dtype)
        h.call(str(cases.library()), "host_ops_residual", [x, x], [out], [], isa=isa)
        assert np.isnan(out.values).all()


def test_norms_of_huge_tiny_and_odd_rows(isa):
    for name in ("rms_norm", "layer_norm", "residual_rms_norm"):
        for value in (1e-31, 1e-20, 1e15, 1e30, 1e37):
            case = Case.random(name, (2, 65))
            scaled = [h.Typed.of(a.values * value, "float32") for a in case.arrays]
            case = case.with_arrays(*scaled)
            case.check(case.run(isa), (name, value))
    x = np.ones((4, 33), np.float32)
    x[0, 3], x[1, 3], x[2, 3] = np.nan, np.inf, -np.inf
    for name in ("rms_norm", "layer_norm"):
        case = Case.random(name, (4, 33)).with_arrays(h.Typed(x, "float32"))
        y = case.run(isa)[0].values
        assert np.isnan(y[0]).all() and np.isfinite(y[3]).all()
        finite = np.delete(y[1], 3)
        assert np.isnan(y[1, 3]) and (np.isnan(finite).all() if name == "layer_norm" else (finite == 0).all())


def test_layer_norm_far_from_zero(isa):
    """A mean much larger than the deviation does not cost accuracy."""
    for mean in (1e2, 1e4, 1e6):
        case = Case.random("layer_norm", (3, 200))
        case.arrays[0] = h.Typed.of(case.arrays[0].values + mean, "float32")
        case.check(case.run(isa), mean)


def test_sums_of_equal_terms_do_not_drift(isa):
    for name in ("rms_norm", "layer_norm", "logsumexp", "softmax"):
        for value in (1.0 + 2.0**-23, 1.3333334, 1.7):
            case = Case.random(name, (1, 60000)).with_arrays(h.Typed.of(np.full((1, 60000), value), "float32"))
            case.check(case.run(isa), (name, value))


@pytest.mark.parametrize("dtype", FLOATS)
def test_logits_with_nan_and_infinity(dtype, isa):
    for n in (5, 40, 9000):
        x = np.random.default_rng(n).normal(0, 5, (9, n))
        x[1, n // 2] = np.nan
        x[2, n - 1] = np.inf
        x[3, :] = -np.inf
        x[4, 1], x[4, 3] = np.inf, np.nan
        x[5, :2] = -np.inf
        x[6, 0], x[6, 4] = np.nan, np.nan
        x[7, : n - 1] = -np.inf
        x[8, :] = np.nan
        case = Case.random("logsumexp", (9, n), (dtype,) * 3).with_arrays(h.Typed.of(x, dtype))
        case.check(case.run(isa))
        assert np.isnan(case.run(isa)[0].values[[1, 4, 6, 8], 0]).all()
        soft = Case(OPS["softmax"], case.arrays, [])
        soft.check(soft.run(isa))
        largest = Case(OPS["argmax"], case.arrays, []).run(isa)[0].values
        assert list(largest[[1, 2, 3, 4, 6, 7, 8]]) == [n // 2, n - 1, 0, 3, 0, n - 1, 0]


def test_logits_far_apart(isa):
    """Pieces with very different maxima, and probabilities down to subnormal numbers."""
    x = np.zeros((5, 20000))
    x[0, :9000] = -1e30
    x[4], x[4, :9000] = -1000, -np.inf
    x[1] = np.linspace(-110, 0, 20000)
    x[2], x[2, -1] = 1e37, 3e38
    x[3] = np.linspace(3e4, 2e4, 20000)
    for name in ("logsumexp", "softmax"):
        case = Case.random(name, (5, 20000)).with_arrays(h.Typed.of(x, "float32"))
        case.check(case.run(isa))


@pytest.mark.parametrize("dtype", FLOATS)
def test_argmax_takes_the_first_of_equals(dtype, isa):
    rng = np.random.default_rng(5)
    for n in (1, 2, 17, 511, 513, 8192, 8193, 30000):
        x = h.Typed.of(rng.integers(-3, 4, (4, n)), dtype)
        case = Case.random("argmax", (4, n)).with_arrays(x)
        case.check(case.run(isa, threads=2))
    zeros = h.Typed.of(np.array([[-0.0, 0.0, -0.0]]), dtype)
    assert Case.random("argmax", (1, 3)).with_arrays(zeros).run(isa)[0].values[0] == 0


# Rotary positions


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 4095, 1_000_000, -1, -4095])
def test_rope(offset, traditional, isa):
    rng = np.random.default_rng(seed_of(offset))
    for shape, dims in (
        ((1, 9, 1, 64), 64), ((2, 3, 5, 80), 32), ((1, 2, 65, 16), 16), ((3, 4, 2), 2), ((7, 6), 6),
        ((2, 2, 3, 63), 62), ((2, 1, 2, 2, 130), 126), ((1, 2, 1100), 1080),
    ):  # fmt: skip
        for dtype in FLOATS:
            case = cases.Rope(h.Typed.of(rng.normal(0, 2, shape), dtype), dims, traditional, offset)
            case.base, case.scale = (10000.0, 1.0) if dims % 4 else (1e6, 0.25)
            case.check(case.run(isa))


def test_rope_angles_are_exact_far_out(isa):
    """Also where the number of turns does not fit the fast way."""
    for offset in (10**7, 2**31 + 5, 10**12):
        for scale in (1.0, 100.0):
            case = cases.Rope(h.Typed.of(np.ones((1, 3, 2, 8)), "float32"), 8, False, offset, 10.0, scale)
            case.check(case.run(isa))


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_with_an_offset_per_sequence(traditional, isa):
    rng = np.random.default_rng(3)
    x = h.Typed.of(rng.normal(size=(3, 2, 4, 20)), "float32")
    for dtype in ("int32", "int64"):
        case = cases.Rope(x, 16, traditional, 2, offsets=h.Typed(np.array([5, 0, 1000], dtype), dtype))
        case.check(case.run(isa))
        for one in (np.array(7, dtype), np.array([7], dtype)):
            case.offsets = h.Typed(one, dtype)
            case.check(case.run(isa))
    strided = h.Typed(np.arange(9, dtype=np.int32)[::3], "int32")
    case = cases.Rope(x, 16, traditional, offsets=strided)
    case.check(case.run(isa))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_strides(dtype, traditional):
    whole = h.Typed.of(np.random.default_rng(4).normal(size=(2, 5, 6, 80)), dtype)
    for change in (
        lambda a: a.transpose(0, 2, 1, 3),
        lambda a: a[..., 8:48],
        lambda a: a[:, :, ::-2, ::2],
        lambda a: a.transpose(0, 1, 3, 2)[..., :4],
        lambda a: np.broadcast_to(a[:, :1], (2, 4, 6, 80)),
        lambda a: a[:1, :, :1],
    ):
        view = whole.view(change)
        case = cases.Rope(view, min(32, view.raw.shape[-1]), traditional, 11)
        y = case.run()
        case.check(y)
        assert same_bits([y], [case.run(x=h.Typed(np.ascontiguousarray(view.raw), dtype))])


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_with_factors(traditional, isa):
    rng = np.random.default_rng(8)
    for shape, dims in (((2, 3, 5, 80), 32), ((1, 2, 65, 16), 16), ((3, 4, 2), 2), ((1, 2, 1100), 1080)):
        for dtype in FLOATS:
            x = h.Typed.of(rng.normal(0, 2, shape), dtype)
            case = cases.Rope(x, dims, traditional, 77, factors=rng.uniform(-2, 2, dims // 2))
            whole = case.run(isa)
            case.check(whole)
            assert same_bits([case.run(isa, threads=3)], [whole])
            case.factors = np.ones(dims // 2)
            assert same_bits([case.run(isa)], [cases.Rope(x, dims, traditional, 77).run(isa)])


def test_rope_with_frequency_zero_copies(isa):
    x = h.Typed.of(np.random.default_rng(9).normal(size=(1, 2, 3, 8)), "float16")
    case = cases.Rope(x, 8, False, 5, scale=0.0)
    assert same_bits([case.run(isa)], [x])


def test_rope_rows_and_threads(isa):
    for traditional in (False, True):
        x = h.Typed.of(np.random.default_rng(6).normal(size=(2, 9, 120, 64)), "float32")
        case = cases.Rope(x, 64, traditional, 50)
        whole = case.run(isa)
        assert same_bits([case.run(isa, threads=3)], [whole])
        for at in (0, 1, 63, 119):
            one = cases.Rope(x.view(lambda a, i=at: a[1:, 4:5, i : i + 1]), 64, traditional, 50 + at)
            assert same_bits([one.run(isa)], [whole.view(lambda a, i=at: a[1:, 4:5, i : i + 1])])


def test_rope_without_rows_and_with_nan(isa):
    for shape in ((1, 3, 0, 8), (0, 3, 2, 8)):
        cases.Rope(h.Typed.of(np.zeros(shape), "float32"), 8, False).run(isa)
    x = np.ones((1, 1, 2, 8), np.float32)
    x[0, 0, 0, 1], x[0, 0, 1, 2] = np.nan, np.inf
    y = cases.Rope(h.Typed(x, "float32"), 4, False, 3).run(isa).values
    assert list(np.flatnonzero(np.isnan(y[0, 0, 0]))) == [1, 3]
    assert not np.isfinite(y[0, 0, 1, [0, 2]]).any() and np.isfinite(y[0, 0, 1, [1, 3, 4, 5, 6, 7]]).all()


# Refusals


@pytest.mark.parametrize(
    "symbol,inputs,outputs,params,message",
    [
        ("rms_norm", [(2, 4), (5,)], [(2, 4)], [1e-5], "as long as rows"),
        ("rms_norm", [(2, 4)], [(2, 5)], [1e-5], "shape of x"),
        ("rms_norm", [(2, 4)], [(2, 4)], [], "wrong number"),
        ("rms_norm", [()], [()], [1e-5], "at least one dimension"),
        ("residual_rms_norm", [(2, 4), (2, 5)], [(2, 4)] * 2, [1e-5], "one shape"),
        ("layer_norm", [(2, 4), (4,)], [(2, 4)], [1e-5, 1, 1], "as the parameters say"),
        ("swiglu", [(2, 4), (1, 4)], [(2, 4)], [], "one shape"),
        ("silu", [(2, 4), (2, 4)], [(2, 4)], [], "wrong number"),
        ("softcap", [(2, 4)], [(2, 4)], [], "wrong number"),
        ("logsumexp", [(2, 0)], [(2, 1)], [], "must have elements"),
        ("logsumexp", [(2, 4)], [(1, 1)], [], "one element for each row"),
        ("argmax", [(2, 4)], [(2,)], [], "wrong dtype"),
        ("rope", [(4, 6), (3,)], [(4, 6)], [0, 0], "frequencies"),
    ],
)
def test_refusals(symbol, inputs, outputs, params, message):
    ins, outs = ([h.Typed(np.ones(s, np.float32), "float32") for s in shapes] for shapes in (inputs, outputs))
    with pytest.raises(ValueError, match=f"host_ops_{symbol}: .*{message}"):
        h.call(str(cases.library()), f"host_ops_{symbol}", ins, outs, params)


def test_refusals_of_rope():
    x, y = h.Typed.of(np.ones((2, 3, 8)), "float32"), h.Typed.blank((2, 3, 8), "float32")

    def message(*extra, pairs=4, x=x, y=y):
        with pytest.raises(ValueError) as e:
            inputs = [x, *extra, h.Typed(np.ones(pairs), "float64")]
            h.call(str(cases.library()), "host_ops_rope", inputs, [y], [0, 0])
        return str(e.value)

    assert "more pairs" in message(pairs=5)
    assert "offsets must be int32" in message(h.Typed.of(np.ones(1), "float32"))
    assert "one per sequence" in message(h.Typed(np.ones(3, np.int32), "int32"))
    assert "both" in message(y=h.Typed.blank((2, 3, 8), "float16"))
    assert "two dimensions" in message(x=x.view(lambda a: a[0, 0]), y=y.view(lambda a: a[0, 0]))


def test_doubles_are_refused():
    x, y = h.Typed(np.ones((2, 3)), "float64"), h.Typed.blank((2, 3), "float32")
    for name in ("rms_norm", "silu", "logsumexp", "argmax"):
        with pytest.raises(ValueError, match="x must be float32"):
            h.call(str(cases.library()), f"host_ops_{name}", [x], [y], [1e-5])
