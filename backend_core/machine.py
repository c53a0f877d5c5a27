"""Facts about this machine, each found once and cheaply."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any


@functools.cache
def default_device() -> str:
    """Where mlx evaluates by default: ``"cpu"``, ``"metal"`` or ``"cuda"``."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


@functools.cache
def devices() -> tuple[str, ...]:
    """All devices of this machine; the CPU is always there."""
    import mlx.core as mx

    found = ["cpu"]
    if mx.metal.is_available():
        found.append("metal")
    if hasattr(mx, "cuda") and mx.cuda.is_available():
        found.append("cuda")
    return tuple(found)


def isa_names() -> tuple[str, ...]:
    """Instruction sets that CPU kernels may use, ``portable`` always among them."""
    from . import native

    status = native.status()
    return ("portable", *status.isa_names) if status.available else ("portable",)


@functools.cache
def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        import subprocess

        try:
            return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True,
                                  text=True, timeout=5).stdout.strip()  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine()


@functools.cache
def version(distribution: str) -> str:
    """Installed version of a distribution, "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpu_name() -> str:
    """Name and architecture of the default GPU: ``"NVIDIA H200 sm_90"``."""
    import mlx.core as mx

    info = mx.device_info()
    words = [str(info[key]) for key in ("device_name", "architecture") if info.get(key)]
    return " ".join(words) or default_device()


def nvidia_driver(module: str = "/sys/module/nvidia/version") -> str:
    """Version of the NVIDIA driver, "" if it cannot be told."""
    import ctypes

    try:
        return Path(module).read_text(encoding="utf-8").strip()
    except OSError:
        pass  # containers do not always show it
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    except (OSError, AttributeError):
        pass
    return ""


def affinity() -> list[int]:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def environment_facts(activations: str, plugins: dict[str, str]) -> dict[str, Any]:
    """Everything a measured race depends on besides the site itself.

    `plugins` maps plugin name to "version content_hash". The result is JSON-able; its hash is the
    profile's environment key.
    """
    from . import native

    status = native.status()
    device = default_device()
    gpu = "" if device == "cpu" else gpu_name()
    return {
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "isa": list(status.isa_names),
        "isa_cap": os.environ.get("MLX_ACCEL_ISA", ""),
        "threads": status.threads,
        "affinity": affinity(),
        "system": f"{platform.system()} {platform.release()}",
        "device": device,
        "gpu": gpu,
        "gpu_driver": nvidia_driver() if device == "cuda" else "",  # on a Mac it comes with the system
        "mlx": version("mlx"),
        "core": version("mlx-accel"),
        "native": status.content_hash,
        "activations": activations,
        "plugins": dict(sorted(plugins.items())),
    }
