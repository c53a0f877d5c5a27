"""The activations policy: which dtype flows between the layers.

``float32`` makes every embedding hand out float32, and everything after it follows, since mlx computes in the
wider of two dtypes. No parameter is converted: scales and norms stay in the checkpoint's dtype. On x86 CPUs,
where mlx emulates half precision in software, this alone is worth 30 to 50 times.
"""

from __future__ import annotations

import platform
from typing import Any

from .layer_classes import is_embedding
from .machine import default_device
from .policy import Policy
from .walk import activations_dtype, modules_of, stock_class

_HALF = ("float16", "bfloat16")


def resolve(policy: Policy, model: Any) -> str:
    """``"float32"`` if embeddings are to be cast, else ``"model"``."""
    own = activations_dtype(model)
    if own not in _HALF or policy.activations == "model":
        return "model"
    if policy.activations == "float32":
        return "float32"
    on_x86_cpu = default_device() == "cpu" and platform.machine().lower() in ("x86_64", "amd64", "i686")
    return "float32" if on_x86_cpu else "model"


def embeddings(model: Any) -> list[Any]:
    """Embedding modules whose lookups are half precision."""
    import mlx.core as mx
    import mlx.nn as nn

    found: list[Any] = []
    for _, module in modules_of(model):
        cls = stock_class(module)
        dtype = None
        if cls is nn.Embedding:
            dtype = module["weight"].dtype
        elif is_embedding(cls):
            # Microscaling formats dequantise to bfloat16.
            dtype = mx.bfloat16 if module["scales"].dtype == mx.uint8 else module["scales"].dtype
        # mlx dtypes do not compare with None.
        half = dtype is not None and dtype in (mx.float16, mx.bfloat16)
        if half and not any(module is f for f in found):
            found.append(module)
    return found


def kv_note(model: Any, kept: str = "") -> str:
    """What float32 activations mean for the KV cache, as a sentence for the report.

    kept: the dtype of the cache's keys and values, ``""`` if they are float32 like the activations.
    """
    config = getattr(model, "args", None) or getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config

    def get(name: str) -> Any:
        return config.get(name) if isinstance(config, dict) else getattr(config, name, None)

    layers, heads = get("num_hidden_layers"), get("num_attention_heads")
    kv_heads = get("num_key_value_heads") or heads
    head_dim = get("head_dim") or ((get("hidden_size") or 0) // heads if heads else 0)
    size = 2 * (2 if kept else 4)
    where = f"activations in float32, KV cache in {kept}" if kept else "activations and KV cache in float32"
    for factor in (layers, kv_heads, head_dim):
        if not isinstance(factor, int) or factor <= 0:
            return where
        size *= factor
    half = "" if kept else ", half of it in the model's dtype"
    return f"{where} ({size / 1024:.0f} KiB a token{half})"
