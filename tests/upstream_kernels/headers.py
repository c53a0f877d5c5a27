"""Finds the Metal kernels that mlx ships as source: in the installed package, or in the wheel for Macs.

The wheels of mlx carry the headers of its Metal kernels, because kernels are compiled on the user's machine. So do
the wheels for Linux, with the same content. Nothing of it is stored here: what the installed mlx lacks is fetched with
pip into the user's cache, once per version of mlx.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx

#: Where the kernels lie below the folder that includes are relative to.
KERNELS = "mlx/backend/metal/kernels"
#: The newest system has the most kernels; the tag only chooses the file, nothing of it is run.
PLATFORM = "macosx_26_0_arm64"


class Unavailable(Exception):
    """The kernels cannot be had; the message says why."""


def version() -> str:
    """The installed version of mlx."""
    return importlib.metadata.version("mlx")


def installed() -> Path | None:
    """The include folder of the installed mlx, if it has the Metal kernels."""
    folder = Path(str(mx.__file__)).resolve().parent / "include"
    return folder if (folder / KERNELS / "quantized.h").is_file() else None


def fetched(cache: Path, timeout_s: float = 240) -> Path:
    """The include folder of the mlx-metal wheel of this mlx, downloaded (78 MB) unless `cache` has it.

    Only the kernels are kept, about 1 MB. Raises :class:`Unavailable` with what pip said.
    """
    target = cache / "upstream" / f"mlx-metal-{version()}"
    if (target / KERNELS / "quantized.h").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(Path(scratch), timeout_s)
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if n.startswith(f"mlx/include/{KERNELS}/")]
            archive.extractall(unpacked, wanted)
        include = unpacked / "mlx" / "include"
        if not (include / KERNELS / "quantized.h").is_file():
            raise Unavailable(f"{wheel.name} has no {KERNELS}/quantized.h")
        try:
            os.replace(include, target)
        except OSError:  # another run was faster
            if not (target / KERNELS / "quantized.h").is_file():
                raise
    return target


def _download(folder: Path, timeout_s: float) -> Path:
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary=:all:", "--python-version", "3.12", "--platform", PLATFORM, "--retries", "1", "--timeout", "20",
        "--dest", str(folder), f"mlx-metal=={version()}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"mlx-metal {version()} did not arrive within {timeout_s:.0f} s") from None
    wheels = list(folder.glob("mlx_metal-*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise Unavailable(f"mlx-metal {version()} cannot be downloaded; pip said: {said}")
    return wheels[0]


def include_dir(cache: Path) -> Path:
    """The folder for `-I`: the installed mlx, else the cache, else a download. Raises :class:`Unavailable`."""
    return installed() or fetched(cache)
