"""Whole models: accelerated within the class, restored to the last bit and attribute."""

from __future__ import annotations

import copy
import json
import pickle

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
import toys
from mlx.utils import tree_flatten

from backend_core import Policy, accelerate, accelerated, report_of, restore
from backend_core.report import STOCK

DETERMINISTIC = Policy(deterministic=True, activations="model")
FAMILIES = sorted(tiny_models.CONFIGS)


def close(a: list, b: list, tolerance: float = 2e-4) -> None:
    for x, y in zip(a, b, strict=True):
        x, y = np.array(x.astype(mx.float32)), np.array(y.astype(mx.float32))
        assert x.shape == y.shape
        scale = np.abs(y).max()
        assert np.abs(x - y).max() <= tolerance * scale, np.abs(x - y).max() / scale


def snapshot(model: nn.Module) -> list:
    """Identity of everything restore() must give back."""
    return [
        (path, type(m), id(m), {k: id(v) for k, v in m.__dict__.items() if not k.startswith("_no_grad")},
         {k: id(v) for k, v in m.items()})
        for path, m in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [0, 4], ids=["dense", "4-bit"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_accelerated_within_its_class_and_restored(name: str, bits: int) -> None:
    model = tiny_models.build(name, bits=bits)
    want = tiny_models.logits(model)
    before, names = snapshot(model), [k for k, _ in tree_flatten(model.parameters())]

    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))

    assert report.decisions and all(d.chosen == "exact/exact" for d in report.decisions)
    assert [k for k, _ in tree_flatten(model.parameters())] == names
    close(tiny_models.logits(model), want)
    assert restore(model) == len(report.decisions)
    assert snapshot(model) == before
    for x, y in zip(tiny_models.logits(model), want, strict=True):
        assert mx.array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_half_precision_checkpoints_run_in_float32_on_request(name: str, dtype: str) -> None:
    exact = tiny_models.build(name, bits=4, dtype=dtype)
    parameters = {k: v.dtype for k, v in tree_flatten(exact.parameters())}
    policy = Policy(deterministic=True, activations="float32")
    report = accelerate(exact, policy, host=toys.host(policy, exact=toys.exact_plugin()))
    assert report.activations == "float32"
    assert any("float32" in n and "KiB a token" in n for n in report.notes), report.notes
    assert {k: v.dtype for k, v in tree_flatten(exact.parameters())} == parameters
    got = tiny_models.logits(exact)
    assert all(y.dtype == mx.float32 for y in got)
    # The same weights in float32 throughout are the yardstick.
    wide = tiny_models.build(name, bits=4, dtype=dtype)
    wide.set_dtype(mx.float32)
    close(got, tiny_models.logits(wide), 1e-3)
    restore(exact)
    assert tiny_models.logits(exact)[0].dtype == getattr(mx, dtype)


def test_the_cost_in_the_kv_cache_is_stated_in_bytes() -> None:
    model = tiny_models.build("llama", bits=4, dtype="float16")
    policy = Policy(activations="float32", race="off")
    report = accelerate(model, policy, host=toys.host(policy))
    # 2 (K and V) x 2 layers x 2 KV heads x 32 x 4 bytes = 1 KiB
    assert any("(1 KiB a token" in n for n in report.notes), report.notes


def test_accelerating_twice_equals_once() -> None:
    model = tiny_models.build("llama", bits=4)
    host = toys.host(DETERMINISTIC, exact=toys.exact_plugin())
    first = accelerate(model, DETERMINISTIC, host=host)
    state = snapshot(model)
    assert accelerate(model, DETERMINISTIC, host=host) is first
    assert snapshot(model) == state
    restore(model)
    assert report_of(model) is None


def test_context_manager_restores_also_after_an_exception() -> None:
    model = tiny_models.build("llama", bits=4)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="inside"), accelerated(model, Policy(race="off")):
        raise RuntimeError("inside")
    assert snapshot(model) == before
    accelerate(model, Policy(race="off"))
    with accelerated(model, Policy(race="off")):
        pass
    assert report_of(model) is not None
    restore(model)


def test_save_and_load_round_trip(tmp_path) -> None:
    model = tiny_models.build("qwen3_moe", bits=4)
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    model.save_weights(str(tmp_path / "w.safetensors"))
    other = tiny_models.build("qwen3_moe", bits=4, seed=9)
    other.load_weights(str(tmp_path / "w.safetensors"), strict=True)
    restore(model)
    for x, y in zip(tiny_models.logits(other), tiny_models.logits(model), strict=True):
        assert mx.array_equal(x, y)


