"""Walking a model: which modules are sites, and what is known about each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .layer_classes import format_of, is_embedding, kinds
from .machine import default_device
from .sites import LinearSite, MoeSite, OpSite

#: (module, class, kind, quantized) of every class that is a linear site, compared exactly: a subclass may
#: compute something else. Looked up in sys.modules, so that nothing is imported for a model not using it.
_LINEAR_CLASSES = (
    ("mlx.nn", "Linear", "linear"),
    ("mlx.nn", "QuantizedLinear", "linear"),
    ("mlx.nn", "Embedding", "embedding"),
    ("mlx.nn", "QuantizedEmbedding", "embedding"),
    ("mlx_lm.models.switch_layers", "SwitchLinear", "switch"),
    ("mlx_lm.models.switch_layers", "QuantizedSwitchLinear", "switch"),
    ("mlx_vlm.models.switch_layers", "SwitchLinear", "switch"),
    ("mlx_vlm.models.switch_layers", "QuantizedSwitchLinear", "switch"),
    ("mlx_lm.models.mla", "MultiLinear", "multi"),
    ("mlx_lm.models.mla", "QuantizedMultiLinear", "multi"),
    ("mlx_vlm.models.mla", "MultiLinear", "multi"),
    ("mlx_vlm.models.mla", "QuantizedMultiLinear", "multi"),
)


@dataclass(frozen=True)
class Found:
    """A site with the live module it describes."""

    site: Any
    module: Any
    #: For sites that are not modules: the modules whose calls the site stands for.
    callers: tuple[Any, ...] = ()
    #: The core's own offer, for sites that no plugin is asked about.
    offer: Any = None


def stock_class(module: Any) -> type:
    """The module's class, or the stock class behind an accelerated one."""
    cls = type(module)
    return cls.__dict__.get("_accel_stock", cls)


def linear_kinds() -> dict[type, str]:
    """Stock classes of linear sites known to this process, and those of plugins -> kind."""
    found = kinds()
    for module, name, kind in _LINEAR_CLASSES:
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type):
            found[cls] = kind
    return found


def dtype_name(dtype: Any) -> str:
    """``"float32"`` from ``mlx.core.float32``."""
    return str(dtype).rpartition(".")[2]


_snapshot: tuple[int, list[tuple[str, Any]], list[tuple[str, Any]]] | None = None


@contextlib.contextmanager
def snapshot(model: Any) -> Iterator[None]:
    """Within the block the model's modules are listed once; it must not change its structure meanwhile."""
    global _snapshot
    modules = model.named_modules()
    before, _snapshot = _snapshot, (id(model), modules, sorted(modules, key=lambda item: natural(item[0])))
    try:
        yield
    finally:
        _snapshot = before


def modules_of(model: Any) -> list[tuple[str, Any]]:
    """(path, module) of every module of a model."""
    if _snapshot is not None and _snapshot[0] == id(model):
        return _snapshot[1]
    return list(model.named_modules())


def sorted_modules(model: Any) -> list[tuple[str, Any]]:
    """:func:`modules_of` in natural order of the paths."""
    if _snapshot is not None and _snapshot[0] == id(model):
        return _snapshot[2]
    return sorted(model.named_modules(), key=lambda item: natural(item[0]))


def host_of(model: Any) -> str:
    root = type(model).__module__.partition(".")[0]
    return root if root in ("mlx_lm", "mlx_vlm") else ""


def model_type_of(model: Any) -> str:
    for holder in (model, getattr(model, "args", None), getattr(model, "config", None)):
        if isinstance(value := getattr(holder, "model_type", None), str):
            return value
    return ""


def activations_dtype(model: Any) -> str:
    """dtype of the activations that the first embedding hands out, "" without one."""
    import mlx.nn as nn

    for _, module in modules_of(model):
        cls = stock_class(module)
        if cls is not nn.Embedding and is_embedding(cls):
            scales = module["scales"].dtype
            # Microscaling formats dequantise to bfloat16.
            return "bfloat16" if dtype_name(scales) == "uint8" else dtype_name(scales)
        if cls is nn.Embedding:
            return dtype_name(module["weight"].dtype)
    return ""


