"""Rewriting a checkpoint: 2-bit ternary weights of mlx to t5, and back.

A tensor becomes t5 if it is 2-bit affine, uses the codes 0, 1 and 2 alone, and its biases are its scales with the sign
bit flipped, all of them, bit for bit. Everything else is copied, and the result says what and why. The biases of what
became t5 are not written: they follow from the scales.

Files are made in a temporary directory beside the destination, which appears only when everything is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backend_core.errors import ModelError

from . import convert, index, marker
from .layout import GROUP_BYTES
from .recognise import find
from .tensors import Output, Tensor, read_file, write_file

_FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
#: Room beside what is written, so that the disk does not run full by a hair.
_SPARE_BYTES = 1 << 20

#: Called with (bytes read since the last call, what is being done).
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Layer:
    """A quantized matrix: the tensors that hold it, and its path in the model."""

    path: str
    weight: Tensor
    scales: Tensor
    biases: Tensor | None
    group_size: int = 0

    @property
    def parts(self) -> list[Tensor]:
        return [t for t in (self.weight, self.scales, self.biases) if t is not None]


@dataclass
class Plan:
    """What is to be done with a checkpoint.

    to
        ``"t5"`` or ``"affine"``.
    files
        Tensors and metadata of each weight file, by path relative to the source.
    layers
        What is converted, by path.
    copied
        Quantized layers that are copied, with the reason.
    before, after
        Bytes of all tensors.
    """

    source: Path
    to: str
    config: dict[str, Any]
    files: dict[Path, tuple[list[Tensor], dict[str, str]]]
    layers: dict[str, Layer] = field(default_factory=dict)
    copied: dict[str, str] = field(default_factory=dict)

    @property
    def before(self) -> int:
        return sum(t.nbytes for tensors, _ in self.files.values() for t in tensors)

    @property
    def after(self) -> int:
        return sum(o.nbytes for path in self.files for o in outputs(self, path))


def plan(source: Path, to: str = "t5", progress: Progress | None = None) -> Plan:
    """Look at every tensor of a checkpoint and decide what is converted. Writes nothing.

    Raises ModelError if the directory is no checkpoint, if it is in the wrong format, if nothing can be converted, or
    (``to="affine"``) if t5 weights are damaged; the message names the tensor.
    """
    config = _read_config(source)
    names = sorted(p for p in source.glob("*.safetensors") if p.is_file())
    if not names:
        raise ModelError(f"{source} has no *.safetensors file")
    result = Plan(source, to, config, {p.relative_to(source): read_file(p) for p in names})
    tensors: dict[str, Tensor] = {}
    for held, _ in result.files.values():
        for tensor in held:
            if tensor.name in tensors:
                raise ModelError(f"{tensor.file}: {tensor.name} is also in {tensors[tensor.name].file.name}")
            tensors[tensor.name] = tensor
    index.check(source, tensors)
    if to == "affine":
        _plan_affine(result, tensors, progress)
    else:
        _plan_t5(result, tensors, progress)
    return result


def _read_config(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise ModelError(f"{source} is not a directory" if source.exists() else f"{source} does not exist")
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{source} has no config.json; it is not a model directory") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{source}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{source}/config.json holds no object")
    return config


# To t5


def _plan_t5(result: Plan, tensors: Mapping[str, Tensor], progress: Progress | None) -> None:
    config = result.config
    if marker.find(config) is not None:
        raise ModelError(f"{result.source} is a t5 checkpoint already (--to affine is the way back)")
    quantization = config.get("quantization", config.get("quantization_config"))
    if not isinstance(quantization, Mapping) or "bits" not in quantization:
        raise ModelError(f"{result.source}/config.json has no quantization by mlx: this is no 2-bit checkpoint of mlx")
    for name, weight in tensors.items():
        path = name.removesuffix(".weight")
        scales, biases = tensors.get(path + ".scales"), tensors.get(path + ".biases")
        if path == name or scales is None:
            continue
        layer = Layer(path, weight, scales, biases, _group_size(weight, scales))
        reason = _why_not(layer, quantization, progress)
        if reason:
            result.copied[path] = reason
        else:
            result.layers[path] = layer
    if not result.layers:
        reasons = sorted(set(result.copied.values())) or ["no tensor has scales"]
        raise ModelError(f"{result.source} has no ternary 2-bit weights: {'; '.join(reasons)}")


def _group_size(weight: Tensor, scales: Tensor) -> int:
    """Weights to a scale, if the codes have 2 bits."""
    return 16 * weight.columns // scales.columns if scales.columns else 0


def _why_not(layer: Layer, quantization: Mapping[str, Any], progress: Progress | None) -> str:
    """Why a quantized layer is not converted, "" if it is. Reads it."""
    own = quantization.get(layer.path)
    entry = own if isinstance(own, Mapping) else quantization
    mode, bits = entry.get("mode", "affine"), entry.get("bits", quantization.get("bits"))
    if mode != "affine":
        return f"{mode} weights"
    if bits != 2:
        return f"{bits}-bit weights"
    weight, scales, biases = layer.weight, layer.scales, layer.biases
    if weight.dtype != "U32" or biases is None:
        return f"{weight.dtype} weights without biases" if biases is None else f"{weight.dtype} weights"
    if scales.dtype not in _FLOAT_BYTES or biases.dtype != scales.dtype:
        return f"scales of {scales.dtype}, biases of {biases.dtype}"
    if layer.group_size not in GROUP_BYTES:
        return f"groups of {layer.group_size}: t5 has groups of 64 and 128"
    if len(weight.shape) not in (2, 3) or scales.shape != biases.shape or weight.shape[:-1] != scales.shape[:-1]:
        return f"shapes {weight.shape}, {scales.shape}, {biases.shape}"
    if 16 * weight.columns != layer.group_size * scales.columns:
        return f"{weight.columns} words a row do not fill {scales.columns} groups"
    for begin, end in scales.blocks():
        if not np.array_equal(convert.negated(scales.read(begin, end)), biases.read(begin, end)):
            return "biases are not -scales, bit for bit"
    for begin, end in weight.blocks():
        words = weight.read(begin, end)
        if progress is not None:
            progress(words.nbytes, layer.path)
        if (words & (words >> np.uint32(1)) & np.uint32(0x55555555)).any():
            return "four values: a code is 3"
    return ""


# To affine


def _plan_affine(result: Plan, tensors: Mapping[str, Tensor], progress: Progress | None) -> None:
    forms = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    for path, size in find(forms, marker.find(result.config), f"{result.source}: ").items():
        weight, scales = tensors[path + ".weight"], tensors[path + ".scales"]
        for begin, end in weight.blocks():
            data = weight.read(begin, end)
            if progress is not None:
                progress(data.nbytes, path)
            if fault := convert.first_fault(data, size):
                raise ModelError(f"{weight.file}: {weight.name} is damaged: {fault} (from row {begin})")
        result.layers[path] = Layer(path, weight, scales, None, size)
    if not result.layers:
        raise ModelError(f"{result.source} has no t5 weights")
    for name in tensors:
        path = name.removesuffix(".scales")
        if path != name and path not in result.layers and path + ".weight" in tensors:
            result.copied[path] = f"{tensors[path + '.weight'].dtype} weights"


# What is written


def outputs(p: Plan, path: Path) -> Iterator[Output]:
    """The tensors of one file of the result, in the source's order."""
    for tensor in p.files[path][0]:
        layer_path, _, part = tensor.name.rpartition(".")
        layer = p.layers.get(layer_path) if part in ("weight", "scales", "biases") else None
        if layer is None:
            yield Output(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, tensor.raw())
        elif part == "weight":
            yield _weight(layer, p.to)
        elif part == "scales":
            yield Output(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, tensor.raw())
            if p.to == "affine":
                name = f"{layer_path}.biases"
                yield Output(name, tensor.dtype, tensor.shape, tensor.nbytes, _biases(tensor))


