"""Checks of the installation: system, packages, devices, CPU, BLAS, compiler, start-up hook, profile file."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from .. import machine, paths
from .checks import Check, Section, fault, note, ok
from .cpu import cpu_quota, isa_flags, sysctl
from .runtime import blas_checks, compiler_checks, probe_mlx

#: distribution -> (tested version, range that counts as tested, range that can work at all, what it is for).
#: Without a purpose the distribution is required.
VERSIONS: dict[str, tuple[str, str, str, str]] = {
    "mlx": ("0.32.4", ">=0.32.4,<0.33", ">=0.32,<0.34", ""),
    "mlx-lm": ("0.32.2", ">=0.32.2,<0.33", ">=0.32,<0.34", ""),
    "mlx-vlm": ("0.7.10", ">=0.7.10,<0.8", ">=0.7,<0.8", "for vision models"),
    "nanobind": ("3.1.0", "==3.1.*", "==3.1.*", "to build the native module"),
}
#: Distributions that hold the compiled part of mlx and must have its version.
_BACKEND = re.compile(r"mlx-(cpu|metal|cuda(-?\d+)?)")


def platform_checks() -> list[Check]:
    """Operating system, driver, Python."""
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]} on {platform.machine()}"
        rosetta = sysctl("sysctl.proc_translated") == "1"
    else:
        libc = " ".join(platform.libc_ver()).strip()
        system = f"{platform.system()} {platform.release()} on {platform.machine()}{f', {libc}' if libc else ''}"
        rosetta = False
    if rosetta:
        first = fault(
            "platform.system",
            f"{system}, this Python is an x86 program under Rosetta",
            "Create the environment with an arm64 Python.",
        )
    else:
        first = ok("platform.system", system)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    second = ok("platform.python", f"{python}, {sys.executable}")
    driver = nvidia_driver()
    return [first, second, *([ok("platform.nvidia_driver", driver)] if driver else [])]


def nvidia_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """GPU names and driver version, "" without an NVIDIA driver."""
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            run = subprocess.run(query, capture_output=True, text=True, timeout=20)
            if run.returncode == 0 and run.stdout.strip():
                return "; ".join(run.stdout.strip().splitlines())
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        return proc.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def version_checks() -> list[Check]:
    """mlx, mlx-lm, mlx-vlm and nanobind against :data:`VERSIONS`, and the parts of mlx against each other."""
    installed = _distributions()
    checks = []
    for name in VERSIONS:
        found = sorted(installed.get(name, ()))
        if len(found) > 1:
            checks.append(
                fault(
                    f"versions.{name}",
                    f"installed twice: {', '.join(found)}",
                    f"Uninstall {name} until none is left, then: pip install '{name}{VERSIONS[name][2]}'.",
                )
            )
        else:
            checks.append(judge_version(name, found[0] if found else ""))
    base = max(installed.get("mlx", {""}))
    for name in sorted(filter(_BACKEND.fullmatch, installed)):
        wrong = sorted(v for v in installed[name] if v != base)
        if wrong:
            checks.append(
                fault(
                    f"versions.{name}",
                    f"{name} {wrong[0]} does not belong to mlx {base or '(not installed)'}",
                    f"Run: pip install --force-reinstall --no-deps '{name}=={base}'."
                    if base
                    else f"Run: pip uninstall {name}.",
                )
            )
        else:
            checks.append(ok(f"versions.{name}", base))
    return checks


def judge_version(name: str, found: str) -> Check:
    """One distribution of :data:`VERSIONS` in version `found` ("" if absent)."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    tested, tested_range, range_, purpose = VERSIONS[name]
    title, install = f"versions.{name}", f"Run: pip install '{name}{range_}'."
    if not found:
        if purpose:
            return ok(title, f"not installed; needed only {purpose}")
        return fault(title, "not installed", install)
    try:
        version = Version(found)
    except InvalidVersion:
        return fault(title, f"{found!r} is not a version", install)
    if version in SpecifierSet(tested_range, prereleases=True):
        return ok(title, f"{found} (tested: {tested})")
    if version in SpecifierSet(range_, prereleases=True):
        return note(title, f"{found} is outside the tested range {tested_range}", f"Tested is {tested}.")
    status = "note" if purpose else "fault"
    return Check(title, status, f"{found} is outside the range {range_} that can work", install)


def _distributions() -> dict[str, set[str]]:
    """Versions of the installed distributions whose names begin with mlx, and of nanobind, on sys.path."""
    found: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name in VERSIONS or _BACKEND.fullmatch(name):
            found.setdefault(name, set()).add(distribution.version)
    return found


def device_checks() -> list[Check]:
    """Whether mlx can be imported and which devices it sees."""
    facts, problem = probe_mlx()
    if not facts:
        return [
            fault(
                "devices.mlx",
                f"mlx cannot be imported ({problem})",
                f"Run: pip install --force-reinstall '{'mlx[cpu]' if sys.platform == 'linux' else 'mlx'}"
                f"=={VERSIONS['mlx'][0]}'.",
            )
        ]
    names = ["cpu", *(name for name in ("metal", "cuda") if facts.get(name))]
    checks = [ok("devices.mlx", f"{', '.join(names)}; default {facts['device']}")]
    info = "; ".join(f"{key} {value}" for key, value in sorted(facts["info"].items()))
    if info:
        checks.append(ok("devices.info", info))
    if nvidia_driver() and not facts.get("cuda"):
        checks.append(
            note(
                "devices.cuda",
                "there is an NVIDIA driver, but this mlx was installed without CUDA",
                "Install mlx with its CUDA extra to use the GPU.",
            )
        )
    return checks


