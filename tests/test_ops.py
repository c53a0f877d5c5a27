"""Ops between the linear layers: references, verification and installation of norms and rotary embeddings."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
import toys
from test_models import close, snapshot

from backend_core import Offer, Policy, accelerate, reference_ops, restore
from backend_core.errors import VerificationError
from backend_core.integrations import functions, scope
from backend_core.probes_registry import probe_for
from backend_core.report import STOCK
from backend_core.sites import OpSite

DETERMINISTIC = Policy(deterministic=True, activations="model")


def within(y: mx.array, y64: np.ndarray, bound: np.ndarray) -> None:
    off = np.abs(np.array(y.astype(mx.float32)).astype(np.float64) - y64)
    assert (off <= bound).all(), float((off / bound).max())


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 33), (1, 1, 577)])
def test_norm_references_agree_with_stock_in_float32(shape) -> None:
    x = mx.random.normal(shape, key=mx.random.key(0)) * 3
    x64 = np.array(x).astype(np.float64)
    w = mx.random.normal(shape[-1:], key=mx.random.key(1))
    b = mx.random.normal(shape[-1:], key=mx.random.key(2))
    w64, b64 = np.array(w).astype(np.float64), np.array(b).astype(np.float64)
    y64 = reference_ops.rms_norm(x64, w64, 1e-5)
    within(mx.fast.rms_norm(x, w, 1e-5), y64, reference_ops.rms_norm_bound(y64, "float32"))
    y64 = reference_ops.layer_norm(x64, w64, b64, 1e-5)
    bound = reference_ops.layer_norm_bound(x64, w64, b64, 1e-5, y64, "float32")
    within(mx.fast.layer_norm(x, w, b, 1e-5), y64, bound)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("features", [32, 48])
def test_rope_reference_agrees_with_stock(traditional, features) -> None:
    x = mx.random.normal((2, 3, 7, features), key=mx.random.key(0))
    y64 = reference_ops.rope(np.array(x).astype(np.float64), 32, traditional, 10000.0, 1.0, 5)
    y = mx.fast.rope(x, 32, traditional=traditional, base=10000.0, scale=1.0, offset=5)
    # Stock's angles are float32: an error of about position * 2^-24.
    assert np.abs(np.array(y) - y64).max() < 12 * 2**-22
    assert np.array_equal(y64[..., 32:], np.array(x)[..., 32:])


def op_plugin(factor: float = 1.0, ops=("rms_norm", "rope")):
    """Norms and rotary embeddings from plain operations; off by `factor`."""

    def select_op(site):
        if site.op not in ops or site.rope_freqs:
            return None

        def build(module):
            if site.op == "rope":
                return lambda x, offset: rope(module, x, offset) * factor
            w = module["weight"]

            def norm(x):
                wide = x.astype(mx.float32)
                scale = mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + module.eps)
                return (wide * scale * w.astype(mx.float32) * factor).astype(getattr(mx, site.out_dtype))

            return norm

        return Offer("toy", build, row_invariant=True)

    return toys.module_with(select_op=select_op)


def rope(module: nn.RoPE, x: mx.array, offset: int) -> mx.array:
    """Not traditional, with angles in float64 on the host."""
    half = module.dims // 2
    angles = (offset + np.arange(x.shape[-2]))[:, None] * module.scale * module.base ** (-np.arange(half) / half)
    cos, sin = mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))
    wide = x.astype(mx.float32)
    a, b, tail = wide[..., :half], wide[..., half : module.dims], wide[..., module.dims :]
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos, tail], axis=-1).astype(x.dtype)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "qwen3_5"])
def test_norms_and_rope_are_installed_and_restored(name) -> None:
    model = tiny_models.build(name, bits=4)
    want, before = tiny_models.logits(model), snapshot(model)
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=op_plugin()))
    ops = [d for d in report.decisions if d.site.hook == "select_op"]
    asked = [d for d in ops if d.site.op in ("rms_norm", "rope") and not d.site.rope_freqs]
    assert asked and {d.chosen for d in asked} == {"p/toy"}, asked[0]
    assert all(len(d.buckets) == 1 and d.buckets[0].rows == (1, None) for d in ops)
    close(tiny_models.logits(model), want)
    restore(model)
    assert snapshot(model) == before
    for x, y in zip(tiny_models.logits(model), want, strict=True):
        assert mx.array_equal(x, y)


def test_wrong_ops_stay_stock_and_say_why() -> None:
    model = tiny_models.build("llama")
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=op_plugin(1 + 1e-5)))
    for d in report.decisions:
        if d.site.hook == "select_op" and d.site.op not in ("activation", "logits"):
            assert d.chosen == STOCK
            assert "times the rounding bound" in d.losers[0].reason, d.losers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ops_in_half_precision_round_once(dtype) -> None:
    model = tiny_models.build("llama", dtype=dtype)
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=op_plugin()))
    norms = [d for d in report.decisions if d.site.hook == "select_op" and d.site.op not in ("activation", "logits")]
    assert {d.chosen for d in norms} == {"p/toy"} and {d.site.out_dtype for d in norms} == {dtype}


def test_a_position_per_sequence_goes_to_stock() -> None:
    model = tiny_models.build("llama")
    layer = model.layers[0].self_attn.rope
    x = mx.random.normal((2, 3, 1, 32), key=mx.random.key(0))
    want = layer(x, offset=mx.array([3, 9]))
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=op_plugin()))
    assert "_accel" in layer.__dict__
    assert mx.array_equal(layer(x, offset=mx.array([3, 9])), want)
    assert mx.array_equal(layer(x, mx.array([3, 9])), want)
    assert layer(mx.zeros((2, 3, 0, 32)), offset=4).shape == (2, 3, 0, 32)


def test_ops_race_against_stock_at_every_number_of_rows() -> None:
    model = tiny_models.build("llama")
    report = accelerate(model, Policy(activations="model"), host=toys.host(p=op_plugin()))
    raced = [d for d in report.decisions if d.site.hook == "select_op" and d.site.op not in ("activation", "logits")]
    assert {d.site.op for d in raced} == {"rms_norm", "rope"}
    for d in raced:
        assert d.losers  # stock lost or the toy did, with a ratio
        assert "x" in d.losers[-1].reason


def swiglu_plugin(factor: float = 1.0):
    def select_op(site):
        if (site.op, site.variant) != ("activation", "swiglu"):
            return None

        def build(module):
            assert module is None

            def swiglu(gate, x):
                g = gate.astype(mx.float32)
                return ((g * mx.sigmoid(g)) * x.astype(mx.float32) * factor).astype(gate.dtype)

            return swiglu

        return Offer("toy", build, row_invariant=True)

    return toys.module_with(select_op=select_op)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_gated_activations_are_rebound_and_given_back(name) -> None:
    model = tiny_models.build(name, bits=4)
    activations = importlib.import_module("mlx_lm.models.activations")
    users = [importlib.import_module(f"mlx_lm.models.{name}"), activations]
    stock = activations.swiglu
    want = tiny_models.logits(model)
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=swiglu_plugin()))
    [decision] = [d for d in report.decisions if d.chosen == "p/toy"]
    assert decision.site.variant == "swiglu"
    assert all(u.swiglu is not stock for u in users) and users[0].swiglu is users[1].swiglu
    close(tiny_models.logits(model), want)
    other = tiny_models.build(name, bits=4)
    for x, y in zip(tiny_models.logits(other), want, strict=True):
        assert mx.array_equal(x, y)  # another model keeps stock's bits
    # What was not decided for goes to stock: other dtypes, broadcast arguments, calls from elsewhere.
    a, b = mx.ones((2, 4), mx.float16), mx.ones((1, 4))
    for x, y in ((a, a), (b, a), (b, mx.ones((2, 4)))):
        assert mx.array_equal(activations.swiglu(x, y), stock(x, y))
    assert activations.swiglu(mx.zeros((0, 4)), mx.zeros((0, 4))).shape == (0, 4)
    assert restore(model) == 1
    assert all(u.swiglu is stock for u in users)
    for x, y in zip(tiny_models.logits(model), want, strict=True):
        assert mx.array_equal(x, y)


NAMED = [key for key in functions.FUNCTIONS if key[0] == "mlx_lm"]


@pytest.mark.parametrize("key", NAMED, ids=lambda key: key[1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_named_functions_and_their_references(key, dtype, installed_plugins) -> None:
    """Stock in float32 is within a few of the bounds, and the plugin's is within them."""
    host_ops = pytest.importorskip("host_ops.plugin")
    known = functions.FUNCTIONS[key]
    importlib.import_module(known.module)
    site = OpSite(path=key[1], host=key[0], op=known.op, variant=known.variant, dims=96, x_dtype=dtype, out_dtype=dtype)
    probe = probe_for(site)
    if dtype == "float32":
        loose = Offer("stock", lambda _: None, exactness="lossy", tolerance=1e-5)
        probe.check(loose, None, [(m, probe.stock(None, *probe.args(m))) for m in (1, 5, 20)])
    offer = host_ops.select_op(site)
    function = offer.build(None)
    probe.check(offer, None, [(m, function(*probe.args(m))) for m in (1, 5, 20)])
    with pytest.raises(VerificationError):
        probe.check(offer, None, [(5, function(*probe.args(5)) * 1.01)])


