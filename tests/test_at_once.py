"""A stack evaluated at once, its caches changed in place: only where nobody can tell, and everybody waits for it."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as caches
from test_joined import POLICY, model, pytestmark, restored, same_bits
from test_joined_stack import filled, plan_of

from backend_core import accelerate, native

__all__ = ["pytestmark", "restored"]  # what the tests here need too


@pytest.fixture
def joined():
    m = model()
    accelerate(m, POLICY)
    return m


def count(m):
    """A list that grows with each call of a model's stack: True where it was evaluated at once."""
    plan, done = plan_of(m), []
    real = plan.at_once

    def call(*args):
        y = real(*args)
        done.append(y is not None)
        return y

    plan.at_once = call
    return done


def as_nodes(m):
    """From now on the stack makes graph nodes."""
    plan_of(m).at_once = lambda *args: None


def arrays(cache):
    return [a for c in cache for a in (c.keys, c.values)]


def tokens(m, cache, n, first=7):
    """Logits of n tokens, each the most likely one behind the last, queued one ahead as generation loops do."""
    y, found = mx.array([first]), []
    for _ in range(n):
        logits = m(y[:, None], cache=cache)[:, -1]
        y = mx.argmax(logits, axis=-1)
        mx.async_eval(y, logits)
        mx.eval(found[-1:])
        found.append(logits)
    return [np.array(logits) for logits in found]


def test_the_bits_of_graph_nodes(joined):
    done = count(joined)
    mine = filled(joined)
    got = tokens(joined, mine, 12)
    assert done == [True] * 12
    as_nodes(joined)
    other = filled(joined)
    same_bits(got, tokens(joined, other, 12))
    same_bits([np.array(a) for a in arrays(mine)], [np.array(a) for a in arrays(other)])
    assert [c.offset for c in mine] == [c.offset for c in other] == [15, 15]


def test_the_arrays_stay_the_same_objects(joined):
    cache = filled(joined)
    before = [id(a) for a in arrays(cache)]
    tokens(joined, cache, 3)
    assert [id(a) for a in arrays(cache)] == before


def test_whoever_evaluates_a_cache_waits_for_the_token(joined):
    """Nothing else is evaluated: keys have the new position, as they have in a cache whose token was waited for."""
    waited = filled(joined)
    mx.eval(joined(mx.array([[7]]), cache=waited))
    for wait in (lambda a: mx.eval(a), lambda a: np.array(a), lambda a: mx.eval(a + 1)):
        cache = filled(joined)
        joined(mx.array([[7]]), cache=cache)
        for a, b in zip(arrays(cache), arrays(waited), strict=True):
            wait(a)
            assert np.array(a[:, :, :4]).tobytes() == np.array(b[:, :, :4]).tobytes()


def view_evaluated(cache):
    view = cache[1].values[:, :, :3]
    mx.eval(view)
    return view


HOLDERS = {
    "the array": lambda cache: cache[0].keys,
    "a view": view_evaluated,
    "a view that is not evaluated": lambda cache: cache[0].values[:, :, 1:3],
    "a sum that is not evaluated": lambda cache: cache[1].keys + 0,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_others_hold_is_not_changed(joined, name):
    cache, other = filled(joined), filled(joined)
    want = np.array(HOLDERS[name](other))
    done = count(joined)
    held = HOLDERS[name](cache)
    y = joined(mx.array([[7]]), cache=cache)
    assert done == [False]
    mx.eval(y)
    assert np.array(held).tobytes() == want.tobytes()
    as_nodes(joined)
    same_bits([np.array(y)], [np.array(joined(mx.array([[7]]), cache=other))])


def test_what_is_queued_before_sees_the_old_values(joined):
    cache, other = filled(joined), filled(joined)
    tokens(joined, cache, 1), tokens(joined, other, 1)
    want = np.array(other[0].keys)
    copies = cache[0].keys * 1
    mx.async_eval(copies)
    tokens(joined, cache, 2)
    assert np.array(copies).tobytes() == want.tobytes()


def test_caches_in_turns(joined):
    """Two sequences, token by token, each as if it were alone."""
    alone = [tokens(joined, filled(joined), 6, first) for first in (7, 9)]
    mine = [filled(joined), filled(joined)]
    y, got = [mx.array([7]), mx.array([9])], [[], []]
    for _ in range(6):
        for i in (0, 1):
            got[i].append(joined(y[i][:, None], cache=mine[i])[:, -1])
            y[i] = mx.argmax(got[i][-1], axis=-1)
            mx.async_eval(y[i])
    for i in (0, 1):
        same_bits([np.array(a) for a in got[i]], alone[i])


def test_a_copied_cache_goes_its_own_way(joined):
    cache = filled(joined)
    tokens(joined, cache, 2)
    other = copy.deepcopy(cache)
    got, same = tokens(joined, cache, 3), tokens(joined, other, 3)
    same_bits(got, same)


def test_a_cache_that_is_dropped_while_its_token_is_queued(joined):
    want = tokens(joined, filled(joined), 1)
    for _ in range(20):
        cache = filled(joined)
        y = joined(mx.array([[7]]), cache=cache)
        del cache
        gc.collect()
        junk = [mx.full((64, 64), 7.0) for _ in range(8)]  # takes memory that is free
        mx.eval(junk)
        same_bits([np.array(y[:, -1])], want)


def test_trimmed_and_used_again(joined):
    cache = filled(joined)
    first = tokens(joined, cache, 4)
    caches.trim_prompt_cache(cache, 4)
    same_bits(tokens(joined, cache, 4), first)


def test_arrays_of_another_stream(joined):
    """What another stream makes is not waited for by ours: the graph takes care of it."""
    cache, want = filled(joined), tokens(joined, filled(joined), 1)
    with mx.stream(mx.new_stream(mx.cpu)):
        for c in cache:
            c.keys, c.values = c.keys * 1, c.values * 1
        mx.async_eval(arrays(cache))
    done = count(joined)
    same_bits(tokens(joined, cache, 1), want)
    assert done == [False]


def test_tokens_that_are_not_evaluated_yet(joined):
    want = tokens(joined, filled(joined), 1)
    cache, done = filled(joined), count(joined)
    y = joined(mx.argmax(mx.arange(8) * 1.0)[None, None], cache=cache)
    assert done == [True]
    same_bits([np.array(y[:, -1])], want)


def test_what_is_no_cache_or_program(joined):
    cache = filled(joined)
    run, plan = native.get().run_at_once, plan_of(joined)
    programs, params = plan.programs, (3, plan.way, 4)
    x = mx.array([[7]])
    with pytest.raises(TypeError, match="not a program"):
        run([print], x, arrays(cache), params)
    with pytest.raises(TypeError, match="x is not"):
        run(programs, 7, arrays(cache), params)
    with pytest.raises(TypeError, match="a cache is not"):
        run(programs, x, [*arrays(cache)[:-1], None], params)
    with pytest.raises(TypeError, match="fewer caches"):
        run(programs, x, arrays(cache)[:-1], params)
    with pytest.raises(TypeError, match="not as many caches"):
        run(programs, x, [*arrays(cache), mx.zeros(3)], params)
    assert [c.offset for c in cache] == [3, 3]