def _weight(layer: Layer, to: str) -> Output:
    weight, size = layer.weight, layer.group_size
    groups = layer.scales.columns
    columns = groups * (GROUP_BYTES[size] if to == "t5" else size // 16)
    shape = (*weight.shape[:-1], columns)
    nbytes = weight.rows * columns * (1 if to == "t5" else 4)

    def pieces() -> Iterator[bytes]:
        for begin, end in weight.blocks(2 << 20):
            rows = weight.read(begin, end)
            if to == "affine":
                yield convert.to_affine(rows, size).astype("<u4").tobytes()
                continue
            packed = convert.from_affine(rows, size)
            if packed is None:
                raise ModelError(f"{weight.file}: {weight.name} changed while it was read")
            yield packed.tobytes()

    return Output(weight.name, "U8" if to == "t5" else "U32", shape, nbytes, pieces())


def _biases(scales: Tensor) -> Iterator[bytes]:
    for begin, end in scales.blocks():
        yield convert.negated(scales.read(begin, end)).tobytes()


def write(p: Plan, destination: Path, verify: bool = False, progress: Progress | None = None) -> list[str]:
    """Write the planned checkpoint to `destination`, which must not exist or be empty.

    verify
        Read everything back and compare it with the source, number by number, before the destination appears.

    Returns notes for the user. Raises ModelError; then, as after an interrupt, neither directory has changed.
    """
    check_destination(p, destination)
    target = destination.resolve()  # a link stays a link
    made = [d for d in target.parents if not d.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        _remove(made)
        raise ModelError(f"{destination} cannot be written: {error.strerror or error}") from error
    done = False
    try:
        notes = _write_into(p, temporary, progress)
        if verify:
            from .verify import compare

            compare(p, temporary, progress)
        temporary.chmod(0o777 & ~_umask())
        os.replace(temporary, target)
        done = True
    except OSError as error:
        why = error.strerror or error
        raise ModelError(f"{destination} cannot be written: {why}; nothing was left there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not done:
            _remove(made)
    return notes


def _remove(directories: list[Path]) -> None:
    """Remove directories that are empty, the innermost first."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def check_destination(p: Plan, destination: Path) -> None:
    """Raise ModelError unless the result can be written to `destination`."""
    here, there = p.source.resolve(), destination.resolve()
    if here == there:
        raise ModelError(f"{destination} is the source; give another directory")
    if here in there.parents:
        raise ModelError(f"{destination} lies within the source; give a directory outside of it")
    if destination.exists():
        if not destination.is_dir():
            raise ModelError(f"{destination} is a file")
        if any(destination.iterdir()):
            raise ModelError(f"{destination} is not empty; nothing is overwritten")
    parent = next(d for d in there.parents if d.exists())
    others = sum(f.stat().st_size for f in other_files(p))
    needed, free = p.after + others + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise ModelError(f"{parent} has {free >> 20} MB free, {needed >> 20} MB are needed")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def other_files(p: Plan) -> list[Path]:
    """Everything in the source that is not a file of weights."""
    return sorted(f for f in p.source.rglob("*") if f.is_file() and f.relative_to(p.source) not in p.files)


def _write_into(p: Plan, target: Path, progress: Progress | None) -> list[str]:
    notes = []
    names: dict[str, str] = {}
    total = 0
    for path, (_, metadata) in p.files.items():

        def counted(o: Output) -> Output:
            def pieces() -> Iterator[bytes]:
                for piece in o.pieces:
                    if progress is not None:
                        progress(len(piece), o.name)
                    yield piece

            return Output(o.name, o.dtype, o.shape, o.nbytes, pieces())

        made = [counted(o) for o in outputs(p, path)]
        total += write_file(target / path, made, metadata)
        names.update({o.name: path.name for o in made})
    sizes = {path: layer.group_size for path, layer in p.layers.items()}
    for file in other_files(p):
        relative = file.relative_to(p.source)
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        if relative == Path("config.json"):
            config = marker.mark(p.config, sizes, bool(p.copied)) if p.to == "t5" else marker.unmark(p.config, sizes)
            copy.write_text(json.dumps(config, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
        elif relative.name.endswith(index.ENDING) and len(relative.parts) == 1:
            copy.write_text(json.dumps(_index(file, names, total), indent=4) + "\n", encoding="utf-8")
        elif relative.name.upper() == "SHA256SUMS" or relative.suffix == ".sha256":
            notes.append(f"{relative} was left out: its checksums are those of the source")
        else:
            shutil.copyfile(file, copy)
    return notes


def _index(file: Path, names: Mapping[str, str], total: int) -> dict[str, Any]:
    """The index for what was written: where each tensor is, and the size of all of them."""
    given = index.read(file)
    metadata = {**(given.get("metadata") or {}), "total_size": total}
    return {**given, "metadata": metadata, "weight_map": dict(sorted(names.items()))}
