"""Sites that are not modules: attention call shapes and draft verification, read off a model's layers.

mlx-lm calls one function for all attention, with nothing but arrays; which shapes will come is known from the
attention modules' own attributes, under the few names that models give them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .machine import default_device
from .sites import AttentionSite, DraftSite, OpSite
from .walk import Found, activations_dtype, host_of, model_type_of, modules_of, stock_class
from .walk_blocks import MLPForm, form_of

_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
#: Largest block that mlx-lm and mlx-vlm verify at once.
MAX_DRAFT = 16


def find_attention(model: Any, x_dtype: str = "") -> list[Found]:
    """One site per distinct attention shape; decode and prompts are its ranges of rows.

    Where activations are float32 and the checkpoint is not, there are two: with keys and values in the checkpoint's
    dtype, as the cache keeps them (see :mod:`.integrations.cache`), and in float32 for calls without such a cache.

    Empty for models that are not mlx-lm's or mlx-vlm's, since it is their attention function that is routed.
    """
    host = host_of(model)
    if not host:
        return []
    dtype = x_dtype or activations_dtype(model) or "float32"
    found: dict[tuple[Any, ...], AttentionSite] = {}
    callers: dict[tuple[Any, ...], list[Any]] = {}
    own = activations_dtype(model) or dtype
    kept = own if dtype == "float32" and own in ("float16", "bfloat16") else dtype
    elsewhere: set[tuple[int, int]] = set()  # KV shapes that own mathematics read too
    for path, module in modules_of(model):
        heads = _first(module, _HEADS)
        scale = getattr(module, "scale", getattr(module, "sm_scale", None))
        if not heads or not isinstance(scale, (int, float)):
            continue
        kv_heads = _first(module, _KV_HEADS) or heads
        head_dim = _head_dim(module, heads, kv_heads)
        # An own value width is that of MLA, whose calls have other shapes than the module's attributes say.
        if not head_dim or heads % kv_heads or _first(module, ("v_head_dim",)):
            continue
        if not _calls_attention(module):
            elsewhere.add((kv_heads, head_dim))
        sinks = module.get("sinks") is not None
        shape = (heads, kv_heads, head_dim, float(scale), sinks)
        callers.setdefault(shape, []).append(module)
        if shape not in found:
            found[shape] = AttentionSite(
                path=f"{path}[attention]", device=default_device(), host=host, model_type=model_type_of(model),
                n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, mask="any",
                q_dtype=dtype, kv_dtype=dtype, has_sinks=sinks, scale=float(scale),
            )  # fmt: skip
    sites = []
    for shape, site in found.items():
        users = tuple(callers[shape])
        if kept != dtype and (site.n_kv_heads, site.head_dim) not in elsewhere:
            sites.append(Found(dataclasses.replace(site, kv_dtype=kept), None, users))
            site = dataclasses.replace(site, path=f"{site.path[:-1]} without cache]")
        sites.append(Found(site, None, users))
    return sites


def _calls_attention(module: Any) -> bool:
    """True if a block's attention is the host's one function, as far as its code says."""
    if getattr(module, "attn_logit_softcapping", None):
        return False
    return any(
        "scaled_dot_product_attention" in code.co_names
        for cls in stock_class(module).__mro__
        for function in vars(cls).values()
        if (code := getattr(function, "__code__", None)) is not None
    )


def find_updates(attention: list[Found]) -> list[Found]:
    """One site per shape in which the attention sites' calls put keys and values into a KV cache."""
    found: dict[tuple[str, str, int], Found] = {}
    for f in attention:
        s = f.site
        # Of two sites of a shape the first is that with the cache's own dtype.
        if s.head_dim != s.value_dim or any(key[::2] == (s.q_dtype, s.head_dim) for key in found):
            continue
        site = OpSite(
            path=f"{s.path.partition('[')[0]}[cache]", op="kv_update", x_dtype=s.q_dtype, out_dtype=s.kv_dtype,
            host=s.host, dims=s.head_dim, device=s.device, model_type=s.model_type,
        )  # fmt: skip
        found[s.q_dtype, s.kv_dtype, s.head_dim] = Found(site, None, f.callers)
    return list(found.values())


