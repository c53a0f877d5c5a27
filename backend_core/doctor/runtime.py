"""mlx as it runs here: asked in a process of its own; its BLAS and its run-time compiler."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .checks import Check, fault, note, ok
from .elf import ElfError, needed_libraries

_FIRST_BROKEN_GXX = 13  # ml-explore/mlx#3430

#: Run in a process of its own, since a broken library may end it by a signal.
_PROBE = """
import json, sys
import mlx.core as mx
out = {"version": mx.__version__, "device": str(mx.default_device()), "info": {}, "fused": ""}
out["metal"] = bool(mx.metal.is_available())
out["cuda"] = bool(hasattr(mx, "cuda") and mx.cuda.is_available())
if hasattr(mx, "device_info"):
    out["info"] = {k: v for k, v in mx.device_info().items() if isinstance(v, (str, int, float))}
print(json.dumps(out), flush=True)
try:
    for dtype in (mx.float32, mx.float16):
        f = mx.compile(lambda a, b: a * mx.sigmoid(a) * b)
        mx.eval(f(mx.ones((8,), dtype), mx.ones((8,), dtype)))
except Exception as error:
    out["fused"] = str(error)[:2000]
print(json.dumps(out), flush=True)
"""


@functools.cache
def probe_mlx(timeout: float = 120) -> tuple[dict[str, Any], str]:
    """What mlx says of itself in a process of its own, and why it could not ("" if it could)."""
    try:
        run = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.SubprocessError) as error:
        return {}, str(error)
    facts: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            try:
                facts = json.loads(line)
            except ValueError:
                continue
    if run.returncode == 0 and facts:
        return facts, ""
    tail = run.stderr.strip().splitlines()[-1:] or ["no message"]
    how = f"ended by signal {-run.returncode}" if run.returncode < 0 else f"exit code {run.returncode}"
    return facts, f"{how}: {tail[0]}"


def blas_checks() -> list[Check]:
    """Which BLAS mlx's CPU part is linked to: it decides the speed of stock's dense products."""
    if sys.platform == "darwin":
        return [ok("blas", "Accelerate")]
    folder = mlx_folder()
    if folder is None:
        return []  # the version section has said so
    library = folder / "lib" / "libmlx.so"
    try:
        names = needed_libraries(library)
    except (OSError, ElfError) as error:
        return [note("blas", f"cannot be told: {error}", "Reinstall mlx if it does not work.")]
    return [judge_blas(names, folder.parent / "mlx_cpu.libs")]


def judge_blas(needed: list[str], bundled: Path) -> Check:
    """The check for the libraries that libmlx needs; `bundled` is the folder of those the wheel ships."""
    for name in needed:
        lower = name.lower()
        if "openblas" in lower or "mkl" in lower or "blis" in lower or "nvpl" in lower:
            return ok("blas", name)
        if lower.startswith(("libblas", "libcblas")):
            try:
                data = (bundled / name).read_bytes()
            except OSError:
                return ok("blas", f"{name} of the system")
            if b"openblas_" in data:
                return ok("blas", f"{name} (OpenBLAS)")
            return note(
                "blas",
                f"{name}: the reference BLAS of netlib, one thread and no SIMD",
                "Dense products are slow in stock with it; quantized layers do not use it.",
            )
    return ok("blas", "none linked by libmlx itself")


def mlx_folder() -> Path | None:
    """The installed package folder of mlx, found without importing it."""
    try:
        spec = importlib.util.find_spec("mlx")
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "lib").is_dir():
            return Path(place)
    return None


def compiler_checks() -> list[Check]:
    """mlx compiles fused elementwise ops with g++ at run time on Linux CPUs; does that work here?"""
    if sys.platform == "darwin":
        return []
    version = gxx_version()
    if os.environ.get("MLX_DISABLE_COMPILE"):
        return [note("compiler", "MLX_DISABLE_COMPILE is set", "Unset it to have elementwise ops fused.")]
    facts, problem = probe_mlx()
    return judge_compiler(version, facts.get("fused", "") if facts else None, problem if facts else "")


def judge_compiler(version: str, fused: str | None, problem: str = "") -> list[Check]:
    """The check for g++ `version` ("" if absent).

    fused
        mlx's message when it failed to compile, "" if it compiled, None if mlx could not be asked.
    problem
        How the process ended, if it ended while it compiled.
    """
    mend = "Put g++ 12 first in PATH, or set MLX_DISABLE_COMPILE=1."
    if not version:
        return [note("compiler", "no g++: mlx does not fuse elementwise ops", "Install g++ 12.")]
    if fused or problem:
        first = (fused or problem).splitlines()[0][:300]
        return [fault("compiler", f"g++ {version}: mlx cannot compile fused ops (mlx#3430): {first}", mend)]
    if fused is None and int(version.split(".")[0]) >= _FIRST_BROKEN_GXX:
        return [note("compiler", f"g++ {version}: mlx may fail to compile fused ops (mlx#3430)", mend)]
    return [ok("compiler", f"g++ {version}" + ("" if fused is None else ", fused ops compile"))]


def gxx_version() -> str:
    """Version of the g++ in PATH (``"12.2.0"``), "" if there is none."""
    tool = shutil.which("g++")
    if tool is None:
        return ""
    try:
        run = subprocess.run([tool, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    text = run.stdout.strip()
    return text if re.fullmatch(r"\d+(\.\d+)*", text) else ""
