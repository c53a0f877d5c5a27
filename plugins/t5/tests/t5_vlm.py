"""A tiny vision model of mlx-vlm with ternary 2-bit text layers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import mlx.core as mx
import t5_checkpoints as cp

CONFIG = {
    "model_type": "qwen2_vl", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 320,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "tie_word_embeddings": True,
    "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302,
    "vision_config": {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4,
                      "patch_size": 14, "in_channels": 3},
}  # fmt: skip


def save_vlm(directory: Path) -> Path:
    """Write the model as a 2-bit checkpoint."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    module = importlib.import_module("mlx_vlm.models.qwen2_vl")
    built = module.ModelConfig.from_dict(json.loads(json.dumps(CONFIG)))
    built.vision_config = module.VisionConfig.from_dict(CONFIG["vision_config"])
    built.text_config = module.TextConfig.from_dict(built.text_config)
    mx.random.seed(0)
    model = module.Model(built)
    nn.quantize(model.language_model, group_size=64, bits=2)
    cp.ternarize(model.language_model)
    directory.mkdir()
    cp.write_shards(directory, dict(tree_flatten(model.parameters())), 1)
    quantization = {"group_size": 64, "bits": 2}
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization": quantization}))
    return directory
