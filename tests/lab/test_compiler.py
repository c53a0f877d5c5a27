"""Compiling kernels: messages, the cache, the choice of the compiler."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backend_core.testing import lab
from backend_core.testing.lab import compiler, module

pytestmark = pytest.mark.lab

ONE = "o[thread_position_in_grid.x] = 1;"


def launch(body: str, header: str = "") -> lab.Result:
    return lab.metal_kernel("typo", ["a"], ["o"], body, header)(
        inputs=[np.zeros(8, np.float32)], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)],
        output_dtypes=[lab.float32],
    )  # fmt: skip


@pytest.fixture
def cache(compile_cache: Path) -> Iterator[None]:
    """Puts the run's cache back."""
    yield
    lab.use_cache(compile_cache)
    module.forget()


def with_runtime(folder: Path) -> Path:
    """A new folder for compiled kernels that has the lab's runtime, which takes seconds to compile."""
    runtime = compiler._build_runtime()
    folder.mkdir()
    shutil.copy2(runtime, folder)
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("o[0] = as_type<float>(half(1));", "as_type: both types have to have one size"),
        ("float4 v = float4(1, 2); o[0] = v.x;", "a vector of 4 elements takes 4 values"),
        ("o[0] = as_type<float>(no_such(1));", "no_such"),
    ],
)
def test_an_error_in_the_labs_headers_is_shown_where_the_text_led_there(line: str, message: str) -> None:
    with pytest.raises(lab.LabError) as e:
        launch(f"\n\n{line}")
    lines = str(e.value).splitlines()
    assert lines[1].startswith("typo.metal:3: error: ") and message in lines[1]
    assert lines[2] == f"    3 | {line}"
    assert not any("lab/" in text or text.startswith("lab:") for text in lines)


def test_an_error_in_the_header_is_not_followed_by_its_consequences() -> None:
    with pytest.raises(lab.LabError) as e:
        launch(ONE, header="error here\n")
    lines = str(e.value).splitlines()
    assert "'error'" in lines[1]
    assert all(line.startswith(("typo.header.metal:1: error: ", "    1 | error here")) for line in lines[1:])


def test_a_bracket_that_is_never_closed() -> None:
    text = "\nkernel void f(device float* o) {\n    if (o) {\n        o[0] = 1;\n}\n"
    with pytest.raises(lab.LabError, match=r"kernel\.metal:2: error: the bracket '{' is never closed"):
        lab.run_msl(text, "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("body", "header", "place", "line"),
    [
        ("o[0] = 1;\n}\n", "", "typo.metal:2: error: the bracket '}' closes nothing", "}"),
        ("if (a[0] > 0) {\n  o[0] = 1;\n", "", "typo.metal:1: error: the bracket '{' is never closed", "if (a[0]"),
        ("\no[0] = max(a[0], 1.0f;\n", "", "typo.metal:2: error: the bracket '(' is never closed", "o[0] = max(a"),
        (ONE, "void g() {\n", "typo.header.metal:1: error: the bracket '{' is never closed", "void g() {"),
        (ONE, "void g() {\n}}\n", "typo.header.metal:2: error: the bracket '}' closes nothing", "}}"),
    ],
)
def test_a_bracket_too_many_or_too_few_in_a_body(body: str, header: str, place: str, line: str) -> None:
    with pytest.raises(lab.LabError) as e:
        launch(body, header)
    lines = str(e.value).splitlines()
    assert lines[1] == place and line in lines[2] and len(lines) == 3
    kernel = lab.metal_kernel("typo", ["a"], ["o"], body, header)
    try:
        found = lab.check_types(kernel, inputs=[np.zeros(8, np.float32)], output_dtypes=[lab.float32])
    except lab.CompilerMissing:
        return
    assert [str(f).splitlines()[0] for f in found] == [f"{place.replace('error: ', '')} (as given)"]


def test_brackets_that_only_look_unpaired() -> None:
    header = "#if 0\n} (\n#endif\n#define BEGIN if (i > 1) {\n#define END }\n// {\n/* ( */\n"
    body = """
        uint i = thread_position_in_grid.x;
        BEGIN o[i] = 1'000; END else { o[i] = '{' + "]"[0] + (1'000); }  // }
    """
    assert launch(body, header).check().outputs[0].tolist() == [123 + 93 + 1000] * 2 + [1000] * 6


