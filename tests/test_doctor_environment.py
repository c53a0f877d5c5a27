"""Each check of the installation on made-up machines, and all of them on this one."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from backend_core import doctor, machine
from backend_core.doctor import checks, cpu, elf, environment, runtime
from backend_core.doctor.checks import Check


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


# --- the record and the runner ------------------------------------------------------------------------------


def test_a_fault_needs_a_mend():
    with pytest.raises(ValueError, match="needs a mend"):
        Check("a", "fault", "broken")
    with pytest.raises(ValueError, match="'bad' is not one of"):
        Check("a", "bad", "broken")


def test_json_and_exit_code():
    good = [checks.ok("a", "fine"), checks.note("b", "slow", "Wait.")]
    bad = [*good, checks.fault("c", "broken", "Mend it.")]
    assert doctor.exit_code(good) == 0 and doctor.exit_code(bad) == 1
    assert json.loads(doctor.to_json(good))["status"] == "note"
    assert json.loads(doctor.to_json([])) == {"status": "ok", "checks": []}
    answer = json.loads(doctor.to_json(bad))
    assert answer["status"] == "fault"
    assert answer["checks"][2] == {"name": "c", "status": "fault", "detail": "broken", "mend": "Mend it."}


def test_a_crashing_section_is_a_fault_and_stops_nothing(monkeypatch):
    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(checks, "SECTIONS", [broken, lambda: [checks.ok("after", "")]])
    found = doctor.run_doctor()
    assert [(c.name, c.status) for c in found] == [("doctor.broken", "fault"), ("after", "ok")]
    assert "RuntimeError: boom" in found[0].detail


def test_this_machine():
    found = by_name(doctor.run_doctor())
    assert not [c for c in found.values() if c.name.startswith("doctor.")]
    assert found["versions.mlx"].status == "ok"
    assert found["devices.mlx"].detail.startswith("cpu")
    assert sys.executable in found["platform.python"].detail
    assert found["compiler"].status != "fault" if "compiler" in found else sys.platform == "darwin"
    for check in found.values():
        assert check.status != "fault" or check.mend


# --- versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "status", "words"),
    [
        ("mlx", "0.32.4", "ok", "tested: 0.32.4"),
        ("mlx", "0.32.2", "note", "outside the tested range >=0.32.4,<0.33"),
        ("mlx", "0.33.0.dev1", "note", "outside the tested range"),
        ("mlx", "0.34.0", "fault", "outside the range >=0.32,<0.34"),
        ("mlx", "", "fault", "not installed"),
        ("mlx-lm", "0.32.2", "ok", "tested"),
        ("mlx-lm", "0.20.1", "fault", "outside the range"),
        ("mlx-vlm", "", "ok", "for vision models"),
        ("mlx-vlm", "0.7.10", "ok", "tested"),
        ("mlx-vlm", "0.9", "note", "outside the range"),
        ("nanobind", "2.9.0", "note", "outside the range"),
        ("mlx-lm", "not a version", "fault", "is not a version"),
    ],
)
def test_version(name, version, status, words):
    check = environment.judge_version(name, version)
    assert (check.name, check.status) == (f"versions.{name}", status)
    assert words in check.detail
    if status == "fault":
        assert f"pip install '{name}>=0.32,<0.34'" in check.mend


def versions_with(monkeypatch, installed: dict[str, set[str]]) -> dict[str, Check]:
    monkeypatch.setattr(environment, "_distributions", lambda: installed)
    return by_name(environment.version_checks())


def test_parts_of_mlx_must_agree(monkeypatch):
    found = versions_with(
        monkeypatch,
        {"mlx": {"0.32.4"}, "mlx-cpu": {"0.32.4"}, "mlx-cuda-13": {"0.31.0"}, "mlx-lm": {"0.32.2"}},
    )
    assert found["versions.mlx-cpu"].status == "ok"
    assert found["versions.mlx-cuda-13"].status == "fault"
    assert "mlx-cuda-13 0.31.0 does not belong to mlx 0.32.4" in found["versions.mlx-cuda-13"].detail
    assert "'mlx-cuda-13==0.32.4'" in found["versions.mlx-cuda-13"].mend


def test_a_package_installed_twice(monkeypatch):
    found = versions_with(monkeypatch, {"mlx": {"0.32.4"}, "mlx-lm": {"0.31.0", "0.32.2"}})
    assert found["versions.mlx-lm"].detail == "installed twice: 0.31.0, 0.32.2"
    assert found["versions.mlx-lm"].status == "fault"


# --- mlx as it runs -----------------------------------------------------------------------------------------


def test_mlx_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(runtime, "_PROBE", "import os; os.abort()")
    facts, problem = runtime.probe_mlx.__wrapped__()
    assert facts == {} and problem.startswith("ended by signal 6")
    monkeypatch.setattr(runtime, "_PROBE", "raise ImportError('libmlx.so: undefined symbol')")
    assert runtime.probe_mlx.__wrapped__()[1] == "exit code 1: ImportError: libmlx.so: undefined symbol"
    monkeypatch.setattr(environment, "probe_mlx", lambda: ({}, "ended by signal 4: no message"))
    (check,) = environment.device_checks()
    assert check.status == "fault" and "ended by signal 4" in check.detail and "force-reinstall" in check.mend


def test_a_driver_without_cuda_in_mlx(monkeypatch):
    facts = {"device": "Device(cpu, 0)", "info": {}, "metal": False, "cuda": False}
    monkeypatch.setattr(environment, "probe_mlx", lambda: (facts, ""))
    monkeypatch.setattr(environment, "nvidia_driver", lambda: "H200, 570.1")
    assert by_name(environment.device_checks())["devices.cuda"].status == "note"


def test_nvidia_driver_from_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert environment.nvidia_driver(tmp_path / "version") == ""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  570.86\nGCC version\n")
    assert environment.nvidia_driver(tmp_path / "version") == "NVRM version: NVIDIA UNIX x86_64  570.86"


@pytest.mark.parametrize(
    ("version", "fused", "status", "words"),
    [
        ("12.2.0", "", "ok", "fused ops compile"),
        ("14.1.0", "", "ok", "fused ops compile"),
        ("14.1.0", None, "note", "mlx#3430"),
        ("12.2.0", None, "ok", "g++ 12.2.0"),
        ("14.1.0", "redeclaration of _Float128\nmore", "fault", "redeclaration of _Float128"),
        ("", None, "note", "no g++"),
    ],
)
def test_compiler(version, fused, status, words):
    (check,) = runtime.judge_compiler(version, fused)
    assert check.status == status and words in check.detail and "more" not in check.detail
    assert status == "ok" or check.mend


def test_blas(tmp_path):
    (tmp_path / "libblas-1.so.3").write_bytes(b"\x7fELF dgemm_ sgemm_")
    (tmp_path / "libblas-2.so.3").write_bytes(b"\x7fELF openblas_get_config")
    netlib = runtime.judge_blas(["liblapack-0.so.3", "libblas-1.so.3"], tmp_path)
    assert netlib.status == "note" and "netlib" in netlib.detail and "slow" in netlib.mend
    assert runtime.judge_blas(["libblas-2.so.3"], tmp_path).detail == "libblas-2.so.3 (OpenBLAS)"
    assert runtime.judge_blas(["libopenblas.so.0"], tmp_path).status == "ok"
    assert runtime.judge_blas(["libblas.so.3"], tmp_path).detail == "libblas.so.3 of the system"
    assert runtime.judge_blas(["libc.so.6"], tmp_path).status == "ok"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF files are Linux's")
def test_needed_libraries():
    folder = runtime.mlx_folder()
    assert folder is not None
    needed = elf.needed_libraries(folder / "lib" / "libmlx.so")
    assert "libc.so.6" in needed and "libstdc++.so.6" in needed
    assert any(name.startswith(("libblas", "libopenblas", "libcublas")) for name in needed)


def test_damaged_elf(tmp_path):
    file = tmp_path / "x.so"
    header = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q14xHH", 64, 56, 4) + b"\0" * 6
    huge = struct.pack("<IIQQQQQQ", 2, 0, 0, 0, 0, 1 << 40, 0, 0)
    far = struct.pack("<IIQQQQQQ", 2, 0, 2**64 - 1, 0, 0, 16, 0, 0)
    for content in (b"", b"garbage", header, header[:40], header + huge * 4, header + far * 4):
        file.write_bytes(content)
        with pytest.raises(elf.ElfError):
            elf.needed_libraries(file)
    with pytest.raises(OSError):
        elf.needed_libraries(tmp_path)


# --- CPU ----------------------------------------------------------------------------------------------------


def test_isa_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx fma avx512_vnni sse2\n")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    assert cpu.isa_flags(info) == ["avx", "avx2", "fma", "avx512_vnni"]
    info.write_text("processor : 0\nFeatures : fp asimd i8mm asimddp\n")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert cpu.isa_flags(info) == ["asimd", "asimddp", "i8mm"]
    assert cpu.isa_flags(tmp_path / "none") == []


def machine_with(tmp_path: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8000000 kB\n")
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return proc, root


def test_quota_of_cgroup_v2_is_the_smallest_on_the_way_up(tmp_path):
    files = {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}
    assert cpu.cpu_quota(*machine_with(tmp_path, "0::/a/b\n", files)) == 4.0


def test_quota_of_cgroup_v1(tmp_path):
    files = {"cpu,cpuacct/x/cpu.cfs_quota_us": "150000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}
    assert cpu.cpu_quota(*machine_with(tmp_path, "4:cpu,cpuacct:/x\n", files)) == 1.5


def test_no_quota(tmp_path):
    files = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    assert cpu.cpu_quota(*machine_with(tmp_path, "4:cpu:/\n0::/\n", files)) is None
    assert cpu.cpu_quota(tmp_path / "no", tmp_path / "no") is None


@pytest.mark.skipif(sys.platform == "darwin", reason="reads /proc")
def test_free_memory_counts_the_cgroup(tmp_path):
    files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 50\n"}
    proc, root = machine_with(tmp_path, "0::/\n", files)
    assert cpu.free_memory(proc, root) == 350
    (root / "memory.max").write_text("max")
    assert cpu.free_memory(proc, root) == 8_000_000 * 1024
    assert cpu.free_memory(tmp_path / "no", tmp_path / "no") is None


def test_vm_stat():
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:     10.\n"
        "Pages active:   99.\nPages inactive: 5.\nPages purgeable: 1.\n"
    )
    assert cpu.parse_vm_stat(text) == 16 * 16384
    assert cpu.parse_vm_stat("nonsense") is None


def test_quota_below_affinity_is_noted(monkeypatch):
    monkeypatch.setattr(machine, "affinity", lambda: [0, 1, 2, 7])
    monkeypatch.setattr(environment, "cpu_quota", lambda: 1.5)
    monkeypatch.setenv("MLX_ACCEL_THREADS", "many")
    found = by_name(environment.cpu_checks())
    assert found["cpu.threads"].status == "note"
    assert "(0-2,7), but the cgroup grants only 1.5 CPUs" in found["cpu.threads"].detail
    assert found["cpu.threads_env"].status == "fault"


# --- hook and profile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("", ["/site/mlx_accel.pth"], True, True), "ok", "active"),
        (("1", ["/site/mlx_accel.pth"], True, False), "note", "MLX_ACCEL_NO_HOOK=1"),
        (("", [], False, False), "fault", "not in this Python's site-packages"),
        (("", ["/site/mlx_accel.pth"], False, False), "fault", "_mlx_accel_boot cannot be found"),
        (("", ["/site/mlx_accel.pth"], True, False), "fault", "not active"),
    ],
)
def test_hook(arguments, status, words):
    check = environment.judge_hook(*arguments)
    assert check.status == status and words in check.detail
    assert status == "ok" or check.mend


def test_profile(tmp_path):
    path = tmp_path / "sub" / "profile.json"
    assert "not there yet" in environment.judge_profile(path).detail
    path.parent.mkdir()
    path.write_text("{}")
    assert environment.judge_profile(path) == Check("profile", "ok", f"{path}, 2 bytes")
    for content in (b"\xff\x00", b"[]", b"[" * 100_000):
        path.write_bytes(content)
        assert "corrupt" in environment.judge_profile(path).detail
    path.unlink()
    path.mkdir()
    assert "cannot be read" in environment.judge_profile(path).detail
    (tmp_path / "file").write_text("")
    assert environment.judge_profile(tmp_path / "file" / "profile.json").status == "note"


def test_unwritable_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = environment.judge_profile(tmp_path / "profile.json")
    assert check.status == "note" and "not writable" in check.detail and "MLX_ACCEL_CACHE" in check.mend
