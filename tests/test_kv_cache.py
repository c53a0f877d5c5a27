"""The KV cache of accelerated models: dtype of keys and values, updates in one operation, reversibility."""

from __future__ import annotations

import copy
import importlib

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
import toys
from mlx_lm.models import cache as kv
from mlx_lm.models.base import create_causal_mask
from test_attention import plugin, stock

from backend_core import Offer, Policy, accelerate, restore
from backend_core.integrations import cache as routes
from backend_core.report import STOCK

FLOAT32 = Policy(deterministic=True, activations="float32")
TOKENS = mx.array([[1, 5, 3, 7, 2, 9, 4]])
HALVES = ("float16", "bfloat16")
CLASSES = [cls for cls in vars(kv).values() if isinstance(cls, type) and "update_and_fetch" in vars(cls)]


def update_plugin(change=lambda pair: pair, seen: list | None = None):
    """Stock's own assignments as an offer."""

    def select_op(site):
        if site.op != "kv_update":
            return None

        def update(cached_keys, cached_values, keys, values, offset):
            if seen is not None:
                seen.append((keys.shape, keys.dtype, cached_keys.dtype))
            end = offset + keys.shape[2]
            pair = mx.stop_gradient(cached_keys), mx.stop_gradient(cached_values)
            for to, new in zip(pair, (keys, values), strict=True):
                to[..., offset:end, :] = new
            return change(pair)

        return Offer("assign", lambda module: update, exactness="bitwise", row_invariant=True)

    return toys.module_with(select_op=select_op)


def made(name: str = "llama", dtype: str = "float16", **plugins):
    model = tiny_models.build(name, bits=4, dtype=dtype)
    plugins = plugins or {"p": plugin()}
    return model, accelerate(model, FLOAT32, host=toys.host(FLOAT32, **plugins))


def held(cache) -> set[str]:
    if isinstance(cache, kv.CacheList):
        return set().union(*(held(c) for c in cache.caches))
    keys = cache.keys[1] if isinstance(cache.keys, (tuple, list)) else cache.keys
    values = cache.values[1] if isinstance(cache.values, (tuple, list)) else cache.values
    return {str(a.dtype).rpartition(".")[2] for a in (keys, values)}


def run(model, caches, tokens=TOKENS):
    y = model(tokens, cache=caches)
    mx.eval(y, [c.state for c in caches if not c.empty()])
    return y


def close(a, b, tolerance) -> bool:
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    return bool(np.abs(a - b).max() <= tolerance * np.abs(b).max())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_the_cache_keeps_the_checkpoints_dtype(name, dtype) -> None:
    model, report = made(name, dtype)
    caches = kv.make_prompt_cache(model)
    for tokens in (TOKENS, mx.array([[11]]), mx.array([[8, 6]])):
        y = run(model, caches, tokens)
        assert y.dtype == mx.float32
    assert {d for c in caches for d in held(c)} == {dtype}
    assert f"activations in float32, KV cache in {dtype}" in report.line()
    restore(model)


def test_bytes_are_half_and_the_report_says_how_many() -> None:
    model, report = made()
    caches = kv.make_prompt_cache(model)
    run(model, caches)
    # 2 layers, 2 heads, 256 positions of 32 elements, keys and values, 2 bytes.
    assert sum(c.nbytes for c in caches) == 2 * 2 * 256 * 32 * 2 * 2
    # A position: 2 layers, 2 heads of 32, keys and values, 2 bytes.
    assert f"KV cache in float16 ({2 * 2 * 32 * 2 * 2 / 1024:.0f} KiB a token)" in report.line()
    restore(model)
    wide, report = made(p=toys.module_with())
    caches = kv.make_prompt_cache(wide)
    run(wide, caches)
    assert held(caches[0]) == {"float32"} and "activations and KV cache in float32" in report.line()


@pytest.mark.parametrize("rows", [(1, 16), (17, None)])
def test_a_shape_that_is_not_served_at_all_rows_stays_float32(rows) -> None:
    model, report = made(p=plugin(rows=rows))
    caches = kv.make_prompt_cache(model)
    run(model, caches)
    assert held(caches[0]) == {"float32"} and "KV cache in float32" in report.line()
    restore(model)


def test_own_mathematics_keep_float32() -> None:
    """A block whose scores are capped does not call the host's function."""
    from backend_core.walk_calls import find_attention

    model = tiny_models.build("llama", bits=4, dtype="float16")
    assert {f.site.kv_dtype for f in find_attention(model, "float32")} == {"float16", "float32"}
    for layer in model.layers:
        layer.self_attn.attn_logit_softcapping = 30.0
    assert {f.site.kv_dtype for f in find_attention(model, "float32")} == {"float32"}


