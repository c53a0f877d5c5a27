"""``python -m backend_core.testing.lab report``: what is said of kernels that keep their contract and that do not."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from backend_core.hookspecs import ENTRY_POINT_GROUP
from backend_core.simt import Launch, SimtKernel
from backend_core.testing import lab
from backend_core.testing.lab.__main__ import main

pytestmark = pytest.mark.lab

GOOD = """
threadgroup float last[1];
const uint i = thread_position_in_grid.x;
if (i == 31) { last[0] = x[i]; }
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = x[i] + last[0];
"""


def case(**over) -> lab.Case:
    x = np.arange(32, dtype=np.float32)
    common = {
        "name": "32 values", "launch": Launch((), (32, 1, 1), (32, 1, 1)), "inputs": (x,),
        "outputs": (((32,), "float32"),), "touched": {"x": 128, "y": 128}, "once": ("y",), "shapes": {"x": (32,)},
        "excess": lambda outputs: float(np.abs(outputs[0] - x - 31).max()),
    }  # fmt: skip
    return lab.Case(**common | over)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """install(text, *cases, threadgroup bytes): a plugin "toy" with one kernel."""
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))

    def install(text: str = GOOD, *cases: lab.Case, given: int = 16) -> None:
        source = tmp_path / "toy.metal"
        source.write_text(f"// --- kernel toy ---\n{text}")
        kernel = SimtKernel("toy", source, ("x",), ("y",), (), lambda: case().launch, lambda launch: given)
        module = SimpleNamespace(
            register_kernels=lambda registry: registry.simt(kernel, cases=(lambda: iter(cases)) if cases else None)
        )
        entry = SimpleNamespace(name="toy", load=lambda: module)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: {ENTRY_POINT_GROUP: [entry]}[group])

    return install


def test_a_kernel_that_keeps_its_contract(plugin, capsys) -> None:
    plugin(GOOD, case())
    assert main(["report", "toy"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    # 32 reads, and lane 31's once more.
    assert rows["x"] == ["128", "132", "128", "128", "2"] and rows["y"] == ["128", "128", "128", "128", "1"]
    assert "1 threadgroups of 32 lanes" in text and "races none" in text and "error 0.00" in text
    assert text.splitlines()[-1].startswith("1 kernels, 1 cases, 0 wrong")


@pytest.mark.parametrize(
    ("text", "over", "given", "said"),
    [
        (GOOD.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", ""), {}, 16, "race: "),
        (GOOD, {"touched": {"x": 124}}, 16, "x: 128 bytes are touched, 124 by the contract"),
        (GOOD, {"once": ("x",)}, 16, "x: 132 bytes are requested, some of them twice"),
        (GOOD, {"excess": lambda outputs: 2.0}, 16, "wrong result: 2 times the allowed error"),
        (GOOD, {"excess": lambda outputs: float("nan")}, 16, "wrong result: nan"),
        (GOOD, {}, 0, "bytes of threadgroup memory, not 0"),
        (GOOD, {"shapes": {"x": (16,)}}, 16, "buffers do not fit the contract"),
        (GOOD.replace("x[i] +", "missing +"), {}, 16, "toy.metal:7"),
        (GOOD.replace("x[i] +", "quad_max(x[i]) +"), {}, 16, "'quad_max' is a function that Metal alone has"),
    ],
)
def test_what_breaks_it(plugin, capsys, text, over, given, said) -> None:
    plugin(text, case(**over), given=given)
    assert main(["report", "toy"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line or "toy.metal" in line]
    assert any(said in line for line in wrong), wrong


def test_nothing_is_said_of_the_result_of_a_kernel_that_never_ran(plugin, capsys) -> None:
    plugin(GOOD.replace("x[i] +", "missing +"), case())
    assert main(["report", "toy"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("toy: 32 values\n  WRONG: the kernel does not compile:") and "races" not in text
    assert text.splitlines()[-1].startswith("1 kernels, 1 cases, 1 wrong")


def test_races_are_counted(plugin, capsys) -> None:
    plugin(GOOD.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", ""), case())
    assert main(["report", "toy", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["races"] > 0 and found["contract"] == {"x": 128, "y": 128}


def test_kernels_without_cases_are_named(plugin, capsys) -> None:
    plugin()
    assert main(["report", "toy"]) == 0
    assert "toy\n  not checked: the plugin gives no cases for it" in capsys.readouterr().out


def test_unknown_plugins_and_those_without_such_kernels(plugin, capsys, monkeypatch) -> None:
    plugin()
    assert main(["report", "other"]) == 2
    assert "no plugin 'other' is installed" in capsys.readouterr().err
    entry = SimpleNamespace(name="toy", load=lambda: SimpleNamespace(register_kernels=lambda registry: None))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    assert main(["report", "toy"]) == 2
    assert "announces no kernels" in capsys.readouterr().err
