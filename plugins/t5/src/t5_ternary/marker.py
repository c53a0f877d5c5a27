"""What config.json says about t5 weights.

A checkpoint in this format is marked::

    "quantization_config": {"quant_method": "t5", "version": 1, "group_size": 128,
                            "lm_head": {"group_size": 64}, "source": {"quantization": {...}}}

Entries with a module's path hold what differs for that module. ``source`` keeps the entries that the 2-bit checkpoint
had, for the way back. Where other layers are quantized by mlx, ``quantization`` stays for them and carries the marker
too: mlx-lm writes it over ``quantization_config`` when it saves a model. Files without a marker are recognised by the
shapes of their tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from backend_core.errors import ModelError

from .layout import GROUP_BYTES, VERSION

METHOD = "t5"
#: Keys of the marker that are no module's path.
_OWN_KEYS = frozenset({"quant_method", "version", "group_size", "source"})


def find(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The marker, None in a configuration without one.

    Raises ModelError if the marker is of a later version or names a group size that the format does not have.
    """
    for key in ("quantization_config", "quantization"):
        entry = config.get(key)
        if isinstance(entry, Mapping) and entry.get("quant_method") == METHOD:
            _check(entry, key)
            return dict(entry)
    return None


def _check(entry: Mapping[str, Any], key: str) -> None:
    version = entry.get("version", VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelError(f"config.json, {key}.version = {version!r} is not a positive whole number")
    if version > VERSION:
        raise ModelError(
            f"config.json, {key}.version = {version}: t5 of a later version than {VERSION}; upgrade mlx-accel-t5"
        )
    for where, size in _sizes(entry).items():
        if size is not None and (not isinstance(size, int) or size not in GROUP_BYTES):
            place = f"{key}.{where}" if where else key
            raise ModelError(f"config.json, {place}.group_size = {size!r}: t5 has groups of 64 and 128")


def source_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a marker keeps of the 2-bit checkpoint's configuration: ``quantization`` and ``quantization_config``.

    Raises ModelError if a host could make nothing of it.
    """
    source = entry.get("source")
    if source is None:
        return {}
    where = "config.json, quantization_config.source"
    if not isinstance(source, Mapping) or not set(source) <= {"quantization", "quantization_config"}:
        raise ModelError(f"{where} does not hold the quantization of a 2-bit checkpoint")
    kept = source.get("quantization", source.get("quantization_config", {}))
    if not isinstance(kept, Mapping) or not all(_is_count(kept.get(key)) for key in ("group_size", "bits") if source):
        raise ModelError(f"{where} is no quantization of mlx: it has no sound group_size and bits")
    for path, value in kept.items():
        if "." in path and not isinstance(value, (Mapping, bool)):
            raise ModelError(f"{where}: {path} = {value!r} says nothing about a module")
    return dict(source)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _sizes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Group sizes by path, "" for the others; empty for mlx's own entry with the marker in it."""
    if "bits" in entry:
        return {}
    return {"": entry.get("group_size"), **{path: entry[path].get("group_size") for path in overrides(entry)}}


def group_size(entry: Mapping[str, Any], path: str) -> int | None:
    """The group size that a marker states for a module; None if it states none."""
    sizes = _sizes(entry)
    return sizes.get(path) or sizes.get("")


def mark(config: Mapping[str, Any], sizes: Mapping[str, int], others: bool) -> dict[str, Any]:
    """`config` with the marker for modules `sizes` (path -> group size).

    others
        True if mlx quantized further layers, for which ``quantization`` stays.
    """
    common = Counter(sizes.values()).most_common(1)[0][0]
    source = {key: config[key] for key in ("quantization", "quantization_config") if key in config}
    entry: dict[str, Any] = {"quant_method": METHOD, "version": VERSION, "group_size": common}
    entry.update({path: {"group_size": size} for path, size in sizes.items() if size != common})
    result = dict(config)
    result["quantization_config"] = {**entry, **({"source": source} if source else {})}
    native = config.get("quantization")
    if native is not None and others:
        kept = {key: value for key, value in native.items() if key not in sizes}
        result["quantization"] = {**kept, "quant_method": METHOD, "version": VERSION}
    else:
        result.pop("quantization", None)
    return result


def unmark(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """`config` as the 2-bit checkpoint with modules `sizes` has it: what ``source`` keeps, else what mlx needs."""
    entry = find(config)
    result = dict(config)
    if entry is None:
        if "quantization" not in result:
            result["quantization"] = _native({}, sizes)
        return result
    for key in ("quantization", "quantization_config"):
        result.pop(key, None)
    if source := source_of(entry):
        return {**result, **source}
    native = config.get("quantization")
    kept = {k: v for k, v in native.items() if k not in ("quant_method", "version")} if native else {}
    return {**result, "quantization": _native(kept, sizes)}


def _native(kept: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    common = Counter(sizes.values()).most_common(1)[0][0]
    default = {"group_size": common, "bits": 2}
    result = {**default, **kept}
    for path, size in sizes.items():
        if (size, 2) != (result["group_size"], result["bits"]):
            result[path] = {"group_size": size, "bits": 2}
    return result


def overrides(entry: Mapping[str, Any]) -> set[str]:
    """Paths of the modules that a marker has entries for."""
    return {key for key, value in entry.items() if key not in _OWN_KEYS and isinstance(value, Mapping)}
