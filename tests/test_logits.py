"""logsumexp in mlx-lm's generation loops: only for the accelerated model, and given back."""

from __future__ import annotations

import inspect
import sys

import mlx.core as mx
import mlx_lm  # noqa: F401
import numpy as np
import pytest
import tiny_models
import toys
from test_models import close

from backend_core import Offer, Policy, accelerate, reference_ops, restore
from backend_core.integrations import logits
from backend_core.report import STOCK

generation = sys.modules["mlx_lm.generate"]
POLICY = Policy(deterministic=True, activations="model")
PROMPT = mx.array([3, 7, 1, 4])


def plugin(calls, factor=1.0):
    def select_op(site):
        if site.op != "logits":
            return None

        def build(module):
            def logsumexp(x):
                calls.append(x.shape)
                return mx.logsumexp(x, axis=-1, keepdims=True) * factor

            return logsumexp

        return Offer("mine", build, row_invariant=True)

    return toys.host(POLICY, mine=toys.module_with(select_op=select_op))


def tokens(model, n=6, **options):
    return [(int(t), np.array(p)) for t, p in generation.generate_step(PROMPT, model, max_tokens=n, **options)]


def same(a, b):
    assert [t for t, _ in a] == [t for t, _ in b]
    close([mx.array(p) for _, p in a], [mx.array(p) for _, p in b])


@pytest.fixture
def two():
    models = tiny_models.build("llama"), tiny_models.build("llama", seed=1)
    yield models
    for m in models:
        restore(m)


def functions():
    return [
        generation.generate_step,
        generation.speculative_generate_step,
        vars(generation.GenerationBatch)["_step"],
    ]


def test_a_reference_agrees_with_stock():
    x = mx.random.normal((3, 500), key=mx.random.key(1)) * 5
    y64 = reference_ops.logsumexp(np.array(x).astype(np.float64))
    bound = reference_ops.logsumexp_bound(y64, 500, "float32")
    assert (np.abs(np.array(mx.logsumexp(x, axis=-1, keepdims=True)) - y64) <= bound).all()


def test_only_the_accelerated_model(two):
    first, second = two
    want = tokens(first), tokens(second)
    before = [(f, f.__code__, inspect.signature(f)) for f in functions()]
    names = set(vars(generation))
    calls = []
    report = accelerate(first, POLICY, host=plugin(calls))
    assert report.decision("logsumexp()", "select_op").chosen == "mine/mine"
    calls.clear()
    same(tokens(first), want[0])
    assert calls and set(calls) == {(1, tiny_models.VOCAB)}
    calls.clear()
    same(tokens(second), want[1])
    assert not calls
    assert [inspect.signature(f) for f in functions()] == [s for _, _, s in before]
    restore(first)
    assert [(f, f.__code__, inspect.signature(f)) for f in functions()] == before
    assert set(vars(generation)) == names and not hasattr(generation.generate_step, "__signature__")
    same(tokens(first), want[0])
    assert not calls


def test_two_accelerated_models(two):
    calls = [], []
    for m, c in zip(two, calls, strict=True):
        accelerate(m, POLICY, host=plugin(c))
    for c in calls:
        c.clear()
    tokens(two[0], 3)
    assert calls[0] and not calls[1]
    restore(two[0])
    calls[0].clear()
    tokens(two[0], 3)
    tokens(two[1], 3)
    assert not calls[0] and calls[1]


def test_a_running_loop_outlives_restore(two):
    calls = []
    accelerate(two[0], POLICY, host=plugin(calls))
    loop = generation.generate_step(PROMPT, model=two[0], max_tokens=6)
    first = [int(next(loop)[0]) for _ in range(2)]
    restore(two[0])
    rest = [int(t) for t, _ in loop]
    assert first + rest == [t for t, _ in tokens(two[0])]


def test_drafts_and_batches(two):
    model, draft = two

    def drafted():
        return [int(t) for t, _, _ in generation.speculative_generate_step(PROMPT, model, draft, max_tokens=6)]

    def batched():
        batch = generation.BatchGenerator(model, max_tokens=4)
        batch.insert([[3, 7, 1], [5, 2]])
        out = {}
        for _ in range(8):
            for r in batch.next()[1]:
                out.setdefault(r.uid, []).append(r.token)
        return out

    want = drafted(), batched()
    calls = []
    accelerate(model, POLICY, host=plugin(calls))
    calls.clear()
    assert drafted() == want[0] and calls
    calls.clear()
    assert batched() == want[1] and calls


def test_a_wrong_one_is_not_installed(two):
    code = generation.generate_step.__code__
    report = accelerate(two[0], POLICY, host=plugin([], 1.001))
    decision = report.decision("logsumexp()", "select_op")
    assert decision.chosen == STOCK and "wrong result" in decision.losers[0].reason
    assert generation.generate_step.__code__ is code


def test_the_stand_in_passes_the_rest_on():
    stand_in = logits._StandIn()
    stand_in._functions[mx.float32] = lambda x: "ours"
    x = mx.random.normal((2, 5), key=mx.random.key(0))
    assert stand_in.array is mx.array and stand_in.float32 == mx.float32
    assert stand_in.logsumexp(x, axis=-1, keepdims=True) == "ours"
    assert stand_in.logsumexp(x[:1], keepdims=True) == "ours"
    for args, options in [((x,), {}), ((x, -1), {}), ((x,), {"keepdims": True}), ((x, 0), {"keepdims": True})]:
        assert np.array_equal(np.array(stand_in.logsumexp(*args, **options)), np.array(mx.logsumexp(*args, **options)))
    half = x.astype(mx.float16)
    assert stand_in.logsumexp(half, axis=-1, keepdims=True).dtype == mx.float16
    with pytest.raises(AttributeError):
        _ = stand_in.nothing


def test_parameters_of_the_loops_still_work(two):
    accelerate(two[0], POLICY, host=plugin([]))
    with pytest.raises(TypeError):
        list(generation.generate_step(PROMPT, two[0], nothing=1))
    seen = []
    same(
        tokens(two[0], sampler=lambda p: (seen.append(p.shape), mx.argmax(p, axis=-1))[1]),
        tokens(two[0]),
    )
    assert len(seen) >= 6
