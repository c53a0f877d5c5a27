"""Attention over quantized keys and values: accuracy, rows, threads, masks, strides, and what stays stock."""

import itertools
from types import SimpleNamespace

import cider_cases as cases
import mlx.core as mx
import numpy as np
import pytest
from cider_sdpa import plugin, quantized, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import quantized_scaled_dot_product_attention, scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from backend_core.testing import cpu_kernels as h

GROUPS = (32, 64, 128)
SCALE = 0.2


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


class Case:
    """One call on random codes; the cache is a slice of a longer one."""

    def __init__(self, seed, b, hq, hkv, rows, keys, d, bits, group, dtypes=("float32", "float16"), mask=None):
        rng = np.random.default_rng(seed)
        self.bits, self.group, self.out_dtype = bits, group, cases.promote(*dtypes)
        self.q = h.Typed.of(rng.standard_normal((b, hq, rows, d)), dtypes[0])
        room = keys + 13

        def part():
            words = rng.integers(0, 2**32, (b, hkv, room, d * bits // 32), dtype=np.uint32)
            scales = h.Typed.of((rng.random((b, hkv, room, d // group)) + 0.5) * 4 / 2**bits, dtypes[1])
            biases = h.Typed.of(-2 + rng.standard_normal((b, hkv, room, d // group)) / 4, dtypes[1])
            return [a.view(lambda x: x[:, :, :keys]) for a in (h.Typed(words, "uint32"), scales, biases)]

        self.keys, self.values = part(), part()
        self.mask = mask
        if mask == "bool":
            self.mask = h.Typed(rng.random((b, 1, rows, keys)) < 0.6, "bool")
        elif mask == "window":
            i, j = np.arange(rows)[:, None] + keys - rows, np.arange(keys)
            self.mask = h.Typed((j <= i) & (j > i - max(1, keys // 5)), "bool")
        elif mask == "additive":
            self.mask = h.Typed.of(rng.standard_normal((rows, keys)), self.out_dtype)

    def wide(self):
        return [reference.dequantize(w.raw, s.values, z.values, self.bits) for w, s, z in (self.keys, self.values)]

    def run(self, *, isa=None, threads=1, rows=slice(None), keys=None):
        q = self.q.view(lambda a: a[:, :, rows])
        parts = [a.view(lambda x: x[:, :, :keys]) for a in (*self.keys, *self.values)]
        kind, extra = plugin.NO_MASK, []
        if self.mask == "causal":
            kind = plugin.CAUSAL
        elif self.mask is not None:
            kind, extra = plugin.ARRAY, [self.mask]
        y = h.Typed(np.full(q.raw.shape, 7, cases.RAW[self.out_dtype]), self.out_dtype)
        params = [SCALE, kind, self.bits, self.group]
        isa = cases.best() if isa is None else isa
        h.call(cases.library(), quantized.SYMBOL, [q, *parts, *extra], y, params, threads=threads, isa=isa)
        return y

    def check(self, y):
        mask = self.mask
        if isinstance(mask, h.Typed):
            mask = mask.raw if mask.dtype == "bool" else mask.values
        y64, allowed = reference.bound(self.q.values, *self.wide(), np.float32(SCALE), mask, None, self.out_dtype)
        worst = (np.abs(y.values - y64) / allowed).max(initial=0.0)
        assert worst <= 1.0, f"{worst:.3g} times the bound"


@pytest.mark.parametrize("bits", quantized.BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_formats(bits, group, isa):
    for rows, keys, mask in ((1, 130, None), (5, 65, "causal"), (16, 129, "bool"), (19, 127, "causal")):
        if isa == 0 and rows > 5:
            continue
        case = Case(bits * group + rows, 1, 6, 2, rows, keys, 128, bits, group, mask=mask)
        case.check(case.run(isa=isa, threads=1 + rows % 2))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 2), st.sampled_from((1, 2, 3, 8)), st.integers(1, 24), st.integers(1, 150),
    st.sampled_from((32, 64, 96, 128)), st.sampled_from(quantized.BITS), st.sampled_from(GROUPS),
    st.sampled_from(list(itertools.product(cases.FLOATS, repeat=2))),
    st.sampled_from((None, "causal", "bool", "window", "additive")), st.sampled_from(list(cases.isas().values())),
)  # fmt: skip
def test_any_problem(b, hkv, ratio, rows, keys, d, bits, group, dtypes, mask, isa):
    group = group if d % group == 0 else 32
    case = Case(keys, b, hkv * ratio, hkv, rows, keys, d, bits, group, dtypes, mask)
    case.check(case.run(isa=isa, threads=2))


def test_long_context_and_threads(isa):
    for rows in (1, 4, 20):
        case = Case(rows, 1, 3, 1, rows, 2100 if isa else 300, 64, 4, 64, mask="causal")
        one = case.run(isa=isa)
        case.check(one)
        for threads in (2, 3, 5, 8):
            assert one.raw.tobytes() == case.run(isa=isa, threads=threads).raw.tobytes()


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_rows_do_not_depend_on_each_other(bits, isa):
    for hq, hkv, keys in ((3, 1, 140), (8, 1, 1030), (2, 2, 33)):
        if isa == 0 and keys > 200:
            continue
        case = Case(keys, 1, hq, hkv, 16, keys, 64, bits, 32, mask="causal")
        together = case.run(isa=isa).raw
        for i in range(16):
            alone = case.run(isa=isa, rows=slice(i, i + 1), keys=keys - 16 + i + 1).raw
            assert alone.tobytes() == np.ascontiguousarray(together[:, :, i : i + 1]).tobytes(), i


def test_rows_that_see_nothing(isa):
    for rows in (2, 18):
        case = Case(rows, 1, 4, 2, rows, 40, 32, 4, 32, mask="bool")
        case.mask.raw[:, :, 1] = False
        y = case.run(isa=isa)
        case.check(y)
        mean = np.repeat(case.wide()[1].mean(axis=2), 2, axis=1)
        assert np.abs(y.values[:, :, 1] - mean).max() < 1e-5


def test_nothing_beyond_the_arrays_is_read(isa):
    for bits in quantized.BITS:
        case = Case(bits, 1, 4, 2, 3, 20, 32, bits, 32)
        want = case.run(isa=isa).raw
        keep = []
        for part in (case.keys, case.values):
            for i, a in enumerate(part):
                copy, memory = cases.page_end(np.ascontiguousarray(a.raw))
                keep.append(memory)
                part[i] = h.Typed(copy, a.dtype)
        assert case.run(isa=isa).raw.tobytes() == want.tobytes()


def test_wrong_calls_are_refused():
    good = Case(0, 1, 4, 2, 2, 5, 32, 4, 32)
    y = h.Typed(np.zeros((1, 4, 2, 32), np.float32), "float32")

    def refuse(match, inputs=None, params=(1.0, 0, 4, 32)):
        with pytest.raises(ValueError, match=match):
            h.call(
                cases.library(), quantized.SYMBOL, inputs or [good.q, *good.keys, *good.values], y, list(params), isa=0
            )

    refuse("parameters", params=(1.0, 0))
    refuse("mask must", params=(1.0, 3, 4, 32))
    refuse("bits", params=(1.0, 0, 9, 32))
    refuse("group_size", params=(1.0, 0, 4, 8))
    refuse("fit bits", params=(1.0, 0, 8, 32))
    refuse("expects q", params=(1.0, 2, 4, 32))
    refuse("uint32", [good.q, good.q.view(lambda a: a[:, :2]), *good.keys[1:], *good.values])
    refuse("multiple", [good.q.view(lambda a: a[:, :3]), *good.keys, *good.values])


def cached(bits, group, dtype=mx.float32, n=70, batch=1):
    cache = QuantizedKVCache(group_size=group, bits=bits)
    k, v = (mx.random.normal((batch, 2, n, 64), key=mx.random.key(i)).astype(dtype) for i in (1, 2))
    return cache, *cache.update_and_fetch(k, v)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_mlx_lms_own_cache(bits, rows):
    f = plugin.select_attention(site(bits, 32)).build(None)
    for dtype, batch in ((mx.float32, 1), (mx.float16, 2), (mx.bfloat16, 1)):
        cache, keys, values = cached(bits, 32, dtype, batch=batch)
        q = mx.random.normal((batch, 6, rows, 64), key=mx.random.key(3))
        masks = [None, "causal", mx.random.uniform(shape=(rows, 70), key=mx.random.key(4)) < 0.5,
                 mx.random.normal((rows, 70), key=mx.random.key(5)),
                 mx.random.uniform(shape=(batch, 1, rows, 70), key=mx.random.key(6)) < 0.5]  # fmt: skip
        for mask in masks:
            # Stock multiplies the queries in place.
            want = quantized_scaled_dot_product_attention(
                mx.array(q), keys, values, scale=SCALE, mask=mask, group_size=32, bits=bits
            )
            got = f(q, keys, values, cache, SCALE, mask)
            assert got.dtype == want.dtype and got.shape == want.shape
            assert mx.allclose(got, want, rtol=1e-4, atol=1e-5), (dtype, mask)


def site(bits, group, **changes):
    from backend_core.sites import AttentionSite

    facts = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "value_dim": 64, "kv_bits": bits, "kv_group_size": group}
    return AttentionSite("a", **(facts | changes))


def test_offers():
    assert plugin.select_attention(site(4, 64)).name == "quantized"
    for bits, group, changes in ((7, 64, {}), (4, 128, {}), (4, 64, {"has_sinks": True}), (4, 8, {}),
                                 (4, 64, {"value_dim": 128}), (4, 64, {"device": "metal"})):  # fmt: skip
        assert plugin.select_attention(site(bits, group, **changes)) is None


def test_what_stays_stock():
    f = quantized.build()
    cache, keys, values = cached(4, 32)
    q = mx.random.normal((1, 6, 3, 64), key=mx.random.key(3))
    refused = SimpleNamespace(bits=4, group_size=32)
    for arguments in (
        (q, keys, values, None, SCALE, None),
        (q, keys, values, SimpleNamespace(bits=7, group_size=32), SCALE, None),
        (q, keys, values, SimpleNamespace(bits=8, group_size=32), SCALE, None),
        (q, keys, values, SimpleNamespace(bits=4, group_size=64), SCALE, None),
        (q.astype(mx.int32), keys, values, refused, SCALE, None),
        (q[:, :5], keys, values, refused, SCALE, None),
        (q, keys[:2], values, refused, SCALE, None),
        (q, keys, tuple(a[:, :, 1:] for a in values), refused, SCALE, None),
        (q, keys, values, refused, SCALE, "casual"),
        (q, keys, values, refused, SCALE, mx.ones((3, 71), dtype=mx.bool_)),
        (q, keys, values, refused, SCALE, mx.ones((1, 2, 3, 70), dtype=mx.bool_)),
        (q, keys, values, refused, SCALE, mx.ones((2, 3, 70), dtype=mx.bool_)),
        (q, keys, values, refused, SCALE, mx.ones((3, 70), dtype=mx.int32)),
        (q, keys, values, refused, SCALE, None, mx.ones((6,))),
    ):
        assert f(*arguments) is NotImplemented
    want = scaled_dot_product_attention(mx.array(q), keys, values, cache, SCALE, None)
    assert mx.allclose(f(q, list(keys), list(values), cache, SCALE, None), want, rtol=1e-4, atol=1e-5)
