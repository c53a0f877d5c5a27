"""Tiny checkpoints: ternary 2-bit ones as mlx would have them, in shards, and small models around them."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from t5_ternary import convert, reference


def random_trits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, shape, dtype=np.uint8)


def affine(seed: int, lead: tuple[int, ...], k: int, group: int, dtype: mx.Dtype = mx.float16) -> dict[str, mx.array]:
    """weight, scales, biases of a random ternary 2-bit matrix (*lead, k)."""
    n = int(np.prod(lead))
    packed = reference.pack(random_trits(seed, n, k), group)
    words = mx.array(convert.to_affine(packed, group)).reshape(*lead, k // 16)
    scales = mx.array(np.random.default_rng(seed + 1).uniform(0.02, 0.1, (*lead, k // group)).astype(np.float32))
    scales = scales.astype(dtype)
    return {"weight": words, "scales": scales, "biases": -scales}


def ternarize(model, seed: int = 0, group: int = 64, dtype: mx.Dtype = mx.float16) -> None:
    """Make every 2-bit affine layer of a model ternary, with bias = -scale."""
    for number, (_, module) in enumerate(model.named_modules()):
        if getattr(module, "bits", 0) == 2:
            *lead, words = module.weight.shape
            made = affine(seed + 7 * number, tuple(lead), words * 16, module.group_size, dtype)
            for key, value in made.items():
                module[key] = value
    mx.eval(model.parameters())


CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": 320,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 320,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "num_experts": 6,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def build(name: str, group: int = 64, predicate=None, dtype: mx.Dtype = mx.float16):
    """A random model with ternary 2-bit layers. predicate: as that of ``nn.quantize``."""
    import mlx.nn as nn

    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(CONFIGS[name]))))
    nn.quantize(model, group_size=group, bits=2, class_predicate=predicate)
    ternarize(model, group=group, dtype=dtype)
    model.eval()
    return model


def save(model, name: str, directory: Path, group: int = 64, shards: int = 1, overrides=None) -> Path:
    """Write a model as mlx-lm does: shards, index, config, tokenizer."""
    from mlx.utils import tree_flatten

    directory.mkdir(parents=True)
    quantization = {"group_size": group, "bits": 2, **(overrides or {})}
    config = {**CONFIGS[name], "quantization": quantization, "quantization_config": quantization, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config, indent=4))
    tensors = dict(tree_flatten(model.parameters()))
    write_shards(directory, tensors, shards)
    write_tokenizer(directory)
    return directory


def write_shards(directory: Path, tensors: dict[str, mx.array], shards: int) -> None:
    names = sorted(tensors)
    if shards == 1:
        mx.save_safetensors(str(directory / "model.safetensors"), tensors, metadata={"format": "mlx"})
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        # Dealt out like cards, so that scales and biases lie in other files than their weights.
        part = {name: tensors[name] for name in names[i::shards]}
        weight_map.update(dict.fromkeys(part, file))
        mx.save_safetensors(str(directory / file), part, metadata={"format": "mlx"})
    size = sum(a.nbytes for a in tensors.values())
    index = {"metadata": {"total_size": size, "total_parameters": 4711}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))


def write_tokenizer(directory: Path) -> None:
    """A tokenizer with one id per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    vocab = {"<eos>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def digest(directory: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def tensors_of(directory: Path) -> dict[str, mx.array]:
    result: dict[str, mx.array] = {}
    for file in sorted(directory.glob("*.safetensors")):
        result.update(mx.load(str(file)))
    return result


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(memoryview(a)) == bytes(memoryview(b))
