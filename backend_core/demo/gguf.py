"""Lossless conversion of a llama GGUF with Q4_1 / Q8_0 blocks to an mlx-lm model directory.

Q4_1 (16-bit scale d and minimum m, 32 codes of 4 bits) is mlx's 4-bit affine quantization with group size 32,
and Q8_0 (scale d, 32 signed bytes) is its 8-bit form with codes q + 128 and bias -128 d: both hold the same
values, so only the packing changes. mlx itself does that part when it reads a GGUF; what remains is names,
the order of the rotary rows, config.json and the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: dtype of scales, biases and norms in the converted checkpoint.
SCALE_DTYPES = {"fp32": "float32", "fp16": "float16"}

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GROUP = 32
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


class GGUFError(ValueError):
    """The file is not a GGUF this converter can turn into an equal mlx-lm checkpoint."""


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors (mlx arrays, lazily read) and metadata (plain Python values) of a GGUF file.

    Quantized tensors come as three: ``name.weight`` (uint32 words), ``name.scales``, ``name.biases``.
    Raises :class:`GGUFError` if the file cannot be read.
    """
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors, raw = loaded
    except Exception as error:  # mlx raises RuntimeError and ValueError, by what is wrong with the file
        raise GGUFError(f"{path} cannot be read as GGUF: {error}") from error
    metadata = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in raw.items()}
    return tensors, metadata


def hf_name(name: str) -> str:
    """The mlx-lm parameter name of a GGUF tensor. Raises :class:`GGUFError` for an unknown one."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|scales|biases)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.(weight|scales|biases)", name)
    if top and top[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[top[1]]}.{top[2]}"
    raise GGUFError(f"tensor {name!r} has no counterpart in a llama model")


def rotary_rows(n: int, heads: int) -> list[int]:
    """Row order that turns a GGUF q/k projection into mlx-lm's.

    GGUF stores the two halves of each head's rotary pairs interleaved (0, d/2, 1, d/2+1, ...), mlx-lm's
    llama (rope_traditional false) one half after the other. Row i of the result is row ``order[i]`` of the
    file; whole rows move, so that packed rows, scales and biases move alike.
    """
    half = n // heads // 2
    return [h * 2 * half + 2 * i + s for h in range(heads) for s in range(2) for i in range(half)]


def config(metadata: dict[str, Any], bits: dict[str, int], tied: bool) -> dict[str, Any]:
    """config.json of the converted model.

    bits
        Bits by module path of each quantized module; the commonest becomes the default and the others get
        per-layer entries.
    tied
        True if the output projection is the embedding.
    """
    if metadata.get("general.architecture") != "llama":
        raise GGUFError(f"architecture {metadata.get('general.architecture')!r} is not llama")
    counts = list(bits.values())
    default = max(set(counts), key=counts.count)
    quantization: dict[str, Any] = {"group_size": _GROUP, "bits": default, "mode": "affine"}
    for path in sorted(bits):
        if bits[path] != default:
            quantization[path] = {"group_size": _GROUP, "bits": bits[path], "mode": "affine"}
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": metadata["llama.block_count"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        # The file holds a float32, whose decimal expansion as a double would be 9.99999974e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "quantization": quantization,
        "quantization_config": quantization,
    }


def weights(tensors: dict[str, Any], metadata: dict[str, Any], scales: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Tensors under mlx-lm's names, and bits by quantized module.

    scales
        A key of :data:`SCALE_DTYPES`. Raises :class:`GGUFError` if a value would not survive the cast.
    """
    import mlx.core as mx

    dtype = getattr(mx, SCALE_DTYPES[scales])
    heads = {
        "self_attn.q_proj": metadata["llama.attention.head_count"],
        "self_attn.k_proj": metadata["llama.attention.head_count_kv"],
    }
    renamed: dict[str, Any] = {}
    for name, value in tensors.items():
        target = hf_name(name)
        for projection, count in heads.items():
            if f".{projection}." in target:
                value = value[mx.array(rotary_rows(value.shape[0], count))]
        if value.dtype != mx.uint32:
            if value.dtype not in (mx.float16, mx.float32):
                raise GGUFError(f"tensor {name!r} has the unexpected dtype {value.dtype}")
            cast = value.astype(dtype)
            if not mx.array_equal(cast.astype(mx.float32), value.astype(mx.float32)).item():
                raise GGUFError(f"tensor {name!r} has values that {SCALE_DTYPES[scales]} cannot hold")
            value = cast
        renamed[target] = value
    bits = {}
    for name, value in renamed.items():
        if name.endswith(".scales"):
            path = name.removesuffix(".scales")
            words = renamed[f"{path}.weight"].shape[-1]
            bits[path] = words * 32 // (value.shape[-1] * _GROUP)
    if not bits:
        raise GGUFError("the file has no quantized tensor")
    return renamed, bits


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, str]:
    """Texts of tokenizer.json and tokenizer_config.json, by file name.

    Only the ``gpt2`` model with the ``smollm`` pre-tokenizer is known: digits one by one, then GPT-2's
    byte-level pattern. Another one raises :class:`GGUFError`, since a wrong pre-tokenizer still gives fluent
    text.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GGUFError(f"tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is unknown")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    if len(types) != len(tokens):
        raise GGUFError(f"{len(tokens)} tokens have {len(types)} types")
    special = [text for text, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])

    def token(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }


def convert(source: Path, target: Path, scales: str, progress: Callable[[str, float], None] | None = None) -> None:
    """Write the mlx-lm form of `source` into the existing, empty directory `target`.

    progress
        Called with the name of the step and the fraction done (0..1).

    Raises :class:`GGUFError` if the result would not hold the same model.
    """
    import mlx.core as mx

    def report(step: str, fraction: float) -> None:
        if progress is not None:
            progress(step, fraction)

    report("reading weights", 0.0)
    tensors, metadata = read(source)
    renamed, bits = weights(tensors, metadata, scales)
    report("writing weights", 0.4)
    settings = config(metadata, bits, tied="lm_head.weight" not in renamed)
    mx.save_safetensors(str(target / "model.safetensors"), renamed, metadata={"format": "mlx"})
    report("writing tokenizer", 0.8)
    generation = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {
        "config.json": json.dumps(settings, indent=2),
        "generation_config.json": json.dumps({**generation, "do_sample": False}, indent=2),
        **tokenizer_files(metadata),
    }
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")
    report("done", 1.0)
