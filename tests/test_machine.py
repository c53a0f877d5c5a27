"""What races depend on besides the site."""

from __future__ import annotations

import mlx.core as mx
import pytest

from backend_core import machine


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path) -> dict[str, object]:
    info = {"device_name": "NVIDIA H200", "architecture": "sm_90", "free_memory": 5, "compute_capability_major": 9}
    monkeypatch.setattr(machine, "default_device", lambda: "cuda")
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "580.159.04")
    return info


def test_on_a_gpu_races_belong_to_its_name_architecture_and_driver(cuda) -> None:
    facts = machine.environment_facts("model", {})
    assert (facts["device"], facts["gpu"], facts["gpu_driver"]) == ("cuda", "NVIDIA H200 sm_90", "580.159.04")
    # Memory that happens to be free is no reason to race again.
    cuda["free_memory"] = 6
    assert machine.environment_facts("model", {}) == facts


def test_on_the_cpu_no_gpu_counts() -> None:
    facts = machine.environment_facts("model", {})
    assert (facts["gpu"], facts["gpu_driver"]) == ("", "")


def test_the_driver_s_version_comes_from_the_kernel_module(tmp_path) -> None:
    file = tmp_path / "version"
    file.write_text("580.159.04\n")
    assert machine.nvidia_driver(str(file)) == "580.159.04"
