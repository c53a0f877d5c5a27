"""The index of a checkpoint in shards: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from backend_core.errors import ModelError

ENDING = ".safetensors.index.json"


def read(file: Path) -> dict[str, Any]:
    """A parsed index, ``weight_map`` and ``metadata`` made sure of. Raises ModelError."""
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise ModelError(f"{file} is no index: it has no weight_map of tensors and files")
    if not isinstance(index.get("metadata") or {}, dict):
        raise ModelError(f"{file}: metadata is no object")
    return index


def check(directory: Path, tensors: Collection[str]) -> None:
    """Raise ModelError if an index of `directory` names a tensor that is in none of its files."""
    for file in found(directory):
        for name, shard in read(file)["weight_map"].items():
            if name not in tensors:
                gone = "is missing" if not (directory / shard).is_file() else "does not have it"
                where = f"{name} should be in {shard}, which {gone}"
                raise ModelError(f"{directory}: the checkpoint is incomplete: {where}")


def found(directory: Path) -> Iterator[Path]:
    """The index files of a checkpoint."""
    return (p for p in sorted(directory.glob("*" + ENDING)) if p.is_file())
