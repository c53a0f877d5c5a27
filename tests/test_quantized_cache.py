"""Attention over quantized KV caches: decided at the first call, routed, recorded, given back."""

from __future__ import annotations

import mlx.core as mx
import pytest
import tiny_models
import toys
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from test_attention import DETERMINISTIC, plugin
from test_models import close

from backend_core import Offer, accelerate, restore
from backend_core.integrations import attention as routes
from backend_core.report import STOCK


def quantized_plugin(change=lambda y: y, seen: list | None = None, declines=()):
    """Every row by itself; float sites are served by the same plugin."""
    floats = plugin()

    def select_attention(site):
        if not site.kv_bits:
            return floats.select_attention(site)

        def attention(q, k, v, cache, scale, mask, sinks):
            if seen is not None:
                seen.append((q.shape[2], site.kv_bits, site.kv_group_size))
            if q.shape[2] in declines:
                return NotImplemented
            wide = [mx.dequantize(*a, group_size=cache.group_size, bits=cache.bits).astype(mx.float32) for a in (k, v)]
            return change(floats_attention(q, *wide, scale, mask))

        def floats_attention(q, k, v, scale, mask):
            length, keys = q.shape[2], k.shape[2]
            parts = []
            for i in range(length):
                last = keys - length + i + 1 if isinstance(mask, str) else keys
                row = None if mask is None or isinstance(mask, str) else mask[..., i : i + 1, :]
                parts.append(mx.fast.scaled_dot_product_attention(
                    q[:, :, i : i + 1], k[:, :, :last], v[:, :, :last], scale=scale, mask=row))  # fmt: skip
            return mx.concatenate(parts, axis=2)

        return Offer("codes", lambda module: attention, row_invariant=True)

    return toys.module_with(select_attention=select_attention)


def caches(model, bits=8, group_size=32):
    return [QuantizedKVCache(group_size=group_size, bits=bits) for _ in model.layers]


def steps(model, cache):
    out = [model(mx.array([t]), cache=cache) for t in ([1, 5, 3, 7, 2], [11], [8, 6])]
    mx.eval(out)
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_decided_at_the_first_call_and_given_back(bits) -> None:
    model = tiny_models.build("llama", bits=4)
    want = steps(model, caches(model, bits))
    seen: list = []
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=quantized_plugin(seen=seen)))
    assert not any(getattr(d.site, "kv_bits", 0) for d in report.decisions)
    close(steps(model, caches(model, bits)), want)
    [decision] = [d for d in report.decisions if getattr(d.site, "kv_bits", 0)]
    assert decision.chosen == "p/codes" and decision.site.kv_group_size == 32, decision.losers
    assert f"{bits}-bit g32" in decision.site.describe() and f"{bits}-bit g32; p/codes runs" in report.line()
    seen.clear()
    steps(model, caches(model, bits))
    # Once per call and layer: nothing is decided again.
    assert seen == [(n, bits, 32) for n in (5, 1, 2) for _ in model.layers]
    assert len([d for d in report.decisions if getattr(d.site, "kv_bits", 0)]) == 1
    restore(model)
    assert not routes._table and not routes._shapes
    for x, y in zip(steps(model, caches(model, bits)), want, strict=True):
        assert mx.array_equal(x, y)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda y: y * 1.001, "times the rounding bound"), (lambda y: y[..., :-1], "result has shape")],
)
def test_wrong_offers_stay_stock_and_say_why(change, reason) -> None:
    model = tiny_models.build("llama", bits=4)
    want = steps(model, caches(model))
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=quantized_plugin(change)))
    for x, y in zip(steps(model, caches(model)), want, strict=True):
        assert mx.allclose(x, y, rtol=1e-4, atol=1e-4)
    [decision] = [d for d in report.decisions if getattr(d.site, "kv_bits", 0)]
    assert decision.chosen == STOCK and reason in decision.losers[0].reason
    restore(model)


def test_a_cache_that_is_quantized_on_the_way() -> None:
    model = tiny_models.build("llama", bits=4, dtype="float32")
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=quantized_plugin()))
    cache = make_prompt_cache(model)
    model(mx.array([[1, 5, 3, 7, 2]]), cache=cache)
    assert all(type(c) is KVCache for c in cache)
    cache = [c.to_quantized(group_size=32, bits=8) for c in cache]
    y = model(mx.array([[11]]), cache=cache)
    [decision] = [d for d in report.decisions if getattr(d.site, "kv_bits", 0)]
    assert decision.chosen == "p/codes"
    restore(model)
    again = make_prompt_cache(model)
    model(mx.array([[1, 5, 3, 7, 2]]), cache=again)
    want = model(mx.array([[11]]), cache=[c.to_quantized(group_size=32, bits=8) for c in again])
    close([y], [want])


def test_other_models_and_direct_calls_run_stock() -> None:
    model, other = tiny_models.build("llama", bits=4), tiny_models.build("llama", bits=4, seed=1)
    want = steps(other, caches(other))
    seen: list = []
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=quantized_plugin(seen=seen)))
    steps(model, caches(model))
    seen.clear()
    for x, y in zip(steps(other, caches(other)), want, strict=True):
        assert mx.array_equal(x, y)
    cache = QuantizedKVCache(group_size=32, bits=8)
    k = mx.random.normal((1, 2, 5, 32), key=mx.random.key(0))
    keys, values = cache.update_and_fetch(k, k)
    q = mx.random.normal((1, 6, 1, 32), key=mx.random.key(1))
    base.scaled_dot_product_attention(q, keys, values, cache, 0.2, None)
    assert seen == []
    restore(model)


def test_declined_calls_run_stock() -> None:
    model = tiny_models.build("llama", bits=4)
    want = steps(model, caches(model))
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=quantized_plugin(declines=(5,))))
    close(steps(model, caches(model)), want)
    restore(model)
