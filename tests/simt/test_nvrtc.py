"""CUDA texts compiled by NVRTC, as a user's machine does it, where its package or CUDA's libraries are."""

from __future__ import annotations

import dataclasses

import pytest
from rows import COPIED, ROW_SUMS

from backend_core.simt import SimtKernel, nvrtc
from backend_core.testing.cuda_text import ARCHITECTURES, compile_nvrtc, dtypes_of, find_nvrtc
from backend_core.testing.lab.report_command import kernels_of

LAUNCH = ROW_SUMS.launch(rows=3, groups=2, dtype="float16")


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        find_nvrtc()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_text_compiles(architecture) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        launch = ROW_SUMS.launch(rows=3, groups=2, dtype=dtype, twice=True)
        code = compile_nvrtc(ROW_SUMS, launch, {"x": dtype}, {"y": dtype}, architecture)
        assert code.startswith(b"\x7fELF") and b"row_sums_1" in code
    assert compile_nvrtc(COPIED, COPIED.launch(n=32), {"x": "uint32"}, {"y": "uint32"}, architecture)


def test_errors_have_the_line_of_the_file(tmp_path) -> None:
    source = tmp_path / "broken.metal"
    source.write_text("// nothing\n\n// --- kernel row_sums ---\nconst int a = 1;\ny[0] = x[0] + missing;\n")
    broken = dataclasses.replace(ROW_SUMS, source=source)
    with pytest.raises(nvrtc.CompileError, match=r"row_sums does not compile: broken\.metal\(5\): error"):
        compile_nvrtc(broken, LAUNCH, {"x": "float16"}, {"y": "float16"})
    with pytest.raises(ValueError, match="row_sums"):
        compile_nvrtc(broken, LAUNCH, {"z": "float16"}, {"y": "float16"})


def for_cuda(kernel: SimtKernel) -> bool:
    """SIMD-group matrices are Metal's alone."""
    text = kernel.text("metal")
    return "simdgroup_matrix" not in text.header + text.source


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("plugin", ["bonsai_qmv", "t5"])
def test_every_case_of_the_plugins_that_are_installed_compiles(plugin, architecture, installed_plugins) -> None:
    try:
        kernels = kernels_of(plugin)
    except LookupError as error:
        pytest.skip(str(error))
    wrong, compiled = [], {}
    for kernel, cases in kernels:
        if not for_cuda(kernel):
            continue
        for case in cases():
            inputs, outputs = dtypes_of(kernel, case)
            key = (kernel.name, case.launch.template, *inputs.values(), *outputs.values())
            if key not in compiled:
                compiled[key] = True
                try:
                    compile_nvrtc(kernel, case.launch, inputs, outputs, architecture)
                except nvrtc.CompileError as error:
                    wrong.append(f"{case.name}: {error}")
    assert not wrong, "\n".join(wrong)
    assert {name for name, *_ in compiled} == {k.name for k, _ in kernels if not k.name.endswith("_simd")}
