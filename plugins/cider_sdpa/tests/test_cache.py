"""Keys and values that enter a cache: stock's bits, any strides, nothing else touched, memory reused."""

import itertools

import cider_cases as cases
import mlx.core as mx
import numpy as np
import pytest
from cider_sdpa import cache
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_core.testing import cpu_kernels as h

PAIRS = list(itertools.product(cases.FLOATS, repeat=2))
RAW = cases.RAW


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


def awkward(rng, shape, dtype):
    """Values with ties, subnormals of both half types, overflow and inf among them."""
    special = np.float32([0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, -65520, 1e30, 3.3e38])
    tiny = np.float32([6e-8, 2.9e-8, 3e-8, 1e-40, 6.1e-5, 1.00048828125, 1.0009765625, 1.00146484375, 1.00390625])
    special = np.concatenate([special, tiny])
    x = rng.standard_normal(shape).astype(np.float32)
    x = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), x)
    with np.errstate(over="ignore"):
        return h.Typed.of(x, dtype)


def rounded(a: h.Typed, dtype: str) -> np.ndarray:
    return a.raw if a.dtype == dtype else h.Typed.of(a.values, dtype).raw


def write(k, v, dtype, capacity, offset, isa, threads=1):
    """(keys, values) of a cache full of sevens after the kernel, and what must be in it."""
    out, want = [], []
    for a in (k, v):
        b, heads, n, d = a.raw.shape
        held = np.full((b, heads, capacity, d), 7, RAW[dtype])
        should = held.copy()
        should[:, :, offset : offset + n] = rounded(a, dtype)
        out.append(h.Typed(held, dtype))
        want.append(should)
    h.call(cases.library(), cache.SYMBOL, [*out, k, v], out, [offset], threads=threads, isa=isa)
    return [a.raw for a in out], want


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_conversions(dtypes, isa):
    rng = np.random.default_rng(0)
    for b, heads, n, d, dv in ((1, 3, 1, 64, 64), (2, 2, 5, 33, 80), (1, 1, 17, 15, 1), (1, 8, 130, 128, 128)):
        k, v = (awkward(rng, (b, heads, n, w), dtypes[0]) for w in (d, dv))
        for threads in (1, 3):
            got, want = write(k, v, dtypes[1], n + 9, 4, isa, threads)
            assert same(got, want), (n, d)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(0, 20), st.integers(1, 70), st.integers(1, 70), st.integers(0, 9),
    st.integers(0, 9), st.sampled_from(PAIRS), st.sampled_from(list(cases.isas().values())),
)  # fmt: skip
def test_any_update(b, heads, n, d, dv, before, after, dtypes, isa):
    rng = np.random.default_rng(n)
    k, v = (awkward(rng, (b, heads, n, w), dtypes[0]) for w in (d, dv))
    got, want = write(k, v, dtypes[1], before + n + after, before, isa)
    assert same(got, want)


def test_strides(isa):
    """Heads lie behind positions, as models compute them; elements may lie apart or backwards."""
    rng = np.random.default_rng(1)
    a = awkward(rng, (2, 3, 5, 40), "float32")
    layouts = (
        lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        lambda x: np.ascontiguousarray(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2),
        lambda x: x[..., ::-1].copy()[..., ::-1],
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    )
    for layout in layouts:
        k = a.view(layout)
        got, want = write(k, a, "float16", 9, 2, isa)
        assert same(got, want)


def test_nothing_beyond_the_arrays_is_touched(isa):
    rng = np.random.default_rng(2)
    for dtype in cases.FLOATS:
        k, v = (awkward(rng, (1, 2, 3, w), "float32") for w in (37, 21))
        keep = []
        for a in (k, v):
            a.raw, memory = cases.page_end(a.raw)
            keep.append(memory)
        outs, want = [], []
        for a in (k, v):
            held = np.full((1, 2, 7, a.raw.shape[3]), 7, RAW[dtype])
            copy, memory = cases.page_end(held)
            keep.append(memory)
            held[:, :, 4:] = rounded(a, dtype)
            want.append(held)
            outs.append(h.Typed(copy, dtype))
        h.call(cases.library(), cache.SYMBOL, [*outs, k, v], outs, [4], isa=isa)
        assert same([a.raw for a in outs], want)


def test_wrong_calls_are_refused():
    rng = np.random.default_rng(3)
    k, v = (awkward(rng, (1, 2, 3, 8), "float32") for _ in range(2))
    out = [h.Typed(np.zeros((1, 2, 5, 8), np.float16), "float16") for _ in range(2)]

    def refuse(match, k=k, v=v, out=out, params=(0,)):
        with pytest.raises(ValueError, match=match):
            h.call(cases.library(), cache.SYMBOL, [*out, k, v], out, list(params), isa=0)

    refuse("parameter", params=())
    refuse("within", params=(3,))
    refuse("within", params=(-1,))
    refuse("fit", k.view(lambda a: a[:, :1]))
    refuse("fit", k, v.view(lambda a: a[..., :7]))
    refuse("four", k.view(lambda a: a[0]))
    refuse("float32, float16", h.Typed(k.raw > 0, "bool"))


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_bits_of_stock(dtypes):
    """The same bits as assignment in mlx, NaN included."""
    update = cache.build()
    rng = np.random.default_rng(4)
    for n, offset in ((1, 0), (1, 19), (6, 3)):
        values = awkward(rng, (1, 2, n, 40), "float32").raw
        values[0, 0, 0, 5] = np.nan
        new = mx.array(values).astype(getattr(mx, dtypes[0])).transpose(0, 2, 1, 3)
        new = mx.contiguous(new).transpose(0, 2, 1, 3)
        held = mx.random.normal((1, 2, 20, 40), key=mx.random.key(n)).astype(getattr(mx, dtypes[1]))
        want = mx.array(held)
        want[..., offset : offset + n, :] = new
        got = update(held, held, new, new, offset)
        for a in got:
            assert a.dtype == want.dtype
            a, b = (np.array(x.astype(mx.float32)) for x in (a, want))
            assert np.array_equal(np.isnan(a), np.isnan(b))
            assert np.where(np.isnan(a), 0, a).tobytes() == np.where(np.isnan(b), 0, b).tobytes()


def test_memory_is_reused_unless_somebody_holds_it():
    update = cache.build()
    size = 64 << 20
    keys = mx.zeros((1, 1, size // 4, 1))
    values = mx.zeros((1, 1, 8, 1))
    one = mx.ones((1, 1, 1, 1))
    mx.eval(keys, values, one)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for i in range(4):
        keys, values = update(keys, values, one, one, i)
        mx.eval(keys, values)
    assert mx.get_peak_memory() - before < size // 2
    held = keys
    keys, values = update(keys, values, one * 5, one, 0)
    mx.eval(keys, values)
    assert held[0, 0, 0, 0].item() == 1 and keys[0, 0, 0, 0].item() == 5
    assert keys[0, 0, :5, 0].tolist() == [5, 1, 1, 1, 0]
