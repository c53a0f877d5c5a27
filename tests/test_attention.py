"""Attention sites: reference, verification, routing through the host's one function, restoration."""

from __future__ import annotations

import gc
import importlib

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
import toys
from test_models import close

from backend_core import Offer, Policy, accelerate, reference_ops, restore
from backend_core.report import STOCK

DETERMINISTIC = Policy(deterministic=True, activations="model")


def base():
    return importlib.import_module("mlx_lm.models.base")


def stock(q, k, v, scale, mask, sinks):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def plugin(change=lambda y: y, seen: list | None = None, serves=lambda mask: True, rows=(1, None)):
    """Every row by itself, so that it is row-invariant."""

    def select_attention(site):
        def build(module):
            assert module is None

            def attention(q, k, v, cache, scale, mask, sinks):
                if seen is not None:
                    seen.append((q.shape, k.shape, mask if isinstance(mask, str) or mask is None else "array"))
                if not serves(mask):
                    return NotImplemented
                length, keys = q.shape[2], k.shape[2]
                parts = []
                for i in range(length):
                    last = keys - length + i + 1 if isinstance(mask, str) else keys
                    row = None if mask is None or isinstance(mask, str) else mask[..., i : i + 1, :]
                    parts.append(stock(q[:, :, i : i + 1], k[:, :, :last], v[:, :, :last], scale, row, sinks))
                return change(mx.concatenate(parts, axis=2))

            return attention

        return Offer("rows", build, row_invariant=True, rows=rows)

    return toys.module_with(select_attention=select_attention)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("sinks", [False, True])
def test_reference_agrees_with_stock_in_float32(mask, sinks) -> None:
    q, k, v = (
        mx.random.normal((2, h, n, 32), key=mx.random.key(i)) for i, (h, n) in enumerate([(6, 5), (2, 9), (2, 9)])
    )
    sink = mx.random.normal((6,), key=mx.random.key(5)) if sinks else None
    seen = np.tril(np.ones((5, 9), bool), 4)
    seen[:, 3] = False
    masks = {"none": None, "causal": "causal", "bool": mx.array(seen),
             "additive": mx.array(np.where(seen, 0.5, -np.inf).astype(np.float32))}  # fmt: skip
    m = masks[mask]
    wide = [np.array(a).astype(np.float64) for a in (q, k, v)]
    m64 = m if m is None or isinstance(m, str) else np.array(m) if mask == "bool" else np.array(m).astype(np.float64)
    y64, bound = reference_ops.attention(*wide, 0.17, m64, None if sink is None else np.array(sink).astype(np.float64),
                                         "float32")  # fmt: skip
    got = np.array(stock(q, k, v, 0.17, m, sink)).astype(np.float64)
    assert (np.abs(got - y64) <= bound).all()
    assert bound.max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_attention_is_routed_and_restored(name) -> None:
    model = tiny_models.build(name, bits=4)
    want = tiny_models.logits(model)
    function, code = base().scaled_dot_product_attention, base().scaled_dot_product_attention.__code__
    seen: list = []
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin(seen=seen)))
    [decision] = [d for d in report.decisions if d.site.hook == "select_attention"]
    assert decision.chosen == "p/rows" and len(decision.buckets) == 2, decision.losers
    assert base().scaled_dot_product_attention is function and function.__code__ is not code
    seen.clear()
    close(tiny_models.logits(model), want)
    layers = len(model.layers)
    assert len(seen) == 3 * layers and seen[0][0][2] == 7
    assert restore(model) == 1
    assert function.__code__ is code and not hasattr(base(), "_accel_route")
    for x, y in zip(tiny_models.logits(model), want, strict=True):
        assert mx.array_equal(x, y)


def test_other_models_and_shapes_run_stock_while_one_is_accelerated() -> None:
    model, other = tiny_models.build("llama", bits=4), tiny_models.build("qwen3", bits=4)
    want = tiny_models.logits(other)
    seen: list = []
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin(seen=seen)))
    seen.clear()
    for x, y in zip(tiny_models.logits(other), want, strict=True):
        assert mx.array_equal(x, y)
    assert seen == []
    restore(model)


def test_quantized_caches_and_declined_masks_go_to_stock() -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    model = tiny_models.build("llama", bits=4)
    cache = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    want = model(mx.array([[1, 2, 3]]), cache=cache)
    seen: list = []
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin(seen=seen)))
    seen.clear()
    cache = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    assert mx.array_equal(model(mx.array([[1, 2, 3]]), cache=cache), want) and seen == []
    restore(model)
    picky = plugin(serves=lambda m: m is None or isinstance(m, str))
    report = accelerate(model, DETERMINISTIC,
                        host=toys.host(DETERMINISTIC, p=picky))  # fmt: skip
    [decision] = [d for d in report.decisions if d.site.hook == "select_attention"]
    assert decision.chosen == STOCK and "does not serve bool masks" in decision.losers[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda y: y * 1.0001, "times the rounding bound"), (lambda y: y[..., :-1], "result has shape"),
     (lambda y: y * (1 + 2**-23 * (y.shape[2] > 1)), "row-invariant")],
    ids=["wrong", "shape", "rows"],
)  # fmt: skip
def test_wrong_attention_stays_stock_and_says_why(change, reason) -> None:
    model = tiny_models.build("llama", bits=4)
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin(change)))
    [decision] = [d for d in report.decisions if d.site.hook == "select_attention"]
    assert decision.chosen == STOCK and reason in decision.losers[0].reason, decision.losers
    assert not hasattr(base(), "_accel_route")


def test_routes_of_a_model_that_is_gone_are_gone() -> None:
    model = tiny_models.build("llama", bits=4)
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin()))
    assert hasattr(base(), "_accel_route")
    del model
    gc.collect()
    assert not hasattr(base(), "_accel_route")


def test_a_model_of_the_same_shape_that_was_not_accelerated_keeps_stocks_bits() -> None:
    model, other = tiny_models.build("llama", bits=4), tiny_models.build("llama", bits=4, seed=1)
    want = tiny_models.logits(other)
    seen: list = []
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin(lambda y: y, seen)))
    seen.clear()
    for x, y in zip(tiny_models.logits(other), want, strict=True):
        assert mx.array_equal(x, y)
    assert seen == []
    # A part of the accelerated model is served too, whoever calls it.
    model.model(mx.array([[1, 2, 3]]))
    assert len(seen) == len(model.layers)
    restore(model)


def test_two_models_of_one_shape_have_their_own_routes() -> None:
    a, b = tiny_models.build("llama", bits=4), tiny_models.build("llama", bits=4, seed=1)
    for model in (a, b):
        accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=plugin()))
    restore(a)
    assert hasattr(base(), "_accel_route")
    restore(b)
    assert not hasattr(base(), "_accel_route")
