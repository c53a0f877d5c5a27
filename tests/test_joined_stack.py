"""Joined stacks: the bits of the layers one by one, where the call is the plain one, and the layers everywhere else."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.models import llama
from test_joined import POLICY, blocks, layers_of, made, model, pytestmark, restored, run, same_bits
from test_models import snapshot

from backend_core import Policy, accelerate, decide, joined_stack, restore
from backend_core.candidates import Candidate
from backend_core.integrations import scope
from backend_core.offers import Offer
from backend_core.race import Timing

__all__ = ["pytestmark", "restored"]  # what the tests here need too


def filled(m, tokens=((1, 2, 3),), offset=None):
    cache = caches.make_prompt_cache(m)
    mx.eval(m(mx.array(tokens), cache=cache), [c.state[:2] for c in cache])
    return cache


def watch(monkeypatch):
    """A list that grows with each call of a stack: True where it ran, False where it left the call to the layers."""
    ran, real = [], joined_stack.JoinedStack.__call__

    def call(plan, *args):
        y = real(plan, *args)
        ran.append(y is not NotImplemented)
        return y

    monkeypatch.setattr(joined_stack.JoinedStack, "__call__", call)
    return ran


def plan_of(m):
    """The stack that is installed on a model."""
    return m.model.__dict__[scope._JOINED][0]


def pair(monkeypatch, name="llama", **options):
    """(model with separate layers, model with a stack)."""
    one, two = model(name, **options), model(name, **options)
    layers_of(monkeypatch, one)
    assert [d.site.kind for d in blocks(accelerate(two, POLICY))].count("stack") == 1
    return one, two


def check(monkeypatch, change, used, name="llama", tokens=((7,),), **options):
    """The same bits and the same caches after ``change(model, cache)`` -> caches; used: by the stack."""
    results = []
    for m in pair(monkeypatch, name, **options):
        cache = change(m, filled(m, ((1, 2, 3),) * len(tokens)))
        ran = watch(monkeypatch)
        y = m(mx.array(tokens), cache=cache)
        arrays = [a for c in cache for a in (c.keys, c.values) if isinstance(a, mx.array)]
        results.append([np.array(a.astype(mx.float32)) for a in (y, *arrays)])
        offsets = [c.offset for c in cache]
    assert ran == [used]
    same_bits(*results)
    assert all(offset == 4 for offset in offsets)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "olmo2", "phi3", "smollm3"])
def test_it_runs_for_one_token(monkeypatch, name):
    check(monkeypatch, lambda m, cache: cache, True, name)


@pytest.mark.parametrize("layers", [1, 4, 5, 6, 11])
def test_programs_of_a_few_layers(monkeypatch, layers):
    check(monkeypatch, lambda m, cache: cache, True, num_hidden_layers=layers)


def test_a_batch(monkeypatch):
    check(monkeypatch, lambda m, cache: cache, True, tokens=((7,), (8,), (9,)))


def one_rotates(m, cache):
    rotating = caches.RotatingKVCache(max_size=16)
    c = cache[1]
    rotating.update_and_fetch(c.keys[..., : c.offset, :], c.values[..., : c.offset, :])
    return [cache[0], rotating]


def is_full(m, cache):
    for c in cache:
        c.keys, c.values = c.keys[..., : c.offset, :], c.values[..., : c.offset, :]
    return cache


def half(m, cache):
    """Another dtype than the model's keys."""
    for c in cache:
        c.keys, c.values = c.keys.astype(mx.float16), c.values.astype(mx.float16)
    return cache


OTHERWISE = {
    "a tuple of caches": lambda m, cache: tuple(cache),
    "one cache of another kind": one_rotates,
    "no room": is_full,
    "another dtype": half,
    "a class of one's own": lambda m, cache: [_as(cache[0], type("Mine", (caches.KVCache,), {})), cache[1]],
}


def _as(cache, cls):
    mine = cls()
    mine.keys, mine.values, mine.offset = cache.keys, cache.values, cache.offset
    return mine


@pytest.mark.parametrize("name", OTHERWISE)
def test_unusual_caches_are_left_to_the_layers(monkeypatch, name):
    check(monkeypatch, OTHERWISE[name], False)


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "uint8"])
def test_tokens_of_any_integers(monkeypatch, dtype):
    results = []
    for m in pair(monkeypatch):
        cache, ran = filled(m), watch(monkeypatch)
        y = m(mx.array([[7]], dtype=getattr(mx, dtype)), cache=cache)
        results.append([np.array(y)])
    assert ran == [dtype != "uint8"]
    same_bits(*results)


