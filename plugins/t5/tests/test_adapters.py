"""Adapters of mlx-lm around t5 layers: forward, training, fusing."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
import pytest
import t5_checkpoints as cp
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from t5_ternary import modules, repack

from backend_core import Policy, load
from backend_core.errors import ModelError

KEYS = {
    "llama": ["self_attn.q_proj", "mlp.down_proj", "model.embed_tokens"],
    "qwen3_moe": ["self_attn.q_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj"],
}
POLICY = Policy(deterministic=True, activations="model", report="none", plugin_options=(("t5", "packed"),))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Source and t5 checkpoints by model."""
    result = {}
    for name in KEYS:
        base = tmp_path_factory.mktemp(name)
        result[name] = cp.save(cp.build(name, dtype=mx.float32), name, base / "src"), base / "t5"
        repack.write(repack.plan(base / "src"), base / "t5")
    return result


def adapted(model, name: str, size: float = 0.1):
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": KEYS[name]})
    for number, (_, lora) in enumerate(model.named_modules()):
        if "lora_b" in lora:
            for part, key in (("lora_a", 2 * number), ("lora_b", 2 * number + 1)):
                setattr(lora, part, mx.random.normal(lora[part].shape, key=mx.random.key(key)) * size)
    return model


@pytest.mark.parametrize("name", list(KEYS))
def test_forward_and_fused_weights_are_those_of_the_2_bit_model(made, name):
    source, t5 = made[name]
    model, two = adapted(load(t5, POLICY)[0], name), adapted(mlx_lm.load(str(source))[0], name)
    names = {type(m).__name__ for _, m in model.named_modules()}
    assert names >= {"T5LoRALinear", "T5LoRAEmbedding" if name == "llama" else "T5LoRASwitchLinear"}
    assert set(dict(tree_flatten(model.trainable_parameters()))) == set(dict(tree_flatten(two.trainable_parameters())))
    tokens = mx.array([[5, 9, 200, 31]])
    want = two(tokens)
    assert mx.abs(model(tokens) - want).max().item() < 2e-5 * mx.abs(want).max().item()
    for m in (model, two):
        fused = [(n, layer.fuse(dequantize=True)) for n, layer in m.named_modules() if hasattr(layer, "fuse")]
        m.update_modules(tree_unflatten(fused))
    for (a, mine), (b, theirs) in zip(model.named_modules(), two.named_modules(), strict=True):
        assert a == b
        if type(theirs) in (nn.Linear, nn.Embedding):
            assert type(mine) is type(theirs)
            assert mine.weight.dtype == theirs.weight.dtype
            assert np.allclose(np.array(mine.weight), np.array(theirs.weight), atol=1e-6)
    assert mx.abs(model(tokens) - want).max().item() < 2e-5 * mx.abs(want).max().item()


@pytest.mark.parametrize("name", list(KEYS))
def test_fusing_what_is_not_ternary_names_the_layer(made, name):
    model = adapted(load(made[name][1], POLICY)[0], name)
    for path, layer in model.named_modules():
        if hasattr(layer, "fuse"):
            with pytest.raises(ModelError, match=f"^{path.removesuffix('.linear')}: .*dequantize=True"):
                layer.fuse()


def test_an_adapter_that_changes_nothing_leaves_t5(made):
    model = load(made["llama"][1], POLICY)[0]
    before = dict(model.named_modules())
    adapted(model, "llama", size=0.0)
    fused = [(n, layer.fuse()) for n, layer in model.named_modules() if hasattr(layer, "fuse")]
    assert len(fused) == 5
    assert all(isinstance(layer, (modules.T5Linear, modules.T5Embedding)) for _, layer in fused)
    model.update_modules(tree_unflatten(fused))
    assert dict(model.named_modules()).keys() == before.keys()


@pytest.mark.parametrize("name", list(KEYS))
def test_training_goes_through_t5_layers(made, name):
    """Adapters of the first block learn through the packed layers of all others: the gradients of the 2-bit model, and
    less loss after a few steps."""
    source, t5 = made[name]
    batch = mx.array(np.random.default_rng(0).integers(0, 320, (2, 24)))

    def loss(m):
        return nn.losses.cross_entropy(m(batch[:, :-1]), batch[:, 1:], reduction="mean")

    grads = []
    for model in (load(t5, POLICY)[0], mlx_lm.load(str(source))[0]):
        adapted(model, name, 0.02)
        model.freeze()
        model.model.layers[0].unfreeze(keys=["lora_a", "lora_b"], strict=False)
        step = nn.value_and_grad(model, loss)
        _, grad = step(model)
        grads.append(dict(tree_flatten(grad)))
    for path, g in grads[1].items():
        assert mx.abs(grads[0][path] - g).max().item() <= 1e-3 * mx.abs(g).max().item() + 1e-7, path
    model = load(t5, POLICY)[0]
    adapted(model, name, 0.02)
    optimizer, step = optim.Adam(1e-2), nn.value_and_grad(model, loss)
    losses = []
    for _ in range(6):
        value, grad = step(model)
        optimizer.update(model, grad)
        mx.eval(model.parameters())
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.05