def find_linears(model: Any, x_dtype: str = "") -> list[Found]:
    """Every linear site of a model; a module the model holds twice is one site with aliases.

    x_dtype: dtype of the activations under the policy in force, "" to take each layer's own.
    """
    known = linear_kinds()
    modules = modules_of(model)
    tied = {id(m) for m in tied_embeddings(modules)}
    paths: dict[int, list[str]] = {}
    for path, module in modules:
        paths.setdefault(id(module), []).append(path)
    by_path = dict(modules)
    host, model_type, device = host_of(model), model_type_of(model), default_device()
    found, seen = [], set()
    for _, module in sorted_modules(model):
        kind = known.get(stock_class(module))
        if kind is None or id(module) in seen or (kind == "embedding" and id(module) not in tied):
            continue
        seen.add(id(module))
        names = sorted(paths[id(module)], key=natural)
        parent = by_path.get(names[0].rpartition(".")[0])
        facts = linear_facts(module, kind, x_dtype)
        if facts is None:
            continue
        site = LinearSite(
            path=names[0],
            aliases=tuple(names[1:]),
            device=device,
            host=host,
            model_type=model_type,
            in_lora=_is_adapter(parent),
            **facts,
        )
        found.append(Found(site, module))
    return found


def linear_facts(module: Any, kind: str, x_dtype: str = "") -> dict[str, Any] | None:
    """The fields of :class:`LinearSite` that come from the module itself; None if it holds no matrix yet."""
    import mlx.core as mx

    weight, scales = module.get("weight"), module.get("scales")
    if weight is None or weight.ndim not in (2, 3) or (weight.ndim == 3) != (kind in ("switch", "multi")):
        return None
    bits, group_size = getattr(module, "bits", 0) or 0, getattr(module, "group_size", 0) or 0
    mode = getattr(module, "mode", "affine") if scales is not None else "dense"
    if (form := format_of(stock_class(module))) is not None:
        mode, bits = form.mode, form.bits
    k = weight.shape[-1] if scales is None else scales.shape[-1] * group_size
    own = weight.dtype if scales is None else scales.dtype
    if own == mx.uint8:  # microscaling formats carry no float dtype of their own
        own = mx.bfloat16 if not x_dtype else getattr(mx, x_dtype)
    x = getattr(mx, x_dtype) if x_dtype else own
    out = mx.result_type(mx.zeros((), x), mx.zeros((), own))
    bias = module.get("bias")
    if bias is not None:
        out = mx.result_type(mx.zeros((), out), mx.zeros((), bias.dtype))
    return {
        "kind": kind,
        "n": weight.shape[-2],
        "k": k,
        "batch": weight.shape[0] if weight.ndim == 3 else 1,
        "mode": mode,
        "bits": bits if scales is not None else 0,
        "group_size": group_size if scales is not None else 0,
        "weight_dtype": dtype_name(weight.dtype),
        "scales_dtype": "" if scales is None else dtype_name(scales.dtype),
        "has_bias": bias is not None,
        "x_dtype": dtype_name(x),
        "out_dtype": dtype_name(out),
    }


def tied_embeddings(modules: list[tuple[str, Any]]) -> Iterator[Any]:
    """Embeddings that the model also uses as output projection.

    Nothing in a module says so; it shows in the code that calls ``<embedding>.as_linear``. A class whose code
    names ``as_linear`` and an embedding it holds uses it, unless the same code would rather use an
    ``lm_head`` that is there. (Some models create one and leave it unused; then their configuration tells.)
    """
    names_by_class: dict[type, list[set[str]]] = {}
    for _, owner in modules:
        cls = type(owner)
        if _is_adapter(owner):
            continue  # has an as_linear of its own, whether the model calls it or not
        if cls not in names_by_class:
            names_by_class[cls] = [
                set(code.co_names)
                for base in cls.__mro__
                for function in vars(base).values()
                if (code := getattr(function, "__code__", None)) and "as_linear" in code.co_names
            ]
        for names in names_by_class[cls]:
            told = getattr(getattr(owner, "args", None), "tie_word_embeddings", False) is True
            has_head = any(h in names and h in owner for h in ("lm_head", "output", "output_layer", "head"))
            if has_head and not (told and "tie_word_embeddings" in names):
                continue
            for _, module in owner.named_modules():
                for name in names:
                    child = module.get(name) if isinstance(module, dict) else None
                    if child is not None and _is_adapter(child):
                        child = child.get("embedding")
                    if child is not None and is_embedding(stock_class(child)):
                        yield child


