"""Facts about the CPU that decide speed: instruction sets, affinity, quota and memory."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

#: Instruction sets that kernels use, by the names of /proc/cpuinfo and of macOS's sysctl hw.optional.arm.
ISA_FLAGS = {
    "x86_64": (
        "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
        "avx512_fp16", "avx_vnni", "amx_int8",
    ),
    "arm64": ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sme"),
}  # fmt: skip


def sysctl(name: str) -> str:
    """One value of macOS's sysctl, "" if there is none."""
    if sys.platform != "darwin":
        return ""
    try:
        run = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def isa_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those of :data:`ISA_FLAGS` that the CPU reports, in that order."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    wanted = ISA_FLAGS.get(machine, ())
    if sys.platform == "darwin":
        arm = {"asimddp": "FEAT_DotProd", "asimdhp": "FEAT_FP16", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16",
               "sme": "FEAT_SME"}  # fmt: skip
        if machine == "arm64":
            return ["asimd", *(n for n, f in arm.items() if sysctl(f"hw.optional.arm.{f}") == "1")]
        flags = f"{sysctl('machdep.cpu.features')} {sysctl('machdep.cpu.leaf7_features')}".lower().split()
        return [name for name in wanted if name in flags]
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            found = set(value.split())
            return [name for name in wanted if name in found]
    return []


def _cgroups(controller: str, proc: Path, root: Path) -> list[Path]:
    """Directories of this process's cgroup and its parents that hold the controller's files (v2 and v1)."""
    places = []
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if number == "0" and not controllers:
            top = root
        elif controller in controllers.split(","):
            top = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        place = top / inside.lstrip("/")
        # Inside a container the path may be the host's: then only the mounted root is there.
        places += [p for p in (place, *place.parents) if (p == top or top in p.parents) and p.is_dir()]
    return places


def _number(path: Path) -> list[int | None]:
    """Whole numbers of a one-line file, None for "max"; empty if it cannot be read."""
    try:
        words = path.read_text(encoding="ascii").split()
        return [None if word == "max" else int(word) for word in words]
    except (OSError, ValueError):
        return []


def cpu_quota(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the cgroup grants (1.5 means one and a half), None without a limit."""
    limits = []
    for place in _cgroups("cpu", proc, root):
        both = _number(place / "cpu.max")
        if not both:
            both = _number(place / "cpu.cfs_quota_us") + _number(place / "cpu.cfs_period_us")
        if len(both) == 2 and both[0] and both[1] and both[0] > 0:
            limits.append(both[0] / both[1])
    return min(limits, default=None)


def free_memory(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a new process can use without swapping, within its cgroup's limit; None if unknown.

    On macOS: free, inactive, speculative and purgeable pages.
    """
    if sys.platform == "darwin":
        return _free_memory_macos()
    free = []
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for place in _cgroups("memory", proc, root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _number(place / limit), _number(place / used)
            if most and now and most[0] is not None and now[0] is not None and most[0] < 1 << 60:
                free.append(max(0, most[0] - now[0] + _reclaimable(place)))
    return min(free, default=None)


def _reclaimable(place: Path) -> int:
    """Bytes of file cache that count as used by the cgroup and can be dropped."""
    try:
        for line in (place / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _free_memory_macos() -> int | None:
    try:
        run = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_vm_stat(run.stdout)


def parse_vm_stat(text: str) -> int | None:
    """Usable bytes from the output of macOS's vm_stat, None if it is not such an output."""
    head, _, body = text.partition("\n")
    try:
        page = int(head.split("page size of ")[1].split()[0])
    except (IndexError, ValueError):
        return None
    pages = 0
    for line in body.splitlines():
        name, _, value = line.partition(":")
        if name in ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable"):
            try:
                pages += int(value.strip().rstrip("."))
            except ValueError:
                return None
    return pages * page
