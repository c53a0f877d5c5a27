"""Faults and errors name the file and the line that an author can open, wherever the text came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend_core.simt import Launch, SimtKernel
from backend_core.testing import lab

pytestmark = pytest.mark.lab

LANE = "uint i [[thread_position_in_grid]]"
ZEROS = np.zeros(8, np.float32)


def the_fault(result: lab.Result) -> tuple[str, int, str]:
    (fault,) = result.report.faults
    assert fault.kind == "out-of-bounds-read"
    return fault.file, fault.line, fault.source.strip()


def run(source: Any, **options: Any) -> lab.Result:
    return lab.run_msl(source, "f", {0: ZEROS, 1: ZEROS}, (8, 1, 1), (8, 1, 1), outputs=[1], **options)


@pytest.mark.parametrize("name", ["next.h", "next.hpp", "next one.metal", "next"])
def test_a_fault_in_a_file_that_is_included(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "my kernels"
    folder.mkdir()
    include = folder / name
    include.write_text("\ninline float next(device const float* a, uint i) {\n  return a[i + 1];\n}\n")
    file = folder / "x.metal"
    file.write_text(
        f'#include "{name}"\nkernel void f(device const float* a, device float* o, {LANE}) {{ o[i] = next(a, i); }}\n'
    )
    assert the_fault(run(file)) == (str(include), 3, "return a[i + 1];")
    include.write_text(include.read_text().replace("i + 1", "i + by"))
    with pytest.raises(lab.LabError) as e:
        run(file)
    lines = str(e.value).splitlines()
    assert lines[1].startswith(f"{include}:3: error: ") and "'by'" in lines[1]
    assert lines[2] == "    3 |   return a[i + by];"


def test_a_file_in_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "my kernels" / "x.metal"
    file.parent.mkdir()
    file.write_text(f"kernel void f(device const float* a, device float* o, {LANE}) {{\n  o[i] = a[i + 1];\n}}\n")
    assert the_fault(run(file)) == (str(file), 2, "o[i] = a[i + 1];")


def test_a_relative_path_that_was_compiled_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "kernels"
        folder.mkdir(parents=True)
        (folder / "get.h").write_text(f"// of {name}\ninline float get(device const float* p) {{ return p[8]; }}\n")
        text = f'#include "get.h"\nkernel void f(device const float* a, device float* o, {LANE}) {{ o[i] = get(a); }}\n'
        (folder / "x.metal").write_text(text)
        monkeypatch.chdir(tmp_path / name)
        line = "inline float get(device const float* p) { return p[8]; }"
        assert the_fault(run(Path("kernels/x.metal"))) == ("kernels/get.h", 2, line)


def test_a_line_directive_that_names_anything() -> None:
    kernel = lab.metal_kernel(
        "k", ["a"], ["o"], '#line 7 "the body"\nuint i = thread_position_in_grid.x;\no[i] = a[i + 1];'
    )
    result = kernel(
        inputs=[ZEROS], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[lab.float32]
    )
    assert the_fault(result) == ("the body", 8, "")


KERNEL = """METAL_FUNC float next(const device float* p, uint i) {
  return p[i + 1];
}
// --- kernel same ---
uint i = thread_position_in_grid.x;
float two = 2;
float three = 3;
o[i] = next(a, i) * two * three;
"""


@pytest.mark.parametrize("name", ["same", "other"])
def test_a_kernel_file_of_one_source(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.metal"

    def launched() -> lab.Result:
        kernel = SimtKernel(
            name="same", source=file, inputs=("a",), outputs=("o",), template=(),
            geometry=lambda **_: Launch((), (32, 1, 1), (32, 1, 1)),
        )  # fmt: skip
        return kernel.lab()(
            inputs=[np.zeros(32, np.float32)], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)],
            output_dtypes=[lab.float32],
        )  # fmt: skip

    file.write_text(KERNEL)
    assert the_fault(launched()) == (f"{name}.metal", 2, "return p[i + 1];")
    file.write_text(KERNEL.replace("i + 1", "i + by"))
    with pytest.raises(lab.LabError) as e:
        launched()
    lines = str(e.value).splitlines()
    assert lines[1].startswith(f"{name}.metal:2: error: ") and "'by'" in lines[1]
    assert lines[2] == "    2 |   return p[i + by];"
    file.write_text(KERNEL.replace("uint i =", "\nuint i =").replace("i + 1", "i") + "if (two > 1) {\n")
    with pytest.raises(lab.LabError, match=rf"{name}.metal:10: error: the bracket '{{' is never closed\n +10 \| if"):
        launched()