def find_moe(model: Any, x_dtype: str = "") -> list[Found]:
    """Every ``SwitchGLU`` / ``SwitchMLP`` block."""
    found = []
    for path, module in _unique_modules(model):
        name = stock_class(module).__name__
        gated = name.endswith("SwitchGLU")
        if not gated and name != "SwitchMLP":
            continue
        keys = ("gate_proj", "up_proj", "down_proj") if gated else ("fc1", "fc2")
        parts = [module.get(key) for key in keys]
        if any(p is None or "weight" not in p for p in parts):
            continue
        facts = [linear_facts(p, "switch", x_dtype) for p in parts]
        if any(f is None for f in facts):
            continue
        first, same = facts[0], ("mode", "bits", "group_size", "weight_dtype", "scales_dtype", "has_bias")
        assert first is not None
        site = MoeSite(
            path=path, device=default_device(), host=host_of(model), model_type=model_type_of(model),
            d_model=first["k"], d_hidden=first["n"], n_experts=first["batch"], gated=gated,
            activation=type(getattr(module, "activation", None)).__name__,
            uniform=all(f[s] == first[s] for f in facts if f for s in same),
            x_dtype=first["x_dtype"], **{s: first[s] for s in same},
        )  # fmt: skip
        found.append(Found(site, module))
    return found


def find_ops(model: Any, x_dtype: str = "") -> list[Found]:
    """Norm and rope modules. A norm without a weight does not say its width and is left out."""
    import mlx.core as mx
    import mlx.nn as nn

    from .rope import rotation_of
    from .walk_blocks import multiplies_by_one_plus

    found = []
    common: dict[str, Any] = {
        "device": default_device(),
        "host": host_of(model),
        "model_type": model_type_of(model),
    }
    for path, module in _unique_modules(model):
        cls = stock_class(module)
        one_plus = multiplies_by_one_plus(cls) and isinstance(getattr(module, "eps", None), float)
        if (cls in (nn.RMSNorm, nn.LayerNorm) or one_plus) and module.get("weight") is not None:
            weight, bias = module["weight"], module.get("bias")
            x = getattr(mx, x_dtype) if x_dtype else weight.dtype
            out = mx.result_type(mx.zeros((), x), mx.zeros((), weight.dtype))
            if bias is not None:
                out = mx.result_type(mx.zeros((), out), mx.zeros((), bias.dtype))
            site = OpSite(
                path=path, op="layer_norm" if cls is nn.LayerNorm else "rms_norm", eps=float(module.eps),
                variant="one_plus" if one_plus else "",
                dims=weight.shape[-1], weight_dtype=dtype_name(weight.dtype), x_dtype=dtype_name(x),
                out_dtype=dtype_name(out), **common,
            )  # fmt: skip
        elif (rotation := rotation_of(module)) is not None:
            dtype = x_dtype or activations_dtype(model) or "float32"
            own = {"rope_base": float(module.base), "rope_scale": float(module.scale)} if rotation.plain else {
                "rope_freqs": rotation.content}  # fmt: skip
            site = OpSite(
                path=path, op="rope", dims=rotation.dims, rope_dims=rotation.dims,
                rope_traditional=rotation.traditional, x_dtype=dtype, out_dtype=dtype, **own, **common,
            )  # fmt: skip
        else:
            continue
        found.append(Found(site, module))
    return found


def _is_adapter(module: Any) -> bool:
    """True for the wrappers that adapters put around a layer."""
    return isinstance(module, dict) and type(module).__name__.startswith(("LoRA", "DoRA"))


def _unique_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """All modules in natural order of their paths, one that is held twice under its first path only."""
    seen = set()
    for path, module in sorted_modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def natural(path: str) -> tuple[Any, ...]:
    """Sort key under which layer 2 comes before layer 10."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split("."))
