"""What a checkpoint's quantization metadata may say, and refusal by name of what is not known.

mlx-lm reads ``quantization`` (or ``quantization_config.quant_method``) and passes over everything else in
silence. A checkpoint whose weights were, say, rotated by a Hadamard matrix before they were quantized then
loads as plain 2-bit weights and answers with fluent garbage. :func:`check_quantization` knows what mlx-lm's
loader acts upon; anything beyond that is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import ModelError

#: Quantization modes of mlx, with the (bits, group size) pairs of the fixed ones (None: several).
MODES: dict[str, tuple[int, int] | None] = {
    "affine": None,
    "mxfp4": (4, 32),
    "nvfp4": (4, 16),
    "mxfp8": (8, 32),
}
#: ``quant_method`` values on which mlx-lm's loader acts.
QUANT_METHODS = (
    "awq",
    "bitnet",
    "compressed-tensors",
    "fp8",
    "gptq",
    "modelopt",
    "mxfp4",
    "mxfp8",
)
#: ``format`` values of compressed-tensors that mlx-lm can read.
COMPRESSED_FORMATS = ("mxfp4-pack-quantized", "nvfp4-pack-quantized", "pack-quantized")

#: Methods of checkpoints that were converted to MLX and kept their former ``quantization_config`` beside the
#: ``quantization`` that counts.
_FORMER_METHODS = (*QUANT_METHODS, "bitsandbytes", "eetq", "fbgemm_fp8", "hqq", "quanto", "torchao")
#: What one entry of ``quantization`` may hold: the parameters of the layers' ``to_quantized``.
_LAYER_KEYS = frozenset({"group_size", "bits", "mode", "global_scale", "quantize_input"})
#: Keys of ``quantization`` that describe and change nothing.
_DESCRIPTIVE_KEYS = frozenset({"quant_method", "comment", "description", "creator", "producer", "tool", "version"})
#: Modules whose paths have no dot.
_TOP_MODULES = frozenset({"lm_head", "embed_tokens", "wte", "output", "embed_out", "score", "classifier"})
#: Words that say that the weights are stored in another basis.
_ROTATION = frozenset(
    {"hadamard", "walsh", "quarot", "quip", "spinquant", "rotate", "rotated", "rotation", "incoherence"}
)
#: The same for the top level of config.json, where "rotation" may belong to anything.
_ROTATION_TOP = _ROTATION - {"rotate", "rotated", "rotation"}
#: Files that describe a rotation.
_ROTATION_FILES = ("hadamard.json", "rotation.json")
#: Keys of a rotated pack's manifest; both together mean one.
_PACK_KEYS = ("tensor_namespace", "gdn_activation_layout")


class UnknownQuantization(ModelError, ValueError):
    """A checkpoint says something about its weights that nothing here understands.

    what
        The metadata that is unknown, as ``key = value``.
    where
        File and key path in which it stands.
    """

    def __init__(self, what: str, where: str, why: str) -> None:
        self.what, self.where = what, where
        super().__init__(
            f"unknown quantization: {what} in {where}. {why} The model is refused, since its answers could "
            "be wrong without any sign. Use a checkpoint of a known format, or a plugin that reads this one."
        )


def check_quantization(config: Mapping[str, Any], path: str | Path, extra_methods: Collection[str] = ()) -> None:
    """Check a checkpoint's quantization metadata against what mlx-lm's loader does with it.

    config
        The parsed config.json.
    path
        The model directory. Read for ``hf_quant_config.json``, for rotation manifests and, if an override
        names an uncommon module, for the tensor names; it need not exist.
    extra_methods
        Values of ``quant_method`` and ``mode`` that a plugin reads; such a checkpoint is left to it.

    Returns None for an unquantized or known checkpoint. Raises :class:`UnknownQuantization`.
    """
    directory = Path(path)
    file = str(directory / "config.json")
    quantization = config.get("quantization")
    foreign, foreign_file, foreign_key = _foreign(config, directory)
    method = _method(foreign) or _method(quantization)
    if method in extra_methods or (
        isinstance(quantization, Mapping) and _text(quantization.get("mode")) in extra_methods
    ):
        return
    if not _is_rotated_type(config):
        _check_rotation(config, directory, file)
    if quantization is not None:
        if not isinstance(quantization, Mapping):
            raise UnknownQuantization(
                f"quantization = {_short(quantization)}",
                file,
                "It must be an object with group_size and bits.",
            )
        _check_native(quantization, directory, file)
        if foreign and foreign != quantization and method and method not in _FORMER_METHODS:
            raise UnknownQuantization(
                f"quant_method = {method!r}",
                f"{foreign_file}, {foreign_key}",
                "mlx-lm would ignore it and read the weights as plain MLX ones.",
            )
    elif foreign:
        _check_foreign(foreign, f"{foreign_file}, {foreign_key}")


def _foreign(config: Mapping[str, Any], directory: Path) -> tuple[Any, str, str]:
    """The quantization_config that mlx-lm would use, with its file and key."""
    file = str(directory / "config.json")
    if "quantization_config" in config:
        return config["quantization_config"], file, "quantization_config"
    text = config.get("text_config")
    if isinstance(text, Mapping) and "quantization_config" in text:
        return text["quantization_config"], file, "text_config.quantization_config"
    other = directory / "hf_quant_config.json"
    try:
        return json.loads(other.read_text(encoding="utf-8")), str(other), "top level"
    except OSError:
        return None, file, "quantization_config"
    except ValueError as error:
        raise UnknownQuantization("a text that is not JSON", str(other), f"({error}.)") from error


def _check_native(quantization: Mapping[str, Any], directory: Path, file: str) -> None:
    """``quantization``: MLX's own metadata with per-layer overrides."""
    where = f"{file}, quantization"
    for key in ("group_size", "bits"):
        if key not in quantization:
            raise UnknownQuantization(f"no {key}", where, "MLX's quantization needs group_size and bits.")
    _check_layer({k: v for k, v in quantization.items() if k in _LAYER_KEYS}, where)
    method = _method(quantization)
    if method and method not in _FORMER_METHODS:
        raise UnknownQuantization(f"quant_method = {method!r}", where, "mlx-lm would ignore it.")
    names: set[str] | None = None
    for key, value in quantization.items():
        if key in _LAYER_KEYS or key in _DESCRIPTIVE_KEYS or value is None:
            continue
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - _LAYER_KEYS)
            if unknown:
                raise UnknownQuantization(
                    f"{unknown[0]} = {_short(value[unknown[0]])}",
                    f"{where}.{key}",
                    "It is neither a parameter of a quantized layer nor one of its overrides.",
                )
            _check_layer(value, f"{where}.{key}")
            continue
        if isinstance(value, bool):
            if "." in key or key in _TOP_MODULES:
                continue
            names = _module_names(directory) if names is None else names
            if key in names or (not value and _marks_rotation(key, _ROTATION)):
                continue
        raise UnknownQuantization(f"{key} = {_short(value)}", where, "mlx-lm would ignore it.")


