"""Tiny random mlx-lm models, one per architecture family, for tests."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

VOCAB = 320

#: Real architectures at toy sizes. All feature sizes are multiples of 32, as quantization needs.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 160,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB, "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5", "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 192,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
            "vocab_size": VOCAB, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2, "tie_word_embeddings": True, "max_position_embeddings": 512,
        },
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "query_pre_attn_scalar": 32, "sliding_window": 8, "sliding_window_pattern": 3,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
                         "beta_fast": 32.0, "beta_slow": 1.0},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
    "phi3": {
        "model_type": "phi3", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    },
    "olmo2": {
        "model_type": "olmo2", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "tie_word_embeddings": False,
    },
    "gemma": {
        "model_type": "gemma", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "query_pre_attn_scalar": 32,
    },
    "gemma4": {
        "model_type": "gemma4_text", "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32,
        "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "smollm3": {
        "model_type": "smollm3", "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
        "no_rope_layer_interval": 4, "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 96, "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192,
        "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": 4, "kv_lora_rank": 64, "q_lora_rank": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    },
    "mamba2": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 32, "vocab_size": VOCAB, "hidden_size": 128,
        "intermediate_size": 256, "state_size": 32, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
        "time_step_limit": [0.0, 100.0], "time_step_rank": "auto",
    },
}  # fmt: skip


def build(name: str, *, bits: int = 0, group_size: int = 32, dtype: str = "float32", seed: int = 0,
          **changes: Any) -> Any:  # fmt: skip
    """A random model in eval mode; quantized if `bits` is given. dtype is that of all float parameters."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map

    config = json.loads(json.dumps(CONFIGS[name]))
    (config.get("text_config", config)).update(changes)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    if bits:
        nn.quantize(model, group_size=group_size, bits=bits)
    target = getattr(mx, dtype)
    model.update(tree_map(lambda p: p.astype(target) if mx.issubdtype(p.dtype, mx.floating) else p,
                          model.parameters()))  # fmt: skip
    model.eval()
    mx.eval(model.parameters())
    return model


def logits(model: Any, steps: tuple[list[int], ...] = ([1, 5, 3, 7, 2, 9, 4], [11], [8, 6])) -> list[Any]:
    """Outputs of a prompt, a single token and a two-token continuation with the model's own cache."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    out = []
    for step in steps:
        out.append(model(mx.array([step]), cache=cache))
        mx.eval(out[-1])
    return out


def save(model: Any, name: str, directory: Path, *, bits: int = 0, group_size: int = 32, **changes: Any) -> Path:
    """Write `model` (built from CONFIGS[name]) as an mlx-lm directory with a byte-level tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIGS[name]))
    (config.get("text_config", config)).update(changes)
    if bits:
        config["quantization"] = {"group_size": group_size, "bits": bits}
    config["eos_token_id"] = 0
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())),
                        metadata={"format": "mlx"})  # fmt: skip
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer without merges: 256 bytes and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {s: i for i, s in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": None,
        "model_max_length": 512, "chat_template": template,
    }))  # fmt: skip
