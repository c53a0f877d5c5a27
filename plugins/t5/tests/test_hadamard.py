"""A model of mlx-lm whose layers call mx.quantized_matmul and mx.dequantize themselves, on rotated inputs."""

import importlib
import json

import mlx.core as mx
import mlx_lm
import pytest
import t5_checkpoints as cp
from mlx.utils import tree_flatten
from t5_ternary import calls, repack

from backend_core import Policy, load

TEXT = {
    "model_type": "qwen3_5_text", "hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 320,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}  # fmt: skip
PATHS = [f"model.layers.{i}.mlp.{p}" for i in range(2) for p in ("gate_proj", "up_proj", "down_proj")]
CONFIG = {
    "model_type": "prism_hadamard_qwen35", "text_config": TEXT, "schema_version": 2,
    "tensor_namespace": "mlx-vlm-qwen3_5", "gdn_activation_layout": "grouped", "eos_token_id": 0,
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [{"path": path, "embedding": path.endswith("tokens"), "dtype": "float16", "block": 512}
                for path in (*PATHS, "model.embed_tokens")],
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    module = importlib.import_module("mlx_lm.models.prism_hadamard_qwen35")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(CONFIG))))
    cp.ternarize(model)
    for _, layer in model.named_modules():
        if "signs" in layer:
            layer.signs = mx.where(mx.random.uniform(shape=layer.signs.shape) > 0.5, 1.0, -1.0)
    source, packed = tmp_path_factory.mktemp("src"), tmp_path_factory.mktemp("out") / "t5"
    cp.write_shards(source, dict(tree_flatten(model.parameters())), 1)
    (source / "config.json").write_text(json.dumps(CONFIG))
    cp.write_tokenizer(source)
    repack.write(repack.plan(source), packed, verify=True)
    return source, packed


@pytest.mark.parametrize("t5", ["packed", "expand"])
def test_same_logits(made, t5):
    source, packed = made
    tokens = mx.array([[1, 5, 9, 200]])
    want = mlx_lm.load(str(source))[0](tokens)
    policy = Policy(race="off", report="none", activations="model", plugin_options=(("t5", t5),))
    try:
        model, _ = load(packed, policy)
        layer = model.language_model.model.layers[0].mlp.up_proj
        assert type(layer).__name__ == "HadamardQuantizedLinear"
        assert layer.weight.dtype == (mx.uint8 if t5 == "packed" else mx.uint32)
        got = model(tokens)
    finally:
        calls.uninstall()
    assert mx.abs(got - want).max().item() <= (1e-5 if t5 == "packed" else 0)