def test_copies_and_pickles_are_stock_models() -> None:
    model = tiny_models.build("llama", bits=4)
    want = tiny_models.logits(model)
    stock_types = {p: type(m) for p, m in model.named_modules()}
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {p: type(m) for p, m in twin.named_modules()} == stock_types
        assert not any("_accel" in m.__dict__ for _, m in twin.named_modules())
        for x, y in zip(tiny_models.logits(twin), want, strict=True):
            assert mx.array_equal(x, y)
    layer = model.layers[0].mlp.up_proj
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):  # mx.array itself needs 2
        twin = pickle.loads(pickle.dumps(layer, protocol))
        assert type(twin) is nn.QuantizedLinear and twin.bits == 4 and mx.array_equal(twin.weight, layer.weight)
    assert type(copy.copy(layer)) is nn.QuantizedLinear


def test_introspection_is_unchanged() -> None:
    model = tiny_models.build("llama", bits=4)
    text, leaves = repr(model), [type(m).__name__ for m in model.modules()]
    state = json.dumps(sorted(dict(tree_flatten(model.leaf_modules())).keys()))
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    assert repr(model) == text and [type(m).__name__ for m in model.modules()] == leaves
    assert json.dumps(sorted(dict(tree_flatten(model.leaf_modules())).keys())) == state
    layer = model.layers[0].mlp.up_proj
    assert isinstance(layer, nn.QuantizedLinear) and "_accel" not in layer
    from mlx_lm.utils import compute_bits_per_weight, get_total_parameters

    accelerated_figures = get_total_parameters(model), compute_bits_per_weight(model)
    restore(model)
    assert accelerated_figures == (get_total_parameters(model), compute_bits_per_weight(model))


def test_lora_adapters_load_on_an_accelerated_model(tmp_path) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

    config = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    trained = tiny_models.build("llama", bits=4)
    linear_to_lora_layers(trained, 2, config)
    adapters = {k: mx.random.normal(v.shape, key=mx.random.key(i)) * 0.1
                for i, (k, v) in enumerate(tree_flatten(trained.trainable_parameters())) if "lora" in k}  # fmt: skip
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapters)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": config})
    )
    stock = load_adapters(tiny_models.build("llama", bits=4), str(tmp_path))
    want = tiny_models.logits(stock)

    # As mlx_lm.load does it: the model is accelerated first, then wrapped.
    model = tiny_models.build("llama", bits=4)
    host = toys.host(DETERMINISTIC, exact=toys.exact_plugin())
    accelerate(model, DETERMINISTIC, host=host)
    model = load_adapters(model, str(tmp_path))
    close(tiny_models.logits(model), want)
    inner = model.layers[0].self_attn.q_proj.linear
    assert "_accel" in inner.__dict__
    # And the other way round, where the site knows that it is wrapped.
    restore(model)
    report = accelerate(model, DETERMINISTIC, host=host)
    assert report.decision("model.layers.0.self_attn.q_proj.linear").site.in_lora
    close(tiny_models.logits(model), want)


def test_gradients_of_an_accelerated_model_equal_stock() -> None:
    def loss(model: nn.Module, x: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x[:, :-1]), x[:, 1:], reduction="mean")

    x = mx.array([[1, 4, 2, 8, 5, 7]])
    model = tiny_models.build("llama", bits=4)
    model.freeze()
    model.model.norm.unfreeze()
    model.layers[0].input_layernorm.unfreeze()
    value, want = nn.value_and_grad(model, loss)(model, x)
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    value2, got = nn.value_and_grad(model, loss)(model, x)
    assert value2.item() == pytest.approx(value.item(), rel=1e-4)
    for (name, a), (name2, b) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert name == name2
        assert mx.abs(a - b).max().item() <= 1e-4 * mx.abs(b).max().item() + 1e-7


def test_seeded_sampling_after_a_race_equals_sampling_without_one() -> None:
    model = tiny_models.build("llama", bits=4)
    mx.random.seed(7)
    want = mx.random.normal((8,)).tolist()
    mx.random.seed(7)
    np.random.seed(3)
    numpy_state = np.random.get_state()[1].copy()
    accelerate(model, Policy(activations="model"), host=toys.host(exact=toys.exact_plugin()))
    assert mx.random.normal((8,)).tolist() == want
    assert (np.random.get_state()[1] == numpy_state).all()


def test_rows_in_batches_and_batch_sizes(name: str = "llama") -> None:
    model = tiny_models.build(name, bits=4)
    tokens = mx.arange(2 * 20).reshape(2, 20) % tiny_models.VOCAB
    want = [model(tokens), model(tokens[:, :1]), model(tokens[:1, :3])]
    accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, exact=toys.exact_plugin()))
    close([model(tokens), model(tokens[:, :1]), model(tokens[:1, :3])], want)


def test_without_plugins_everything_stays_stock_and_says_so() -> None:
    model = tiny_models.build("llama", bits=4)
    before = snapshot(model)
    report = accelerate(model, Policy(activations="model"), host=toys.host())
    assert snapshot(model) == before
    assert report.counts() == {STOCK: 15}
    assert "15 stay stock" in report.line()
