"""Checks of a model directory. Only headers and small files are read, except where a checksum file asks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ..checkpoints import UnknownQuantization, check_quantization
from .checks import Check, fault, guarded, note, ok
from .memory import check_memory, size_text, text_config, whole
from .shards import Header, ShardError, read_header, tensor_files

_INDEX = "model.safetensors.index.json"
_AGAIN = "Download or convert the model again."
_MAX_JSON_BYTES = 1 << 28


def check_model(directory: Path, extra_methods: Collection[str] = ()) -> list[Check]:
    """All checks of one directory. Never raises on damaged files.

    extra_methods
        ``quant_method`` values that plugins read.
    """
    try:
        mode = directory.stat().st_mode
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        mend = "Give the path of a model directory that you may read."
        return [fault("model.directory", f"{directory}: {why}", mend)]
    if not stat.S_ISDIR(mode):
        mend = "Give the directory that holds config.json."
        return [fault("model.directory", f"{directory} is a file", mend)]
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return [
            fault(
                "model.directory",
                f"{directory} cannot be listed: {error.strerror}",
                "Correct its permissions.",
            )
        ]
    config, problem = read_json(directory / "config.json")
    checks = [ok("model.directory", f"{directory}, {len(names)} files")]
    if problem:
        checks.append(fault("model.config", f"config.json {problem}", _AGAIN))
        config = {}
    elif "model_type" not in config:
        checks.append(fault("model.config", "config.json has no model_type", _AGAIN))
    else:
        checks.append(ok("model.config", f"model_type {config['model_type']}"))
    headers: dict[str, Header] = {}
    sections = {
        "weights": lambda: check_weights(directory, headers),
        "checksums": lambda: check_checksums(directory, names),
        "tokenizer": lambda: check_tokenizer(directory, config),
        "sampling": lambda: [check_sampling(directory, vocabulary(config))],
    }
    if config:
        sections["quantization"] = lambda: [check_metadata(config, directory, extra_methods, headers)]
        sections["memory"] = lambda: check_memory(config, headers)
    for name, section in sections.items():
        checks += guarded(f"model.{name}", section)
    return checks


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON object, or ({}, what is wrong with the file)."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return {}, f"has {path.stat().st_size} bytes"
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}, "is missing"
    except OSError as error:
        return {}, f"cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return {}, f"is not JSON ({str(error)[:100]})"
    if not isinstance(value, dict):
        return {}, f"holds no object but a {type(value).__name__}"
    return value, ""


def check_weights(directory: Path, headers: dict[str, Header]) -> list[Check]:
    """Shards against their own headers and against the index. Fills `headers` by file name."""
    checks = []
    files = {path.name: path for path in tensor_files(directory)}
    damaged = set()
    for name, path in files.items():
        try:
            header = read_header(path)
        except ShardError as error:
            checks.append(fault("model.shard", str(error), f"Download {name} again."))
            damaged.add(name)
            continue
        headers[name] = header
        if header.found != header.expected:
            what = "truncated" if header.found < header.expected else "longer than its header says"
            checks.append(
                fault(
                    "model.shard",
                    f"{name} is {what}: {header.expected} bytes expected, {header.found} found",
                    f"Download {name} again.",
                )
            )
    index_path = directory / _INDEX
    if index_path.exists():
        index, problem = read_json(index_path)
        weight_map = index.get("weight_map")
        if problem or not _is_text_map(weight_map):
            checks.append(fault("model.index", f"{_INDEX} {problem or 'has no usable weight_map'}", _AGAIN))
        else:
            checks += _against_index(weight_map, files, headers, damaged)
    else:
        checks += _numbering(files)
    if not files:
        checks.append(fault("model.weights", "there is no model*.safetensors file", _AGAIN))
    elif not any(check.status == "fault" for check in checks):
        tensors = sum(len(header.tensors) for header in headers.values())
        size = sum(header.found for header in headers.values())
        checks.append(ok("model.weights", f"{len(files)} files, {tensors} tensors, {size_text(size)}"))
    return checks


def _is_text_map(value: Any) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def _against_index(
    weight_map: Mapping[str, str], files: Mapping[str, Path], headers: Mapping[str, Header], damaged: set[str]
) -> list[Check]:
    """Shards and tensors that the index names and the files lack, and the other way round."""
    checks = []
    lost = sorted(set(weight_map.values()) - set(files))
    for name in lost:
        count = sum(file == name for file in weight_map.values())
        checks.append(fault("model.index", f"{name} is missing, with {count} tensors", f"Download {name}."))
    absent = sorted(
        tensor
        for tensor, file in weight_map.items()
        if file in headers and tensor not in headers[file].tensors and file not in damaged
    )
    if absent:
        checks.append(
            fault(
                "model.index",
                f"tensors missing from their files: {_some(absent)}",
                "Download the model again.",
            )
        )
    extra = sorted({t for h in headers.values() for t in h.tensors} - set(weight_map))
    if extra:
        mend = "Delete files that do not belong to the model."
        checks.append(note("model.index", f"tensors that the index does not name: {_some(extra)}", mend))
    return checks


def _numbering(files: Mapping[str, Path]) -> list[Check]:
    """Without an index, the numbers in names like model-00001-of-00003.safetensors tell what is missing."""
    parts = [m for m in (re.fullmatch(r"(model.*-)(\d+)(-of-)(\d+)(\.safetensors)", n) for n in files) if m]
    checks = []
    for first in {(m[1], m[4]): m for m in parts}.values():
        if int(first[4]) > 10_000:
            continue
        wanted = [f"{first[1]}{i:0{len(first[2])}}{first[3]}{first[4]}{first[5]}" for i in range(1, int(first[4]) + 1)]
        lost = [name for name in wanted if name not in files]
        if lost and len(lost) < len(wanted):
            checks.append(fault("model.shard", f"missing: {_some(lost)}", "Download the missing files."))
    return checks


def check_checksums(directory: Path, names: list[str]) -> list[Check]:
    """Files against SHA256SUMS or *.sha256, where there is one. Reads the listed files in full."""
    checks = []
    for name in names:
        if name.upper() != "SHA256SUMS" and not name.endswith(".sha256"):
            continue
        try:
            lines = (directory / name).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            checks.append(note("model.checksums", f"{name} cannot be read: {error}", "Delete or correct it."))
            continue
        good = 0
        for line in filter(str.strip, lines):
            found = re.fullmatch(r"\s*([0-9a-fA-F]{64})(?:\s+[* ]?(.+?))?\s*", line)
            target = (found[2] or name.removesuffix(".sha256")) if found else ""
            if found is None or Path(target).is_absolute() or ".." in Path(target).parts:
                checks.append(note("model.checksums", f"{name}: unreadable line {line[:80]!r}", "Correct it."))
                continue
            problem = _wrong_digest(directory / target, found[1].lower())
            good += not problem
            if problem:
                checks.append(fault("model.checksums", f"{target} {problem}", f"Download {target} again."))
        if good:
            checks.append(ok("model.checksums", f"{name}: {good} files as recorded"))
    return checks


def _wrong_digest(path: Path, digest: str) -> str:
    """Why the file has not that SHA-256, "" if it has."""
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return "" if found.hexdigest() == digest else "has another SHA-256 than recorded"


def check_metadata(
    config: Mapping[str, Any],
    directory: Path,
    extra_methods: Collection[str],
    headers: Mapping[str, Header] | None = None,
) -> Check:
    """Is the quantization metadata known, and is there any where the weights are quantized?"""
    try:
        check_quantization(config, directory, extra_methods)
    except UnknownQuantization as error:
        return fault("model.quantization", str(error), "Use a checkpoint of a known format, or its plugin.")
    quantization = config.get("quantization")
    if isinstance(quantization, Mapping):
        overrides = sum(isinstance(v, (Mapping, bool)) for v in quantization.values())
        bits, group = quantization["bits"], quantization["group_size"]
        text = f"{quantization.get('mode', 'affine')}, {bits} bits, group {group}"
        return ok("model.quantization", text + (f", {overrides} layers of their own" if overrides else ""))
    foreign = config.get("quantization_config")
    if isinstance(foreign, Mapping):
        return ok("model.quantization", f"quant_method {foreign.get('quant_method')}")
    # MLX's own packed layers: codes in uint32 with scales beside them.
    packed = sorted(
        name.removesuffix(".scales")
        for header in (headers or {}).values()
        for name in header.tensors
        if name.endswith(".scales") and _is_packed(header, name)
    )
    if packed:
        return fault(
            "model.quantization",
            f"config.json has no quantization entry, but {len(packed)} layers are quantized ({_some(packed)})",
            'Add "quantization": {"group_size": ..., "bits": ...} to config.json, or convert the model again.',
        )
    return ok("model.quantization", "none in config.json")


def _is_packed(header: Header, scales: str) -> bool:
    weight = header.tensors.get(scales.removesuffix("scales") + "weight")
    return weight is not None and weight.dtype == "U32"


def vocabulary(config: Mapping[str, Any]) -> int | None:
    """vocab_size of the (text) model, None if it is not stated."""
    return whole(text_config(config).get("vocab_size"))


def check_tokenizer(directory: Path, config: Mapping[str, Any]) -> list[Check]:
    """Tokenizer files, their ids against vocab_size, and the chat template."""
    checks = []
    other = [n for n in ("tokenizer.model", "tiktoken.model", "vocab.json") if (directory / n).is_file()]
    other += sorted(path.name for path in directory.glob("*.tiktoken"))
    if (directory / "tokenizer.json").exists():
        checks.append(_tokenizer_ids(directory / "tokenizer.json", vocabulary(config)))
    elif other:
        checks.append(ok("model.tokenizer", f"{other[0]} (its ids are not checked)"))
    else:
        checks.append(fault("model.tokenizer", "there is no tokenizer.json or tokenizer.model", _AGAIN))
    settings, problem = read_json(directory / "tokenizer_config.json")
    if problem and problem != "is missing":
        checks.append(fault("model.tokenizer_config", f"tokenizer_config.json {problem}", _AGAIN))
    separate = [n for n in ("chat_template.jinja", "chat_template.json") if (directory / n).is_file()]
    if settings.get("chat_template") or separate:
        checks.append(ok("model.chat_template", separate[0] if separate else "in tokenizer_config.json"))
    else:
        mend = "If the model is made for chat, take chat_template.jinja from where it was published."
        checks.append(note("model.chat_template", "none: prompts are passed on as they are", mend))
    return checks


def _tokenizer_ids(path: Path, vocab_size: int | None) -> Check:
    """Largest id in tokenizer.json against the rows of the embedding."""
    data, problem = read_json(path)
    model, added = data.get("model"), data.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        ids = [i for i in vocab.values() if isinstance(i, int)]
    else:
        ids = list(range(len(vocab))) if isinstance(vocab, list) else []
    if problem or not ids:
        return fault("model.tokenizer", f"tokenizer.json {problem or 'has no vocabulary'}", _AGAIN)
    extra = [t["id"] for t in added if isinstance(t, Mapping) and isinstance(t.get("id"), int)]
    largest, largest_all = max(ids), max(ids + extra)
    if vocab_size is None:
        return ok("model.tokenizer", f"{largest_all + 1} ids; config.json states no vocab_size")
    detail = f"ids up to {largest_all}, vocab_size {vocab_size}"
    if largest >= vocab_size:
        return fault("model.tokenizer", f"{detail}: it is the tokenizer of another model", _AGAIN)
    if largest_all >= vocab_size:
        return note("model.tokenizer", f"{detail}: added tokens lie outside", "Keep those tokens out of prompts.")
    return ok("model.tokenizer", detail)


def check_sampling(directory: Path, vocab_size: int | None) -> Check:
    """generation_config.json: readable, sensible; mlx-lm takes only the end tokens from it."""
    name = "model.sampling"
    data, problem = read_json(directory / "generation_config.json")
    if problem == "is missing":
        return ok(name, "no generation_config.json; mlx_lm.generate samples greedily by default")
    if problem:
        return fault(name, f"generation_config.json {problem}", "Delete or correct generation_config.json.")
    ends = data.get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and (whole(end) is None or end < 0 or (vocab_size is not None and end >= vocab_size)):
            mend = "Correct eos_token_id in generation_config.json."
            return fault(name, f"eos_token_id {end!r} is no token of the model", mend)
    limits = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "top_k": (0.0, 1e9)}
    stated = []
    for key, (low, high) in limits.items():
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            return note(name, f"{key} {value!r} is not between {low:g} and {high:g}", f"Correct {key} in it.")
        stated.append(f"{key} {value:g}")
    if data.get("do_sample") is False or not stated:
        return ok(name, "greedy")
    return ok(name, f"{', '.join(stated)} (pass them to mlx_lm.generate yourself: it reads only the end tokens)")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