def test_a_body_may_end_the_function_and_begin_another() -> None:
    launch(f"{ONE}\n}}\nvoid unused(uint i) {{\ni += 1;").check()


@pytest.mark.parametrize("name", ["two words", "a=b"])
def test_lines_whatever_the_name_of_the_cache(cache: None, tmp_path: Path, name: str) -> None:
    lab.use_cache(with_runtime(tmp_path / name))
    module.forget()
    (fault,) = launch("\no[thread_position_in_grid.x] = a[thread_position_in_grid.x + 1];").report.faults
    assert (fault.file, fault.line, "a[" in fault.source) == ("typo.metal", 2, True)


def test_a_file_that_is_included_may_change(tmp_path: Path) -> None:
    (tmp_path / "m.metal").write_text('#include "gain.h"\nkernel void f(device float* o) { o[0] = GAIN; }\n')

    def value(gain: str) -> float:
        (tmp_path / "gain.h").write_text(f"#define GAIN {gain}\n")
        zero = np.zeros(1, np.float32)
        result = lab.run_msl(tmp_path / "m.metal", "f", {0: zero}, (1, 1, 1), (1, 1, 1), outputs=[0])
        return float(result.check().outputs[0][0])

    assert [value("1"), value("2"), value("1")] == [1, 2, 1]
    with pytest.raises(lab.LabError, match=r"m\.metal:2: error: .*'unknown'"):
        value("unknown")


def test_text_that_includes_nothing_is_preprocessed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    work = compiler._run
    monkeypatch.setattr(compiler, "_run", lambda *a, **k: calls.append(a) or work(*a, **k))
    body = f"#define ONE_OF_MANY\n{ONE}"
    for header in ("", "#include <metal_stdlib>\n", "  # include <metal_math>  // what it needs\n"):
        launch(body, header)
        calls.clear()
        launch(body, header)
        assert not calls


def test_a_function_without_a_body() -> None:
    with pytest.raises(lab.LabError, match=r"declared but has no body: elsewhere\(int\)"):
        launch("o[0] = elsewhere(1);", header="float elsewhere(int);\n")


def test_a_folder_that_cannot_be_written(cache: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lab.use_cache(tmp_path / "file" / "lab")
    module.forget()
    with pytest.raises(lab.LabError, match=r"cannot be kept in .*file/lab: Not a directory; set MLX_ACCEL_CACHE"):
        launch(ONE)


def test_a_damaged_file_is_made_again(cache: None, tmp_path: Path) -> None:
    whole, broken = with_runtime(tmp_path / "whole"), with_runtime(tmp_path / "damaged")
    lab.use_cache(whole)
    module.forget()
    launch(ONE).check()
    (built,) = whole.glob("kernel-*.so")
    damaged = broken / built.name
    damaged.write_bytes(b"x")
    lab.use_cache(broken)
    module.forget()
    launch(ONE).check()
    assert damaged.stat().st_size > 1000


def test_processes_that_compile_the_same_kernel_at_once(tmp_path: Path) -> None:
    script = f"""
import numpy as np
from pathlib import Path
from backend_core.testing import lab
lab.use_cache(Path({str(tmp_path)!r}))
kernel = lab.metal_kernel("one", ["a"], ["o"], {ONE!r})
result = kernel(inputs=[0], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=["float32"])
print(result.check().outputs[0].sum())
"""
    runs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [run.communicate()[0].strip() for run in runs] == ["8.0"] * 3
    assert sorted(p.name.split("-")[0] for p in tmp_path.iterdir()) == ["kernel", "runtime"]


def test_a_compiler_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    command = compiler.find_compiler().command
    monkeypatch.setenv("CXX", shlex.join([*command, "-DNDEBUG"]))
    compiler._probe.cache_clear()
    try:
        assert lab.find_compiler().command == (*command, "-DNDEBUG")
    finally:
        compiler._probe.cache_clear()
