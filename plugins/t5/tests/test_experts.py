"""The product with experts through its C ABI: accuracy, rows alone, strides, threads, what is refused."""

import numpy as np
import pytest
import t5_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from t5_cases import seed_of
from t5_ternary import plugin, reference

from backend_core.testing import cpu_kernels as h


class Experts:
    """Random experts: x (*lead or 1, m, k), indices (*lead), W (experts, n, k)."""

    def __init__(self, seed, group, experts, n, k, x_shape, indices, dtypes=("float32", "float16"), bias=False):
        rng = np.random.default_rng(seed)
        self.group, self.indices = group, h.Typed(np.asarray(indices, np.uint32), "uint32")
        self.x = h.Typed.of(rng.standard_normal((*x_shape, k)), dtypes[0])
        packed = reference.pack(rng.integers(0, 3, (experts * n, k)), group)
        self.w = h.Typed(packed.reshape(experts, n, -1), "uint8")
        self.scales = h.Typed.of(rng.uniform(0.01, 0.1, (experts, n, k // group)), dtypes[1])
        self.bias = h.Typed.of(rng.standard_normal((experts, n)), dtypes[1]) if bias else None
        self.out = dtypes[0] if dtypes[0] == dtypes[1] else "float32"

    def params(self, isa):
        if not isa & h.AVX512_VNNI:
            return [self.group]
        known = h.Typed.blank((2,), "float32")
        flat = [a.view(lambda v: v.reshape(-1, v.shape[-1])) for a in (self.w, self.scales)]
        x = h.Typed(np.zeros((1, self.x.raw.shape[-1]), np.float32), "float32")
        h.call(cases.library(), plugin.FACTS, [x, *flat], known, [self.group])
        return [self.group, *known.raw.tolist()]

    def run(self, *, isa=None, threads=1, x=None, indices=None):
        isa = cases.best() if isa is None else isa
        x, indices = x or self.x, indices or self.indices
        y = h.Typed.blank((*indices.raw.shape, x.raw.shape[-2], self.w.raw.shape[1]), self.out)
        inputs = [x, indices, self.w, self.scales, *([self.bias] if self.bias else [])]
        h.call(cases.library(), plugin.EXPERTS, inputs, y, self.params(isa), threads=threads, isa=isa)
        return y

    def check(self, y):
        lead = self.indices.raw.shape
        x = np.broadcast_to(self.x.values, (*lead, *self.x.values.shape[-2:]))
        for e in np.unique(self.indices.raw):
            at = self.indices.raw == e
            w = reference.dequantize64(self.w.raw[e], self.scales.values[e], self.group)
            y64, allowed = reference.bound(x[at], w, self.out, self.bias.values[e] if self.bias else None)
            error = np.abs(y.values[at] - y64) / allowed
            assert error.max() <= 1.0, f"expert {e}: {error.max():.3g} times the bound"


@pytest.fixture(params=list(cases.isas()))
def isa(request):
    return cases.isas()[request.param]


@pytest.mark.parametrize("group", (64, 128))
def test_a_token_and_a_few(group, isa):
    """As models call it: (rows, 1, 1, k) with (rows, top_k) indices, and (rows, top_k, 1, k) for the way back."""
    for rows, threads in ((1, 2), (3, 1), (16, 2)):
        rng = np.random.default_rng(rows)
        indices = np.stack([rng.permutation(5)[:2] for _ in range(rows)])
        for lead in ((rows, 1), (rows, 2)):
            case = Experts(rows, group, 5, 37, 3 * group, (*lead, 1), indices, bias=rows == 3)
            case.check(case.run(isa=isa, threads=threads))


@pytest.mark.parametrize("group", (64, 128))
def test_many_rows_sorted_by_expert(group, isa):
    """Experts with few rows beside ones with many, and one that nobody asks for."""
    indices = np.sort(np.random.default_rng(0).choice([0, 1, 1, 1, 1, 3, 4, 4], 70))
    indices[:5] = 0
    case = Experts(1, group, 6, 40, 2 * group, (70, 1), indices, ("float16", "float16"))
    case.check(case.run(isa=isa, threads=2))


def test_more_rows_than_are_gathered_at_once():
    case = Experts(2, 64, 2, 16, 64, (1100, 1), np.array([1] * 1060 + [0] * 40))
    case.check(case.run(threads=2))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((64, 128)), st.integers(1, 5), st.integers(1, 300), st.integers(1, 5), st.integers(1, 3),
    st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans(), st.booleans(),
    st.sampled_from(list(cases.isas().values())), st.integers(1, 3),
)  # fmt: skip
def test_any_problem(group, experts, n, groups, m, lead, spread_out, bias, isa, threads):
    rng = np.random.default_rng(seed_of(group, n, groups, m, tuple(lead)))
    indices = rng.integers(0, experts, lead)
    x_lead = [d if rng.random() < 0.5 or not spread_out else 1 for d in lead]
    dtypes = (rng.choice(cases.FLOATS), rng.choice(cases.FLOATS))
    case = Experts(n, group, experts, n, groups * group, (*x_lead, m), indices, dtypes, bias)
    case.check(case.run(isa=isa, threads=threads))


def test_rows_that_do_not_fit_share_their_memory():
    """All rows of a small problem go to the float32 kernel, in a task whose memory is counted beforehand."""
    for group, m in ((64, 16), (128, 16), (64, 6)):
        case = Experts(m, group, 1, 105, group, (1, m), np.zeros(1))
        case.x.raw[..., 0] = 1e6
        case.check(case.run())


def test_rows_do_not_depend_on_each_other(isa):
    """Up to 16 rows for each expert, in any company, have the bits of the row alone."""
    rng = np.random.default_rng(3)
    indices = np.stack([rng.permutation(4)[:2] for _ in range(16)])
    case = Experts(3, 128, 4, 45, 256, (16, 1, 1), indices, bias=True)
    case.x.raw[4, 0, 0, 7] = 1e5  # does not fit fixed point
    alone = [
        case.run(isa=isa, x=case.x.view(lambda a, i=i: a[i : i + 1]),
                 indices=case.indices.view(lambda a, i=i: a[i : i + 1])).raw
        for i in range(16)
    ]  # fmt: skip
    for rows in (2, 5, 16):
        y = case.run(isa=isa, threads=2, x=case.x.view(lambda a, m=rows: a[:m]),
                     indices=case.indices.view(lambda a, m=rows: a[:m])).raw  # fmt: skip
        assert y.tobytes() == np.concatenate(alone[:rows]).tobytes()


def test_strides():
    case = Experts(4, 64, 3, 20, 128, (6, 2), [0, 2, 1, 1, 0, 2], bias=True)
    want = case.run().raw
    wide = h.Typed(np.repeat(np.repeat(case.x.raw, 2, 0), 2, 2), "float32").view(lambda a: a[::2, :, ::2])
    turned = h.Typed(np.ascontiguousarray(case.indices.raw[::-1]), "uint32").view(lambda a: a[::-1])
    assert np.array_equal(case.run(x=wide, indices=turned).raw, want)
    pairs = h.Typed(np.repeat(case.w.raw, 2, 1), "uint8")
    case.w = pairs.view(lambda a: a[:, ::2])
    case.scales = h.Typed(np.asfortranarray(case.scales.raw), "float16")
    assert np.array_equal(case.run(threads=2).raw, want)


def test_threads_do_not_change_bits(isa):
    case = Experts(5, 128, 3, 600, 256, (40, 1), np.arange(40) % 3 * (np.arange(40) % 2))
    one = case.run(isa=isa).raw
    for threads in (2, 5):
        assert case.run(isa=isa, threads=threads).raw.tobytes() == one.tobytes()


def test_nothing_to_do():
    case = Experts(6, 64, 2, 8, 64, (0, 1), np.zeros(0))
    assert case.run().raw.shape == (0, 1, 8)


def test_what_is_refused():
    case = Experts(7, 64, 2, 8, 64, (3, 1), [0, 1, 2])
    with pytest.raises(ValueError, match="t5_experts: an index is not below the number of experts"):
        case.run()
    case.indices = h.Typed(np.array([0, 1, 1], np.int32), "int32")
    with pytest.raises(ValueError, match="indices must be uint32"):
        case.run()
    case.indices = h.Typed(np.zeros((2,), np.uint32), "uint32")
    with pytest.raises(ValueError, match="those of indices or 1"):
        case.run()
