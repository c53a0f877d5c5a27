"""The checks for GPUs under ``tools``, on the lab: what they find right, and that they find what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from backend_core.testing.lab_device import lab_device

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch):
    """``tools(name)`` is a module of the folder, which also finds those of the source tree."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    before = set(sys.modules)
    yield lambda name: __import__(name)
    for name in set(sys.modules) - before:
        if name.startswith("gpu_"):
            del sys.modules[name]


def small(module, sizes: slice) -> list:
    """The smallest case of each kernel, with few rows; many are two tiles."""
    found: dict = {}
    for form, case in sorted(zip(module.formats(), module.cases(), strict=True), key=lambda f: math.prod(f[0][sizes])):
        few = (65,) if "qmm" in case.kernel.name else (1, 5)
        found.setdefault(form[0], dataclasses.replace(case, rows=few))
    return list(found.values())


@pytest.mark.parametrize(("name", "kernels", "sizes"), [
    ("gpu_check", {"affine_mma", "affine_bits", "affine_qmv", "affine_qmm"}, slice(5, 7)),
    ("gpu_check_t5", {"t5_mma", "t5_qmv", "t5_qmm"}, slice(4, 6)),
])  # fmt: skip
def test_small_cases_are_right_in_the_lab(tools, tmp_path, name, kernels, sizes) -> None:
    module, gpu_run = tools(name), tools("gpu_run")
    cases = small(module, sizes)
    assert {case.kernel.name for case in cases} == kernels
    run = gpu_run.Run(name, tmp_path, 600)
    with lab_device("cuda") as gpu:
        gpu_run.check(run, cases)
    assert gpu.calls and not gpu.failed
    assert f"{len(cases)} of {len(cases)} cases, 0 wrong" in (tmp_path / f"{name}.md").read_text()
    entries = json.loads((tmp_path / f"{name}.json").read_text())["check"]
    assert [e["case"] for e in entries] == [c.name for c in cases]
    assert all(0 < e["worst"] <= 1 and not e["unequal"] for e in entries)


def test_kernels_get_the_zeros_of_their_own_weights(tools) -> None:
    module = tools("gpu_check_t5")
    told = set()
    for form, case in zip(module.formats(), module.cases(), strict=True):
        name, zeros, size = form[0], form[-1], form[4] * form[5]
        if name == "t5_mma" and size < 1 << 20:
            assert case.make().facts["zeros"] == zeros and case.make().facts["ratio"] in (16, 24)
            told.add(zeros)
    assert told == {64, 80, 96}


def test_what_is_wrong_is_found(tools, tmp_path) -> None:
    module, gpu_run = tools("gpu_check_t5"), tools("gpu_run")
    case = next(c for c in module.cases() if c.name.startswith("t5_qmv 64 float32"))
    case = dataclasses.replace(case, rows=(1, 2))
    p = case.make()
    off = dataclasses.replace(p, expected=lambda x: (p.expected(x)[0] + 0.5, p.expected(x)[1]))
    cases = [case, dataclasses.replace(case, name="off", make=lambda: off)]
    run = gpu_run.Run("found", tmp_path, 600)
    with lab_device("cuda") as gpu:
        gpu_run.check(run, cases)
        gpu.header = "constant int broken = missing;"
        gpu_run.check(run, [dataclasses.replace(case, name="broken")])
    text = (tmp_path / "found.md").read_text()
    assert "2 of 2 cases, 1 wrong" in text and "1 of 1 cases, 1 wrong" in text
    right, wrong, broken = json.loads((tmp_path / "found.json").read_text())["check"]
    assert right["worst"] <= 1 and wrong["worst"] > 1
    assert "lab_device.header:1: error:" in broken["error"] and "missing" in broken["error"]