def test_what_is_not_decided_for_is_stocks() -> None:
    seen = []

    def stock(*args, **options):
        return "stock"

    x = mx.ones((2, 3))
    rebound = functions.Rebound(stock, 1, {"limit": 7.0})
    rebound.by_owner[5, "float32"] = lambda *args: (seen.append(args), "ours")[1]
    token = scope.owner.set(5)
    try:
        assert rebound(30.0, x, limit=7.0) == "ours" and len(seen[0]) == 2
        for args, options in [
            ((30.0, x), {}), ((30.0, x), {"limit": 6.0}), ((30.0,), {"limit": 7.0}),
            ((30.0, x, 4.0), {"limit": 7.0}), ((30.0, x.astype(mx.float16)), {"limit": 7.0}),
            ((30.0, x[:0]), {"limit": 7.0}),
        ]:  # fmt: skip
            assert rebound(*args, **options) == "stock"
    finally:
        scope.owner.reset(token)
    assert rebound(30.0, x, limit=7.0) == "stock"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_that_multiply_by_one_plus_weight(dtype, installed_plugins) -> None:
    pytest.importorskip("host_ops")
    model = tiny_models.build("gemma3", bits=4, dtype=dtype)
    want, before = tiny_models.logits(model), snapshot(model)
    report = accelerate(model, DETERMINISTIC)
    norms = [d for d in report.decisions if getattr(d.site, "op", "") == "rms_norm"]
    assert len(norms) == 3 * 6 + 1
    assert {(d.site.variant, d.chosen) for d in norms} == {("one_plus", "host_ops/native")}
    if dtype == "float32":
        close(tiny_models.logits(model), want)
    norm = model.layers[0].input_layernorm
    x = mx.random.normal((16, 128), key=mx.random.key(2)).astype(getattr(mx, dtype))
    whole = norm(x)
    assert all(mx.array_equal(norm(x[i : i + 1]), whole[i : i + 1]) for i in range(16))
    restore(model)
    assert snapshot(model) == before
    assert all(mx.array_equal(x, y) for x, y in zip(tiny_models.logits(model), want, strict=True))


@pytest.mark.parametrize(
    ("name", "paths"),
    [("gpt_oss", ["swiglu_oai()"]), ("gemma4", ["gemma4.geglu()", "gemma4.logit_softcap()"])],
)
def test_functions_of_families(name, paths, installed_plugins) -> None:
    pytest.importorskip("host_ops")
    model = tiny_models.build(name)
    want = tiny_models.logits(model)
    report = accelerate(model, DETERMINISTIC)
    assert {report.decision(path, "select_op").chosen for path in paths} == {"host_ops/native"}
    close(tiny_models.logits(model), want)
    restore(model)
    assert all(mx.array_equal(x, y) for x, y in zip(tiny_models.logits(model), want, strict=True))


def test_wrong_activations_stay_stock() -> None:
    model = tiny_models.build("llama")
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, p=swiglu_plugin(1 + 1e-5)))
    [decision] = [d for d in report.decisions if d.site.hook == "select_op" and d.site.op == "activation"]
    assert decision.chosen == STOCK and "rounding bound" in decision.losers[0].reason
