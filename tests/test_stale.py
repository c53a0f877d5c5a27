"""Layers whose weights change after selection, traces, and callables that outlive accelerate or restore."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
import toys
from mlx.utils import tree_map

from backend_core import Policy, accelerate, native, restore

DETERMINISTIC = Policy(deterministic=True, activations="model")
X = mx.array([[3, 1, 4, 1, 5]])


class Probe(nn.Module):
    """Two layers; the toy plugin keeps a copy of their weights, as a kernel with repacked weights does."""

    def __init__(self, bits: int = 4) -> None:
        super().__init__()
        mx.random.seed(0)
        self.a = nn.Linear(64, 96, bias=True)
        self.b = nn.Linear(96, 32, bias=False)
        if bits:
            nn.quantize(self, group_size=32, bits=bits)

    def __call__(self, x: mx.array) -> mx.array:
        return self.b(self.a(x))


def probe(bits: int = 4) -> tuple[Probe, object]:
    model = Probe(bits)
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    assert all(d.chosen == "exact/exact" for d in report.decisions)
    return model, report


def agree(model: Probe, x: mx.array) -> None:
    """The accelerated model computes what a stock model with the same parameters computes."""
    twin = Probe(bits=getattr(model.a, "bits", 0))
    for name in ("a", "b"):
        for key, value in getattr(model, name).items():
            getattr(twin, name)[key] = value
    got, want = model(x), twin(x)
    assert mx.abs(got - want).max().item() <= 1e-4 * mx.abs(want).max().item()


x = mx.random.normal((3, 64), key=mx.random.key(1))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_weights([(k, v) for k, v in _flat(_other())]),
        lambda m: m.update(_other().parameters()),
        lambda m: setattr(m.a, "scales", m.a.scales * 2),
        lambda m: setattr(m.a, "weight", m.a.weight + 1),
        lambda m: setattr(m.a, "bias", m.a.bias + 1),
        lambda m: m.update(tree_map(lambda p: p + 0, m.parameters())),
        lambda m: m.a.scales.__imul__(3.0),
        lambda m: m.a.scales.__setitem__((0, 0), 7.0),
        lambda m: m.a.bias.__iadd__(5.0),
        lambda m: m.a.weight.__setitem__(0, 0),
    ],
    ids=[
        "load_weights",
        "update",
        "scales",
        "weight",
        "bias",
        "same values in other arrays",
        "in place: scales",
        "in place: one scale",
        "in place: bias",
        "in place: weight",
    ],
)
def test_replaced_weights_are_used_and_reported(change, request) -> None:
    if "in place" in request.node.callspec.id and not native.available():
        pytest.skip("only the native module sees what is inside an mx.array object")
    model, report = probe()
    change(model)
    agree(model, x)
    assert any(n.startswith("a: its weights were replaced") for n in report.notes), report.notes
    # accelerate again serves the new weights.
    fresh = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    assert fresh is not report and all(d.chosen == "exact/exact" for d in fresh.decisions)
    agree(model, x)
    assert not any("replaced" in n for n in fresh.notes)


def test_set_dtype_is_noticed() -> None:
    model, report = probe()
    model.set_dtype(mx.float16)
    y = model(x.astype(mx.float16))
    assert y.dtype == mx.float16
    assert any("replaced" in n for n in report.notes)


def test_a_bias_added_later_is_used() -> None:
    model, _ = probe()
    model.b.bias = mx.full((32,), 100.0)
    assert model(x).min().item() > 50


def test_fuse_of_lora_gives_a_stock_layer_with_the_merged_weight() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_models.build("llama")
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 5.0, "dropout": 0.0})
    layer = model.layers[0].self_attn.q_proj
    layer.lora_b = mx.ones(layer.lora_b.shape) * 0.1
    want = layer(mx.ones((1, 96)))
    fused = layer.fuse()
    assert type(fused) is nn.Linear
    assert mx.abs(fused(mx.ones((1, 96))) - want).max().item() < 1e-4


def test_zero_rows_never_reach_stock() -> None:
    model, _ = probe()
    assert model(mx.zeros((0, 64))).shape == (0, 32)
    assert model(mx.zeros((2, 0, 64))).shape == (2, 0, 32)


def test_zero_rows_of_switch_and_multi_layers() -> None:
    model = tiny_models.build("deepseek_v3", bits=4)
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    switch = model.model.layers[1].mlp.switch_mlp.up_proj
    y = switch(mx.zeros((0, 1, 1, 128)), mx.zeros((0, 2), mx.uint32))
    assert y.shape == (0, 2, 1, 64)
    multi = model.model.layers[0].self_attn.embed_q
    assert multi(mx.zeros((1, 4, 0, 32))).shape == (1, 4, 0, 64)
    assert multi(mx.zeros((1, 4, 0, 64)), transpose=False).shape == (1, 4, 0, 32)


def test_another_activations_dtype_is_decided_at_its_first_use() -> None:
    model, report = probe()
    y = model(x.astype(mx.float16))
    # float16 activations on float32 scales give float32, as in stock
    assert y.dtype == mx.float32
    agree(model, x.astype(mx.float16))
    assert any("also called with float16 activations; exact/exact runs" in n for n in report.notes), report.notes
    agree(model, x)


def test_compile_traces_the_installed_callable_and_replays_at_other_rows() -> None:
    model, _ = probe()
    want = {m: model(x[:1].reshape(1, 64) if m == 1 else mx.broadcast_to(x[:1], (m, 64))) for m in (1, 3, 20)}
    for shapeless in (False, True):
        compiled = mx.compile(lambda v: model(v), shapeless=shapeless)
        for m in (1, 3, 20):
            got = compiled(mx.broadcast_to(x[:1], (m, 64)))
            assert got.shape == (m, 32)
            assert mx.abs(got - want[m]).max().item() < 1e-5


def test_range_limited_offers_do_not_run_inside_a_shapeless_trace() -> None:
    from backend_core import Offer

    if not native.available():
        pytest.skip("a shapeless trace is only visible with the native module")
    seen = []

    def select_linear(site):
        def build(module):
            right = toys.dequantized(site, module)

            def call(v):
                seen.append(v.size // site.k)
                assert v.size // site.k <= 16
                return right(v)

            return call

        return Offer("small", build, rows=(1, 16), row_invariant=True)

    model = Probe()
    accelerate(
        model,
        DETERMINISTIC,
        host=toys.host(DETERMINISTIC, small=toys.module_with(select_linear=select_linear)),
    )
    seen.clear()
    compiled = mx.compile(lambda v: model(v), shapeless=True)
    assert compiled(x[:1]).shape == (1, 32)
    assert compiled(mx.broadcast_to(x[:1], (40, 64))).shape == (40, 32)
    assert seen == []
    model(x)
    assert seen == [3, 3]
    model(mx.broadcast_to(x[:1], (40, 64)))
    assert seen == [3, 3]


def test_a_callable_compiled_before_accelerate_keeps_what_it_traced() -> None:
    """The documented limit: a trace made before is stock for ever, one made while accelerated stays so."""
    model = Probe()
    before = mx.compile(lambda v: model(v))
    want = before(x)
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    assert mx.array_equal(before(x), want)
    during = mx.compile(lambda v: model(v))
    got = during(x)
    method = model.a.__call__
    restore(model)
    assert mx.array_equal(during(x), got)
    assert mx.abs(got - want).max().item() < 1e-4
    # A bound method taken from an accelerated layer has lost its slot: it is stock again.
    assert mx.array_equal(method(x), model.a(x))


def test_traces_with_captured_state_are_not_taken_for_changed_weights() -> None:
    """mx.compile puts other Python objects for the very same arrays back into the module."""
    if not native.available():
        pytest.skip("only the native module can tell that two mx.array objects are one array")
    model, report = probe()
    step = mx.compile(lambda v: model(v), inputs=[model.state])
    got = step(x)
    agree(model, x)
    assert mx.abs(got - model(x)).max().item() < 1e-4
    assert not any("replaced" in n for n in report.notes), report.notes


def _other() -> Probe:
    other = Probe()
    for layer in (other.a, other.b):
        layer.scales = layer.scales * 3
        layer.biases = layer.biases * 3
    return other


def _flat(model: nn.Module) -> list:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def test_a_wrong_width_is_stocks_error_at_once() -> None:
    model, _ = probe()
    with pytest.raises(ValueError):
        mx.eval(model.a(mx.ones((2, 63))))
    agree(model, x)


def test_activations_that_are_no_floats_go_to_stock() -> None:
    model, _ = probe(bits=0)
    ints = mx.ones((2, 64), mx.int32)
    stock = type(model.a).__mro__[1]
    assert mx.array_equal(model.a(ints), stock.__call__(model.a, ints))


def test_a_part_can_be_decided_again_or_restored() -> None:
    model, report = probe()
    inner = accelerate(model.a, Policy(deterministic=True, activations="model", plugins="none"))
    assert inner.counts() == {"stock": 1} and type(model.a) is nn.QuantizedLinear
    assert any("a part of this model" in n for n in report.notes)
    agree(model, x)
    again = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    assert again is not report and all(d.chosen == "exact/exact" for d in again.decisions)