def find_drafts(model: Any, x_dtype: str = "") -> list[Found]:
    """Verification of a chain of drafts, greedy and sampled, as mlx-lm's speculative decoding does it."""
    config = getattr(model, "args", None) or getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    vocab = config.get("vocab_size") if isinstance(config, dict) else getattr(config, "vocab_size", 0)
    if not isinstance(vocab, int) or vocab <= 0:
        return []
    return [
        Found(DraftSite(path=f"draft[{sampler}]", device=default_device(), host=host_of(model),
                        model_type=model_type_of(model), sampler=sampler, max_draft=MAX_DRAFT, vocab_size=vocab,
                        logits_dtype=x_dtype or activations_dtype(model) or "float32"), None)
        for sampler in ("greedy", "sample")
    ]  # fmt: skip


def _first(module: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _head_dim(module: Any, heads: int, kv_heads: int) -> int:
    """From the module if it says so, else from the width of its key projection."""
    if stated := _first(module, ("head_dim",)):
        return stated
    projection = module.get("k_proj")
    weight = projection.get("weight") if projection is not None and hasattr(projection, "get") else None
    return weight.shape[0] // kv_heads if weight is not None and weight.ndim == 2 else 0


def find_functions(model: Any, x_dtype: str = "") -> list[Found]:
    """Functions between the layers that this model's modules hold by name: gated activations."""
    import sys

    from .integrations import functions

    host = host_of(model)
    found = []
    for (owner, path), known in functions.FUNCTIONS.items():
        if owner != host or known.module not in sys.modules:
            continue
        names = dict(functions.users(host, path))
        callers = tuple(m for _, m in modules_of(model) if _calls(stock_class(m), names))
        if not callers:
            continue
        dtype = x_dtype or activations_dtype(model) or "float32"
        config = getattr(model, "args", None) or getattr(model, "config", None)
        width = getattr(config, "vocab_size" if known.op == "softcap" else "intermediate_size", 0)
        site = OpSite(
            path=path, op=known.op, variant=known.variant, x_dtype=dtype, out_dtype=dtype, host=host,
            dims=width if isinstance(width, int) and width > 0 else 1024, device=default_device(),
            model_type=model_type_of(model),
        )  # fmt: skip
        found.append(Found(site, None, callers))
    return found + _find_written_out(model, host, x_dtype)


def _find_written_out(model: Any, host: str, x_dtype: str) -> list[Found]:
    """Activations that feed-forward blocks of known code write out, one site per variant."""
    from .integrations import functions

    found = []
    for (owner, path), (variant, _) in functions.WRITTEN_OUT.items():
        if owner != host:
            continue
        blocks = [m for _, m in modules_of(model) if _writes_out(stock_class(m), variant)]
        if not blocks:
            continue
        dtype = x_dtype or activations_dtype(model) or "float32"
        weight = blocks[0].get("down_proj", {}).get("weight")
        config = getattr(model, "args", None) or getattr(model, "config", None)
        width = getattr(config, "intermediate_size", 0) or (weight.shape[-1] if weight is not None else 1024)
        site = OpSite(
            path=path, op="activation", variant=variant, x_dtype=dtype, out_dtype=dtype, host=host, dims=width,
            device=default_device(), model_type=model_type_of(model),
        )  # fmt: skip
        found.append(Found(site, None, tuple({id(m): m for m in blocks}.values())))
    return found


def _writes_out(cls: type, variant: str) -> bool:
    import mlx.nn as nn

    form = form_of(cls)
    return isinstance(form, MLPForm) and form.activation == variant and getattr(
        vars(cls)["__call__"], "__globals__", {}).get("nn") is nn  # fmt: skip


def find_logits(model: Any, x_dtype: str = "") -> list[Found]:
    """The reductions over the vocabulary in the host's generation loops: logsumexp, and argmax of greedy sampling."""
    from .integrations import logits

    host = host_of(model)
    config = getattr(model, "args", None) or getattr(model, "config", None)
    vocab = getattr(config, "vocab_size", 0) or getattr(getattr(config, "text_config", None), "vocab_size", 0)
    if not logits.available(host) or not isinstance(vocab, int) or vocab <= 0:
        return []
    dtype = x_dtype or activations_dtype(model) or "float32"
    return [
        Found(OpSite(path=f"{variant}()", op="logits", variant=variant, dims=vocab, x_dtype=dtype, out_dtype=out,
                     host=host, device=default_device(), model_type=model_type_of(model)), None)
        for variant, out in (("logsumexp", dtype), ("argmax", "uint32"))
    ]  # fmt: skip


def _calls(cls: type, names: dict[str, str]) -> bool:
    """True if code of the class names the function that its module holds."""
    return any(
        code is not None and names.get(base.__module__) in code.co_names
        for base in cls.__mro__
        if base.__module__ in names
        for function in vars(base).values()
        if (code := getattr(function, "__code__", None)) is not None
    )
