"""Fake distributions and fresh interpreters, for tests of everything that entry points decide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Source of the start-up hook; first on PYTHONPATH it wins over the installed copy.
STARTUP = ROOT / "backend_core" / "startup"


def distribution(
    root: Path,
    name: str,
    *,
    plugins: Mapping[str, str] | None = None,
    backends: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    version: str = "1.0",
) -> Path:
    """Write what an installer would leave of a distribution into a directory of its own under `root`.

    plugins, backends
        Entry points: name -> "module" or "module:attribute".
    files
        Path -> text, relative to the directory.

    Returns that directory, to be put on sys.path.
    """
    folder = root / f"site-{name}"
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in (("mlx_accel.plugins", plugins), ("mlx_lm.backends", backends)):
        lines += [f"[{group}]", *(f"{k} = {v}" for k, v in (entries or {}).items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for path, text in (files or {}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def python(
    *arguments: str, path: Iterable[Path] = (), env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter of this environment with `path` in front of everything installed.

    It starts in a directory without packages, since ``-c`` puts the working directory first.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **(env or {})}
    return subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=timeout,
        cwd=STARTUP,
    )  # fmt: skip
