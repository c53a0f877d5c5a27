"""Bytes a model needs, against what the machine has."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

from .checks import Check, fault, note, ok
from .cpu import free_memory, sysctl
from .shards import Header

#: Tokens for which the KV cache is counted, or the model's own maximum if that is smaller.
KV_TOKENS = 4096


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, which multimodal configs keep in ``text_config``."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def kv_bytes(config: Mapping[str, Any], item_bytes: int) -> tuple[int, int] | None:
    """Bytes of the KV cache and the tokens it is counted for, None if config.json does not say enough.

    An upper bound: sliding windows, recurrent layers and compressed caches need less.
    """
    settings = text_config(config)

    def number(*keys: str) -> int | None:
        return next((n for key in keys if (n := whole(settings.get(key)))), None)

    layers, heads = (
        number("num_hidden_layers", "n_layer", "n_layers"),
        number("num_attention_heads", "n_head"),
    )
    hidden = number("hidden_size", "n_embd", "d_model")
    dim = number("head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = number("num_key_value_heads", "n_kv_heads") or heads
    if not (layers and dim and kv_heads):
        return None
    tokens = min(KV_TOKENS, number("max_position_embeddings", "n_positions") or KV_TOKENS)
    return 2 * layers * kv_heads * dim * tokens * item_bytes, tokens


def _activation_bytes(headers: Mapping[str, Header]) -> int:
    """Bytes of one cached value: float32 on x86 CPUs (activations=auto), else as the weights' scales."""
    if sys.platform != "darwin" and platform.machine().lower() in ("x86_64", "amd64"):
        return 4
    kinds = [t.dtype for h in headers.values() for t in h.tensors.values() if t.dtype in ("F32", "F16", "BF16")]
    return 4 if kinds and kinds.count("F32") * 2 > len(kinds) else 2


def check_memory(config: Mapping[str, Any], headers: Mapping[str, Header]) -> list[Check]:
    """Model and KV bytes against free memory, and against the wired limit on macOS."""
    model = sum(t.nbytes for header in headers.values() for t in header.tensors.values())
    cache = kv_bytes(config, _activation_bytes(headers))
    if not model:
        return []  # the weights section has said why
    checks = [judge_memory(model, cache, free_memory())]
    if sys.platform == "darwin":
        total, limit = _digits(sysctl("hw.memsize")), _digits(sysctl("iogpu.wired_limit_mb"))
        if total:
            checks.append(judge_wired(model + (cache[0] if cache else 0), limit or 0, total))
    return checks


def judge_memory(model: int, cache: tuple[int, int] | None, free: int | None) -> Check:
    """The check for bytes of the model, (bytes, tokens) of the cache, and free bytes."""
    need = model + (cache[0] if cache else 0)
    kv = f"KV cache at most {size_text(cache[0])} for {cache[1]} tokens" if cache else "KV cache of unknown size"
    detail = f"model {size_text(model)}, {kv}, free {size_text(free) if free is not None else 'unknown'}"
    if free is not None and model > free:
        return fault("model.memory", detail, "Free memory, or take a smaller or more strongly quantized model.")
    if free is not None and need > free:
        return note("model.memory", detail, "Keep prompts short, or limit the cache with --max-kv-size.")
    return ok("model.memory", detail)


def judge_wired(need: int, limit_mb: int, total: int) -> Check:
    """The check for macOS's limit of memory wired for the GPU; 0 is the system's default share."""
    # The default share is not documented; about two thirds, more on large machines, is what users see.
    limit = limit_mb << 20 if limit_mb else total * 2 // 3 if total <= 36 << 30 else total * 3 // 4
    detail = f"{size_text(need)} needed, wired limit {size_text(limit)}{'' if limit_mb else ' (default)'}"
    if need > limit * 9 // 10:
        wanted = (need * 10 // 9 >> 20) + 1
        return note("model.wired_limit", detail, f"Run: sudo sysctl iogpu.wired_limit_mb={wanted}.")
    return ok("model.wired_limit", detail)


def whole(value: Any) -> int | None:
    """`value` if it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _digits(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def size_text(count: int) -> str:
    """``1.23 GB`` or ``45.6 MB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
