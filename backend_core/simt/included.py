"""Text for CUDA's compiler by way of a file, since mlx copies and hashes what it is given at every call."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path


def include(text: str) -> str:
    """A line that includes `text`. The file lives as long as the process, and mlx compiles at the first call."""
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cuh"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
    return f'#include "{path.as_posix()}"\n'


@functools.cache
def _folder() -> Path:
    # A new folder that only this user can write to.
    folder, owner = Path(tempfile.mkdtemp(prefix="mlx-accel-")), os.getpid()

    def remove() -> None:
        # A process that was forked from this one shares the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