def cpu_checks() -> list[Check]:
    """CPU model, instruction sets, and how many CPUs may be used."""
    flags = isa_flags()
    checks = [
        ok("cpu.model", machine.cpu_model() or "unknown"),
        ok("cpu.isa", " ".join(flags) or "none of the instruction sets that kernels use"),
    ]
    if platform.machine().lower() in ("x86_64", "amd64") and "avx2" not in flags:
        checks[1] = note(
            "cpu.isa",
            f"no AVX2 ({' '.join(flags) or 'SSE2 only'})",
            "CPU kernels run in their portable form.",
        )
    allowed, quota = machine.affinity(), cpu_quota()
    total = os.cpu_count() or len(allowed)
    detail = f"{len(allowed)} of {total} CPUs allowed ({_ranges(allowed)})"
    if quota is None:
        checks.append(ok("cpu.threads", f"{detail}, no quota"))
    elif quota >= len(allowed):
        checks.append(ok("cpu.threads", f"{detail}, quota {quota:g} CPUs"))
    else:
        checks.append(
            note(
                "cpu.threads",
                f"{detail}, but the cgroup grants only {quota:g} CPUs",
                "Raise the container's CPU quota if more speed is wanted.",
            )
        )
    threads = os.environ.get("MLX_ACCEL_THREADS", "").strip()
    if threads and not (threads.isdecimal() and int(threads) > 0):
        checks.append(
            fault(
                "cpu.threads_env",
                f"MLX_ACCEL_THREADS={threads!r} is not a number of threads",
                "Set MLX_ACCEL_THREADS to a positive whole number, or unset it.",
            )
        )
    elif threads:
        checks.append(ok("cpu.threads_env", f"MLX_ACCEL_THREADS={threads}"))
    return checks


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def hook_checks() -> list[Check]:
    """The start-up hook that adds ``--backend`` to mlx-lm's commands."""
    switch = os.environ.get("MLX_ACCEL_NO_HOOK", "").strip()
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    # Python 3.15 and later read the .start file in place of the .pth file of the same name.
    names = ("mlx_accel.start", "mlx_accel.pth") if sys.version_info >= (3, 15) else ("mlx_accel.pth",)
    places = [Path(folder, name) for folder in dict.fromkeys(folders) for name in names]
    present = [str(place) for place in places if place.is_file()]
    try:
        importable = importlib.util.find_spec("_mlx_accel_boot") is not None
    except (ImportError, ValueError):
        importable = False
    boot = sys.modules.get("_mlx_accel_boot")  # imported at start-up, or not at all
    return [judge_hook("" if switch == "0" else switch, present, importable, boot is not None and boot.active())]


def judge_hook(switch: str, present: list[str], importable: bool, active: bool) -> Check:
    """The check for: kill switch, the .pth files found, module importable, hook in place."""
    without = "meanwhile `mlx-accel run mlx_lm.generate ...` works"
    if switch:
        return note("hook", f"switched off by MLX_ACCEL_NO_HOOK={switch}", "Unset MLX_ACCEL_NO_HOOK.")
    if not present:
        return fault(
            "hook",
            "mlx_accel.pth is not in this Python's site-packages",
            f"Install mlx-accel into the environment of mlx-lm (pip install, not PYTHONPATH); {without}.",
        )
    if not importable:
        return fault(
            "hook",
            f"{present[0]} is there, but its module _mlx_accel_boot cannot be found",
            f"Reinstall mlx-accel; {without}.",
        )
    if not active:
        why = "this Python was started with -S" if sys.flags.no_site else "it was not imported at start-up"
        return fault(
            "hook",
            f"{present[0]} is not active: {why}",
            f"Start Python with its site module and reinstall mlx-accel; {without}.",
        )
    return ok("hook", f"active, {present[0]}")


def profile_checks() -> list[Check]:
    """The file of measured races: readable and writable?"""
    return [judge_profile(paths.profile_path())]


def judge_profile(path: Path) -> Check:
    """The check for one profile file, which need not exist."""
    again = "until then every start races again"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = None
    except OSError as error:
        return note(
            "profile",
            f"{path} cannot be read: {error.strerror or error}",
            f"Correct its permissions or delete it; {again}.",
        )
    if data is not None:
        try:
            if not isinstance(json.loads(data), dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return note(
                "profile",
                f"{path} is corrupt and ignored ({str(error)[:100]})",
                "Run: mlx-accel profile clear.",
            )
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return note(
            "profile",
            f"{folder} is not writable, so that measured races cannot be kept",
            f"Make it writable or name another directory in {paths.CACHE_ENV}; {again}.",
        )
    return ok("profile", f"{path}" + (f", {len(data)} bytes" if data is not None else ", not there yet"))


#: Sections of the environment, in the order of printing.
SECTIONS: list[Section] = [
    platform_checks,
    version_checks,
    device_checks,
    cpu_checks,
    blas_checks,
    compiler_checks,
    hook_checks,
    profile_checks,
]
