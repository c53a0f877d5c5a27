"""What ``t5=auto`` has measured on this machine, in one JSON file beside the profile of races."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from backend_core import Policy

#: Entries kept, newest last.
MOST = 64


def path() -> Path:
    from backend_core.paths import profile_path

    return profile_path().with_name("t5-auto.json")


def key(kind: str, arrays: Mapping[str, mx.array], count: int, policy: Policy) -> str:
    """Hash of all that a time depends on: machine, versions, plugins, and what is measured."""
    from backend_core import core, machine

    ready = [r for r in core.plugin_host(policy).all_records() if r.state == "ready"]
    facts = machine.environment_facts(policy.activations, {r.name: f"{r.version} {r.content_hash}" for r in ready})
    layers = {name: [list(a.shape), str(a.dtype)] for name, a in sorted(arrays.items())}
    text = json.dumps([facts, kind, layers, count], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recall(at: str) -> dict[str, Any] | None:
    """What was kept, None if nothing or nothing sensible."""
    entry = _read().get(at)
    if isinstance(entry, dict) and isinstance(entry.get("expand"), bool) and isinstance(entry.get("what"), str):
        return entry
    return None


def keep(at: str, entry: Mapping[str, Any]) -> None:
    """Keep an entry. A file that cannot be written is nobody's misfortune: the next load measures again."""
    kept = _read()
    kept.pop(at, None)
    kept[at] = dict(entry)
    file = path()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=file.parent, prefix=".t5-auto.")
        try:
            with os.fdopen(number, "w") as f:
                json.dump(dict(list(kept.items())[-MOST:]), f, indent=1)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)


def _read() -> dict[str, Any]:
    try:
        data = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