def test_embeddings_that_are_not_quantized(monkeypatch):
    results = []
    for stack in (False, True):
        m = model()
        m.model.embed_tokens = nn.Embedding(320, 96)
        m.model.embed_tokens.weight = mx.random.normal((320, 96), key=mx.random.key(5))
        report = accelerate(m, POLICY) if stack else layers_of(monkeypatch, m)
        cache, ran = filled(m), watch(monkeypatch)
        y = m(mx.array([[7]]), cache=cache)
        assert ran == [True] * stack, report.unjoined
        results.append([np.array(y)])
    same_bits(*results)


@pytest.mark.parametrize("activations", ["float32", "model"])
def test_half_precision(monkeypatch, activations):
    policy = Policy(deterministic=True, activations=activations)
    one, two = model(dtype="float16"), model(dtype="float16")
    layers_of(monkeypatch, one, policy)
    accelerate(two, policy)
    results = []
    for m in (one, two):
        cache, ran = filled(m), watch(monkeypatch)
        y = m(mx.array([[7]]), cache=cache)
        results.append([np.array(y.astype(mx.float32))])
    assert ran == [True] and plan_of(two).lookup is not None
    same_bits(*results)


def test_caches_at_different_offsets(monkeypatch):
    results = []
    for m in pair(monkeypatch):
        cache = filled(m)
        cache[1].trim(1)
        ran = watch(monkeypatch)
        y = m(mx.array([[7]]), cache=cache)
        assert True not in ran and [c.offset for c in cache] == [4, 3]
        results.append([np.array(y)])
    same_bits(*results)


def test_one_cache_for_two_layers(monkeypatch):
    results = []
    for m in pair(monkeypatch):
        cache, ran = filled(m), watch(monkeypatch)
        y = m(mx.array([[7]]), cache=[cache[0], cache[0]])
        assert True not in ran and cache[0].offset == 5
        results.append([np.array(y)])
    same_bits(*results)


