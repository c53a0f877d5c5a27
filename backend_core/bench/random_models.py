"""Models of real shapes with random weights, for mlx-lm and as a GGUF for llama.cpp.

Their text is noise; what they cost is what a trained model of the shape costs. Both sides get all matrices,
embedding included, in one format of about the same bits: affine 4-bit g64 and q4_K (4.5 bits each), ternary
2-bit g128 and tq2_0.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import paths
from ..errors import AccelError
from .peer import TYPES, Ggml


@dataclass(frozen=True)
class Shape:
    """A dense Qwen3 model; fields as in its config.json."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960

    def matrices(self) -> list[tuple[str, int, int]]:
        """(GGUF name, output, input features) of every matrix."""
        h, q, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        found = [("token_embd", self.vocab_size, h)]
        for i in range(self.num_hidden_layers):
            found += [
                (f"blk.{i}.attn_q", q, h), (f"blk.{i}.attn_k", kv, h), (f"blk.{i}.attn_v", kv, h),
                (f"blk.{i}.attn_output", h, q), (f"blk.{i}.ffn_gate", self.intermediate_size, h),
                (f"blk.{i}.ffn_up", self.intermediate_size, h), (f"blk.{i}.ffn_down", h, self.intermediate_size),
            ]  # fmt: skip
        return found

    def norms(self) -> list[tuple[str, int]]:
        """(GGUF name, width) of every norm."""
        found = [("output_norm", self.hidden_size)]
        for i in range(self.num_hidden_layers):
            found += [(f"blk.{i}.attn_norm", self.hidden_size), (f"blk.{i}.ffn_norm", self.hidden_size),
                      (f"blk.{i}.attn_q_norm", self.head_dim), (f"blk.{i}.attn_k_norm", self.head_dim)]  # fmt: skip
        return found


SHAPES = {
    s.name: s
    for s in (
        Shape("qwen3-0.6b", 1024, 3072, 28, 16, 8),
        Shape("qwen3-1.7b", 2048, 6144, 28, 16, 8),
    )
}


def mlx_model(shape: Shape, bits: int, group_size: int) -> Any:
    """An mlx-lm model with random affine weights and float16 scales; 2 bits are ternary."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models import qwen3

    config = asdict(shape)
    config.pop("name")
    model = qwen3.Model(qwen3.ModelArgs(model_type="qwen3", tie_word_embeddings=True, **config))
    # Nothing is evaluated here: the arrays are replaced below.
    nn.quantize(model, group_size=group_size, bits=bits)
    rng = np.random.default_rng(3)
    for _, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            n, words = module.weight.shape
            groups = module.scales.shape[1]
            values = rng.integers(0, 1 << 32, (n, words), dtype=np.uint32)
            if bits == 2:  # code 3 does not occur in ternary weights: turn it into 1
                both = values & (values >> 1) & np.uint32(0x55555555)
                values &= ~(both << np.uint32(1))
            scales = ((rng.random((n, groups), dtype=np.float32) + 1.0) * (0.06 / 2**bits)).astype(np.float16)
            module.weight = mx.array(values)
            module.scales = mx.array(scales)
            module.biases = mx.array((-scales * (1.0 if bits == 2 else 2 ** (bits - 1) - 0.5)).astype(np.float16))
        elif isinstance(module, nn.RMSNorm):
            module.weight = mx.ones(module.weight.shape, mx.float16)
    model.freeze()
    mx.eval(model.parameters())
    return model


def gguf_file(shape: Shape, kind: str, ggml: Ggml) -> Path:
    """A GGUF of the shape with all matrices in a ggml type, made once in the cache.

    Raises AccelError without the package gguf.
    """
    target = paths.models_dir() / f"bench-{shape.name}-{kind}.gguf"
    stamp = target.with_suffix(".json")
    wanted = {"writer": 1, "kind": kind, **asdict(shape)}
    try:
        if target.is_file() and json.loads(stamp.read_text()) == wanted:
            return target
    except (OSError, ValueError):
        pass
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    try:
        _write_gguf(shape, kind, ggml, partial)
        partial.replace(target)
        stamp.write_text(json.dumps(wanted))
    finally:
        partial.unlink(missing_ok=True)
    return target


def _write_gguf(shape: Shape, kind: str, ggml: Ggml, path: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        raise AccelError("random models for the peer need the package gguf (pip install gguf)") from error
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(5)
    patterns: dict[int, np.ndarray] = {}
    for name, n, k in shape.matrices():
        if k not in patterns:
            rows = ggml.quantized(kind, rng.standard_normal((64, k), dtype=np.float32) * 0.02)
            patterns[k] = np.frombuffer(rows, np.uint8).reshape(64, -1)
        data = np.resize(patterns[k], (n, patterns[k].shape[1]))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType(TYPES[kind]))
    for name, width in shape.norms():
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