@pytest.mark.parametrize("make", [
    kv.KVCache, kv.ConcatenateKVCache, lambda: kv.RotatingKVCache(max_size=6, keep=2), lambda: kv.ChunkedKVCache(256),
    lambda: kv.QuantizedKVCache(group_size=32, bits=8), lambda: kv.BatchKVCache([0]),
], ids=["plain", "concatenate", "rotating", "chunked", "quantized", "batch"])  # fmt: skip
def test_every_class_of_cache(make) -> None:
    model, _ = made(p=plugin(), u=update_plugin())
    caches = [make() for _ in model.layers]
    got = [run(model, caches, t) for t in (TOKENS, mx.array([[11]]), mx.array([[8]]))]
    assert {d for c in caches for d in held(c)} == {"float16"}
    restore(model)
    # Stock in float32: what differs is that keys and values were rounded once.
    wide = tiny_models.build("llama", bits=4, dtype="float16")
    wide.set_dtype(mx.float32)
    caches = [make() for _ in wide.layers]
    for y, tokens in zip(got, (TOKENS, mx.array([[11]]), mx.array([[8]])), strict=True):
        assert close(y, run(wide, caches, tokens), 1e-2)


def test_result_is_float64_attention_over_the_rounded_keys() -> None:
    """The cache rounds keys and values once, as stock's own cache does; nothing else is lost."""
    model, _ = made()
    seen: list = []

    base = importlib.import_module("mlx_lm.models.base")
    route = base._accel_route

    def spy(q, k, v, cache, scale, mask, sinks):
        y = route(q, k, v, cache, scale, mask, sinks)
        seen.append((q, k, v, scale, mask, y))
        return y

    base._accel_route = spy
    try:
        run(model, kv.make_prompt_cache(model))
    finally:
        base._accel_route = route
    from backend_core import reference_ops

    assert len(seen) == len(model.layers)
    for q, k, v, scale, mask, y in seen:
        assert (q.dtype, k.dtype, v.dtype, y.dtype) == (mx.float32, mx.float16, mx.float16, mx.float32)
        wide = [np.array(a.astype(mx.float32)).astype(np.float64) for a in (q, k, v)]
        y64, bound = reference_ops.attention(*wide, scale, mask, None, "float32")
        assert (np.abs(np.array(y) - y64) <= bound).all()
    restore(model)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
def test_stock_promotes_mixed_dtypes(mask) -> None:
    """What is declined after all goes to stock with float32 queries over half-precision keys, and is right."""
    q, k, v = (
        mx.random.normal((1, h, n, 32), key=mx.random.key(i)) for i, (h, n) in enumerate([(4, 3), (2, 9), (2, 9)])
    )
    k, v = k.astype(mx.float16), v.astype(mx.float16)
    m = {"bool": create_causal_mask(3, 6), "additive": mx.random.normal((3, 9), key=mx.random.key(4))}.get(mask, mask)
    y = stock(q, k, v, 0.2, m, None)
    wide = stock(q, k.astype(mx.float32), v.astype(mx.float32), 0.2, m, None)
    assert y.dtype == mx.float32 and mx.array_equal(y, wide)


def test_declined_calls_reach_stock() -> None:
    asked = []

    def serves(mask):
        asked.append(mask)
        return len(asked) < 100

    model, _ = made(p=plugin(serves=serves))
    caches = kv.make_prompt_cache(model)
    want = run(model, caches)
    asked.extend([None] * 100)
    again = kv.make_prompt_cache(model)
    assert close(run(model, again), want, 1e-5) and held(again[0]) == {"float16"}
    restore(model)


def test_classes_get_their_methods_back() -> None:
    before = {cls: vars(cls)["update_and_fetch"] for cls in CLASSES}
    model, _ = made()
    assert kv.KVCache.update_and_fetch is not before[kv.KVCache]
    assert kv.KVCache.update_and_fetch.__name__ == "update_and_fetch"
    second, _ = made("qwen3")
    restore(model)
    assert kv.KVCache.update_and_fetch is not before[kv.KVCache]
    restore(second)
    assert {cls: vars(cls)["update_and_fetch"] for cls in CLASSES} == before
    assert not routes._dtypes and not routes._updates and not routes._hooked


def test_a_method_that_was_replaced_in_between_is_left_alone() -> None:
    before = kv.KVCache.update_and_fetch
    model, _ = made()
    ours = kv.KVCache.update_and_fetch

    def wrapper(self, keys, values):
        return ours(self, keys, values)

    kv.KVCache.update_and_fetch = wrapper
    try:
        restore(model)
        assert kv.KVCache.update_and_fetch is wrapper
        cache = kv.KVCache()
        keys = mx.ones((1, 2, 3, 4))
        assert mx.array_equal(cache.update_and_fetch(keys, keys)[0], keys) and held(cache) == {"float32"}
    finally:
        kv.KVCache.update_and_fetch = before