CHANGES = {
    "order": lambda m: m.model.layers.reverse(),
    "fewer": lambda m: m.model.layers.pop(),
    "embedding": lambda m: m.model.embed_tokens.update({"scales": m.model.embed_tokens.scales * 2}),
    "another embedding": lambda m: setattr(m.model, "embed_tokens", nn.Embedding(320, 96)),
    "norm": lambda m: m.model.norm.update({"weight": m.model.norm.weight * 2}),
    "weights": lambda m: m.layers[1].mlp.up_proj.update({"scales": m.layers[1].mlp.up_proj.scales * 1.5}),
    "scale": lambda m: setattr(m.layers[0].self_attn, "scale", 0.25),
    "sliding": lambda m: (setattr(m.model, "swa_idx", 1), setattr(m.model, "sliding_window", 2),
                          setattr(m.layers[1], "use_sliding", True)),
    "a layer restored": lambda m: restore(m.layers[1]),
    "a part restored": lambda m: restore(m.layers[1].mlp),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_left_to_the_layers(monkeypatch, name):
    results = []
    for m in pair(monkeypatch):
        mx.random.seed(3)
        CHANGES[name](m)
        mx.eval(m.parameters())
        cache, ran = filled(m), watch(monkeypatch)
        y = m(mx.array([[7]]), cache=cache)
        assert True not in ran
        results.append([np.array(y), *(np.array(c.keys) for c in cache)])
    same_bits(*results)


def test_functions_that_others_have_put_there_are_called(monkeypatch):
    m = model()
    accelerate(m, POLICY)
    want = run(m)
    for holder, name in ((llama, "create_attention_mask"), (caches.KVCache, "make_mask")):
        seen = []
        own = getattr(holder, name)
        with monkeypatch.context() as p:
            p.setattr(holder, name, lambda *a, own=own, seen=seen, **k: (seen.append(1), own(*a, **k))[1])
            same_bits(run(m), want)
        assert seen


def test_embeddings_instead_of_tokens(monkeypatch):
    results = []
    for m in pair(monkeypatch):
        cache, ran = filled(m), watch(monkeypatch)
        x = m.model.embed_tokens(mx.array([[7]])) * 2
        y = m(mx.array([[0]]), cache=cache, input_embeddings=x)
        assert True not in ran
        results.append([np.array(y)])
    same_bits(*results)


def test_the_cache_stays_where_it_is_while_tokens_are_queued():
    m = model()
    accelerate(m, POLICY)
    cache = filled(m)
    address = lambda: [np.asarray(memoryview(a)).ctypes.data for c in cache for a in (c.keys, c.values)]  # noqa: E731
    y = mx.argmax(m(mx.array([[7]]), cache=cache)[:, -1], axis=-1)
    mx.eval(y)
    before = address()
    for _ in range(40):
        # As generation loops do: the next token is queued before this one is there.
        y = mx.argmax(m(y[:, None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(y)
    assert address() == before


def test_a_cache_that_others_hold_is_not_written_to():
    m = model()
    accelerate(m, POLICY)
    cache = filled(m)
    held = [(c.keys, np.array(c.keys)) for c in cache]
    views = [(c.values[:, :, :3], np.array(c.values[:, :, :3])) for c in cache]
    mx.eval([v for v, _ in views])
    mx.eval(m(mx.array([[6]]), cache=cache))
    for array, before in (*held, *views):
        assert np.array(array).tobytes() == before.tobytes()


def test_in_a_trace_the_layers_run(monkeypatch):
    m = model()
    accelerate(m, POLICY)
    cache = filled(m)
    arrays = [(c.keys, c.values) for c in cache]

    def step(token, arrays):
        mine = [_as(c, caches.KVCache) for c in cache]
        for c, (keys, values) in zip(mine, arrays, strict=True):
            c.keys, c.values = keys, values
        return m(token, cache=mine)

    same_bits([np.array(mx.compile(step)(mx.array([[7]]), arrays))], [np.array(step(mx.array([[7]]), arrays))])


def test_it_is_undone():
    m = model()
    before = snapshot(m)
    want = run(m)
    accelerate(m, POLICY)
    assert type(m.model).__name__ == "LlamaModel" and type(m.model) is not llama.LlamaModel
    run(m)
    restore(m)
    assert snapshot(m) == before and type(m.model) is llama.LlamaModel
    same_bits(run(m), want)


def test_the_model_can_be_freed():
    m = model()
    made.pop()
    accelerate(m, POLICY)
    run(m)
    seen = [weakref.ref(m), weakref.ref(m.model), weakref.ref(m.model.layers[0])]
    del m
    gc.collect()
    assert [r() for r in seen] == [None] * 3


def test_a_wrong_stack_is_not_used(monkeypatch):
    right = joined_stack.JoinedStack.__call__

    def wrong(self, *args):
        y = right(self, *args)
        return y if y is NotImplemented else y * (1 + 1e-6)

    monkeypatch.setattr(joined_stack.JoinedStack, "__call__", wrong)
    m = model()
    report = accelerate(m, POLICY)
    assert "stack" not in {d.site.kind for d in blocks(report)}
    assert any("core/joined failed verification at 1 site" in note for note in report.notes)
    [(reason, paths)] = report.unjoined.items()
    assert paths == ["model"] and "differs from its layers" in reason
    assert type(m.model) is llama.LlamaModel


def test_it_is_used_unless_it_is_slower():
    for lighter, ratio, used in ((True, 1.0, True), (True, 0.985, True), (True, 0.9, False), (False, 1.0, False)):
        offer = Offer("joined", lambda module: None, rows=(1, 16), row_invariant=True, lighter=lighter)
        candidate = Candidate(offer, functions={0: print})
        assert candidate.raced_rows() == ([1] if lighter else [1, 4, 16])
        candidate.timings = {m: Timing(1.0, ratio, 0.02) for m in (1, 4, 16)}
        order, reasons = decide.ranking([candidate], (1, 16), deterministic=False)
        assert bool(order) == used
        assert used or reasons["joined"].endswith("slower" if lighter else "no measured win")


def test_large_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(joined_stack, "MOST_BYTES", 1000)
    report = accelerate(model(), POLICY)
    assert {d.site.kind for d in blocks(report)} == {"layer"}
    assert any("so many weights" in reason for reason in report.unjoined)