def _check_layer(entry: Mapping[str, Any], where: str) -> None:
    """Group size, bits and mode of one entry."""
    mode = entry.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise UnknownQuantization(f"mode = {_short(mode)}", where, f"Known modes: {', '.join(MODES)}.")
    for key in ("group_size", "bits"):
        value = entry.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UnknownQuantization(f"{key} = {_short(value)}", where, "It must be a positive whole number.")
    fixed = MODES[mode]
    if fixed is not None:
        bits, group = entry.get("bits") or fixed[0], entry.get("group_size") or fixed[1]
        if (bits, group) != fixed:
            raise UnknownQuantization(
                f"mode = {mode!r} with bits {bits} and group_size {group}",
                where,
                f"{mode} has bits {fixed[0]} and group_size {fixed[1]}.",
            )


def _check_foreign(settings: Any, where: str) -> None:
    """``quantization_config`` of other tools, from which mlx-lm derives its own metadata."""
    if not isinstance(settings, Mapping):
        raise UnknownQuantization(_short(settings), where, "It must be an object with a quant_method.")
    if "quant_method" not in settings:
        raise UnknownQuantization("no quant_method", where, f"Known methods: {', '.join(QUANT_METHODS)}.")
    method = settings["quant_method"]
    if method not in QUANT_METHODS:
        raise UnknownQuantization(
            f"quant_method = {_short(method)}",
            where,
            f"mlx-lm would ignore it. Known methods: {', '.join(QUANT_METHODS)}.",
        )
    if method == "compressed-tensors" and settings.get("format") not in COMPRESSED_FORMATS:
        raise UnknownQuantization(
            f"format = {_short(settings.get('format'))}",
            where,
            f"Known formats of compressed-tensors: {', '.join(COMPRESSED_FORMATS)}.",
        )
    if method == "modelopt":
        nested = settings.get("quantization", settings)
        algorithm = nested.get("quant_algo") if isinstance(nested, Mapping) else None
        if algorithm != "NVFP4":
            raise UnknownQuantization(f"quant_algo = {_short(algorithm)}", where, "Known: NVFP4.")
    if method in ("awq", "gptq") and settings.get("bits", 4) != 4:
        raise UnknownQuantization(f"bits = {_short(settings['bits'])}", where, f"{method} is known with 4 bits.")