def test_caches_go_on_after_restore_and_with_other_models() -> None:
    model, _ = made(p=plugin(), u=update_plugin())
    caches = kv.make_prompt_cache(model)
    run(model, caches)
    copies = copy.deepcopy(caches)
    want = run(model, caches, mx.array([[11]]))
    restore(model)
    assert close(run(model, copies, mx.array([[11]])), want, 1e-2)
    other = tiny_models.build("llama", bits=4, dtype="float32")
    assert run(other, copies, mx.array([[3]])).dtype == mx.float32


def test_other_models_caches_are_not_cast() -> None:
    model, _ = made()
    other = tiny_models.build("llama", bits=4, dtype="float32")
    caches = kv.make_prompt_cache(other)
    run(other, caches)
    assert held(caches[0]) == {"float32"}
    restore(model)


def test_saved_trimmed_and_merged_caches(tmp_path) -> None:
    model, _ = made(p=plugin(), u=update_plugin())
    caches = kv.make_prompt_cache(model)
    run(model, caches)
    kv.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = kv.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    want = run(model, caches, mx.array([[11]]))
    assert mx.array_equal(run(model, loaded, mx.array([[11]])), want) and held(loaded[0]) == {"float16"}
    kv.trim_prompt_cache(loaded, 1)
    assert mx.array_equal(run(model, loaded, mx.array([[11]])), want)
    kv.trim_prompt_cache(loaded, 1)
    merged = [kv.BatchKVCache.merge([a, a]) for a in loaded]
    got = run(model, merged, mx.array([[11], [11]]))
    assert close(got[0], want[0], 1e-5) and held(merged[0]) == {"float16"}
    restore(model)


def test_a_cache_of_another_dtype_keeps_it(tmp_path) -> None:
    """A prompt cache that was saved by stock in float32 is not rounded."""
    wide = tiny_models.build("llama", bits=4, dtype="float32")
    caches = kv.make_prompt_cache(wide)
    run(wide, caches)
    kv.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    model, _ = made(p=plugin(), u=update_plugin())
    loaded = kv.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    run(model, loaded, mx.array([[11]]))
    assert held(loaded[0]) == {"float32"}
    restore(model)


def test_updates_are_one_call_and_a_decision() -> None:
    seen: list = []
    model, report = made(p=plugin(), u=update_plugin(seen=seen))
    [decision] = [d for d in report.decisions if getattr(d.site, "op", "") == "kv_update"]
    assert decision.chosen == "u/assign" and decision.site.path.endswith("[cache]")
    caches = kv.make_prompt_cache(model)
    run(model, caches)
    seen.clear()
    got = run(model, caches, mx.array([[11]]))
    assert seen == [((1, 2, 1, 32), mx.float32, mx.float16)] * len(model.layers)
    restore(model)
    model, _ = made()
    caches = kv.make_prompt_cache(model)
    run(model, caches)
    assert mx.array_equal(run(model, caches, mx.array([[11]])), got)
    restore(model)


@pytest.mark.parametrize("change", [
    lambda pair: (pair[0] + 1, pair[1]), lambda pair: pair[0], lambda pair: (pair[0][:, :, 1:], pair[1]),
    lambda pair: (pair[0], pair[1].astype(mx.float32)),
], ids=["wrong", "one", "shape", "dtype"])  # fmt: skip
def test_wrong_updates_stay_stock(change) -> None:
    model, report = made(p=plugin(), u=update_plugin(change))
    [decision] = [d for d in report.decisions if getattr(d.site, "op", "") == "kv_update"]
    assert decision.chosen == STOCK and decision.losers[0].reason
    assert not routes._updates
    restore(model)


def test_growth_and_odd_arguments_are_the_hosts() -> None:
    """Beyond the buffer, with other forms and in traces the host's own code runs."""
    seen: list = []
    model, _ = made(p=plugin(), u=update_plugin(seen=seen))
    token = routes.scope.owner.set(id(model))
    seen.clear()
    try:
        cache, plain = kv.KVCache(), kv.KVCache()
        stock_update = routes._hooked[kv.KVCache][0]
        for n in (5, 250, 1, 3, 300, 1):
            k, v = (mx.random.normal((1, 2, n, 32), key=mx.random.key(n + i)) for i in (0, 1))
            mine = cache.update_and_fetch(k, v)
            want = stock_update(plain, k.astype(mx.float16), v.astype(mx.float16))
            assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, want, strict=True))
            assert cache.offset == plain.offset and cache.keys.shape == plain.keys.shape
        assert [s[0][2] for s in seen] == [250, 1, 1]
        # Keys of one head for a cache of two: assignment broadcasts.
        seen.clear()
        cache.update_and_fetch(mx.ones((1, 1, 1, 32)), mx.ones((1, 1, 1, 32)))
        assert not seen and (cache.keys[:, :, cache.offset - 1] == 1).all()
        gradient = mx.grad(lambda x: cache.update_and_fetch(x, x)[0].astype(mx.float32).sum())(mx.ones((1, 2, 1, 32)))
        assert mx.array_equal(gradient, mx.ones_like(gradient)) and not seen
    finally:
        routes.scope.owner.reset(token)
    restore(model)
