"""Loading t5 checkpoints with mlx-lm's and mlx-vlm's own loaders.

The hosts build a model, replace layers that config.json calls quantized, and hand all tensors to ``load_weights``.
There the names are final, so that the model's class is replaced by a subclass whose ``load_weights`` puts layers of
:mod:`t5_ternary.modules` wherever a tensor is t5, and then loads as strictly as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backend_core.errors import ModelError

from . import convert, index, marker
from .recognise import find, form_of
from .tensors import read_file

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from backend_core import Policy


def adapt(arguments: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """Arguments of a ``load_model`` such that t5 weights find layers. See the hook ``adapt_checkpoint``."""
    examine(Path(arguments["model_path"]))
    get_model_classes = arguments["get_model_classes"]
    lazy = bool(arguments.get("lazy", False))

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        entry = marker.find(config)
        if entry is not None:
            # The host and the model's class see what the 2-bit checkpoint says.
            config.update(marker.source_of(entry))
        model_class, arguments_class = get_model_classes(config=config)
        return model_with_t5(model_class, config, entry, policy, lazy), arguments_class

    return {**arguments, "get_model_classes": classes}


def examine(directory: Path) -> None:
    """Look at the headers of a marked checkpoint, so that what is wrong is found before a host trips over it.

    Raises ModelError with the tensor's name.
    """
    entry = marker.find(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    if entry is not None:
        marker.source_of(entry)
        forms = {t.name: (t.dtype, t.shape) for f in sorted(directory.glob("*.safetensors")) for t in read_file(f)[0]}
        index.check(directory, forms)
        find(forms, entry, f"{directory}: ")


def model_with_t5(
    model_class: type, config: dict[str, Any], entry: Mapping[str, Any] | None, policy: Policy, lazy: bool = False
) -> type:
    """A subclass of a model's class, under its name, that loads t5 weights; instances become `model_class` then.

    config, entry
        The parsed config.json, the very object that the host goes on with, and the marker in it or None. What the host
        goes on with afterwards carries a marker if t5 layers are in the model.
    lazy
        True: weights are not looked at, and nothing is measured.
    """

    def load_weights(self: Any, file_or_weights: Any, strict: bool = True) -> Any:
        import mlx.core as mx

        self.__class__ = model_class
        held = mx.load(file_or_weights) if isinstance(file_or_weights, str) else dict(file_or_weights)
        layers = find({name: form_of(array) for name, array in held.items()}, entry)
        if layers:
            held = put(self, held, layers, config, policy, lazy)
        return self.load_weights(list(held.items()), strict=strict)

    namespace = {"load_weights": load_weights, "__module__": model_class.__module__}
    namespace["__qualname__"] = model_class.__qualname__
    return type(model_class.__name__, (model_class,), namespace)


def put(model: nn.Module, held: Mapping[str, mx.array], layers: Mapping[str, int], config: dict[str, Any],
        policy: Policy, lazy: bool) -> dict[str, mx.array]:  # fmt: skip
    """Put layers for the t5 tensors into the model and give back what is to be loaded into it.

    Raises ModelError for damaged tensors, unless `lazy`.
    """
    from mlx.utils import tree_unflatten

    from . import choose, foreign

    # Biases follow from the scales; some tools keep them.
    rest = {k: v for k, v in held.items() if not (k.endswith(".biases") and k.removesuffix(".biases") in layers)}
    modules = dict(model.named_modules())
    made = {}
    others = []
    for path, size in layers.items():
        # A tensor without a module is for strict loading to refuse, by its name.
        if (module := modules.get(path)) is not None:
            layer = layer_for(module, held, path, size)
            if layer is None:
                others.append(path)
            else:
                made[path] = layer
                layer.path = path
    choice = choose.Choice(False, "loaded lazily: packed")
    if not lazy:
        check(held, layers)
        choice = choose.decide(made, held, policy)
    if choice.expand:
        rest = choose.expand(made, others, rest)
    else:
        for path in others:
            foreign.adopt(modules[path], held[path + ".weight"], held[path + ".scales"], layers[path])
        mark(config, layers, held)
    model.update_modules(tree_unflatten(list(made.items())))
    if not lazy:
        model.__dict__["_accel_notes"] = [choice.note]
    return rest


def layer_for(module: nn.Module, held: Mapping[str, mx.array], path: str, size: int) -> nn.Module | None:
    """An empty t5 layer in place of a module of mlx, mlx-lm or mlx-vlm; None for modules of other classes."""
    import mlx.nn as nn

    from .modules import T5Embedding, T5Linear, T5SwitchLinear

    weight, scales = held[path + ".weight"], held[path + ".scales"]
    n, k = weight.shape[-2], scales.shape[-1] * size
    bias = path + ".bias" in held
    if weight.ndim == 2 and isinstance(module, (nn.Linear, nn.QuantizedLinear)):
        return T5Linear(k, n, bias, size, scales.dtype)
    if weight.ndim == 2 and isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
        return T5Embedding(n, k, size, scales.dtype)
    # The hosts have a class of this name each.
    if weight.ndim == 3 and type(module).__name__ in ("SwitchLinear", "QuantizedSwitchLinear"):
        return T5SwitchLinear(k, n, weight.shape[0], bias, size, scales.dtype)
    return None


def check(held: Mapping[str, mx.array], layers: Mapping[str, int]) -> None:
    """Raise ModelError, naming the tensor, if a byte is no five trits or padding is not 1. Reads all t5 weights."""
    import mlx.core as mx

    # One by one, so that each can be looked at while the next are read.
    for path in layers:
        mx.async_eval(held[path + ".weight"])
    for path, size in layers.items():
        if fault := convert.first_fault(np.array(held[path + ".weight"], copy=False), size):
            raise ModelError(f"{path}.weight is damaged: {fault}")


def mark(config: dict[str, Any], layers: Mapping[str, int], held: Mapping[str, mx.array]) -> None:
    """Write the marker into the configuration, so that a model that is saved again says what it is."""
    if marker.find(config) is None:
        others = any(k.endswith(".scales") and k.removesuffix(".scales") not in layers for k in held)
        marked = marker.mark(config, layers, others)
        config.clear()
        config.update(marked)