def _is_rotated_type(config: Mapping[str, Any]) -> bool:
    """True for model types whose own class applies the rotation (``prism_hadamard_qwen35``).

    A type that the installed mlx-lm lacks is refused by mlx-lm itself.
    """
    return "hadamard" in _text(config.get("model_type"))


def _check_rotation(config: Mapping[str, Any], directory: Path, file: str) -> None:
    """Refuse marks of rotated weights that the model's class would pass over."""
    why = "The weights are stored in a rotated basis and mlx-lm would read them as plain ones."
    for name in _ROTATION_FILES:
        if (directory / name).is_file():
            raise UnknownQuantization(name, str(directory), why)
    if all(key in config for key in _PACK_KEYS):
        raise UnknownQuantization(
            f"{_PACK_KEYS[0]} = {_short(config[_PACK_KEYS[0]])}", file, f"It marks a Hadamard pack. {why}"
        )
    for key, value in config.items():
        if key not in ("quantization", "quantization_config") and value and _marks_rotation(key, _ROTATION_TOP):
            raise UnknownQuantization(f"{key} = {_short(value)}", file, why)
    text = config.get("text_config")
    for prefix, holder in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for block in ("quantization", "quantization_config"):
            for where, key, value in _marks(holder.get(block)):
                raise UnknownQuantization(
                    f"{key} = {_short(value)}", f"{file}, {'.'.join((prefix + block, *where))}", why
                )


def _marks(block: Any, where: tuple[str, ...] = (), depth: int = 0) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Rotation marks in a nested block: (path of the holder, key, value)."""
    if depth > 16:
        return
    if isinstance(block, list):
        for index, item in enumerate(block):
            yield from _marks(item, (*where, str(index)), depth + 1)
    if not isinstance(block, Mapping):
        return
    for key, value in block.items():
        layer = isinstance(value, Mapping) and value and set(value) <= _LAYER_KEYS
        on = value and not (isinstance(value, str) and value.lower() in ("none", "false", "off"))
        module = isinstance(value, bool) and "." in key  # an override of a module of that name
        by_key = on and not layer and not module and _marks_rotation(key, _ROTATION)
        by_value = isinstance(value, str) and key not in _DESCRIPTIVE_KEYS and _marks_rotation(value, _ROTATION)
        if by_key or by_value:
            yield where, key, value
        else:
            yield from _marks(value, (*where, str(key)), depth + 1)


def _marks_rotation(text: str, words: frozenset[str]) -> bool:
    return not words.isdisjoint(re.split(r"[^a-z]+", str(text).lower()))


def _module_names(directory: Path) -> set[str]:
    """First parts of the tensor names, from the shards' index or headers; empty if they cannot be read."""
    from .doctor.shards import ShardError, read_header, tensor_files

    names: set[str] = set()
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names.update(index["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        for file in tensor_files(directory):
            try:
                names.update(read_header(file).tensors)
            except ShardError:
                continue
    return {name.split(".", 1)[0] for name in names}


def _method(settings: Any) -> str:
    return _text(settings.get("quant_method")) if isinstance(settings, Mapping) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
