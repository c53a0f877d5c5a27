"""CUDA kernels that are compiled without mlx: texts, the cache, what mlx is handed, and what a call gives."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from rows import ROW_SUMS

from backend_core.simt import Family, SimtKernel, bound, compiled, many_rows, nvrtc, product

F32 = ("float32",)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A GPU of compute capability 9.0, empty caches, and a compiler that notes what it is asked for."""
    monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "mlx"))
    info = {"compute_capability_major": "9", "compute_capability_minor": "0"}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    seen = SimpleNamespace(texts=[], info=info, cache=tmp_path / "cache" / "cuda", mlx=tmp_path / "mlx")

    def compile_text(text, name, architecture):
        seen.texts.append(text)
        return f"code for {architecture} of {len(text)}".encode()

    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "compile_text", compile_text)
    compiled.architecture.cache_clear()
    compiled.compiled.cache_clear()
    yield seen
    compiled.architecture.cache_clear()
    compiled.compiled.cache_clear()


def launch(groups: int = 1, rows: int = 8):
    return ROW_SUMS.launch(rows=rows, groups=groups, dtype="float32")


def one(groups: int = 1, inputs=F32) -> compiled.Compiled:
    return compiled.compiled(ROW_SUMS, launch(groups).template, inputs, F32)


def test_the_c_library_s_hash_of_nothing() -> None:
    if not (gcc := shutil.which("g++")):
        pytest.skip("g++ is not installed")
    program = Path(os.environ["MLX_ACCEL_CACHE"]).parent / "hash"
    text = '#include <cstdio>\n#include <string>\nint main() { printf("%zu", std::hash<std::string>{}("")); }'
    subprocess.run([gcc, "-x", "c++", "-", "-o", program], input=text, text=True, check=True)
    assert compiled.hash_of_nothing() == int(subprocess.run([program], capture_output=True, check=True).stdout)


def test_compiled_once_per_machine_and_handed_to_mlx(gpu) -> None:
    kernel = one()
    assert gpu.texts == []
    kernel.prepare()
    kernel.prepare()
    (text,) = gpu.texts
    assert f'extern "C" __global__ void {kernel.symbol}(' in text and "SYMBOL" not in text
    code = (gpu.cache / f"{kernel.symbol}.cubin").read_bytes()
    stem = f"{kernel.symbol}_{compiled.hash_of_nothing():x}"
    assert (gpu.mlx / f"{stem}.ptx").read_bytes() == code
    assert (gpu.mlx / f"{stem}.txt").read_text() == f"{kernel.symbol}\t{kernel.symbol}\n"
    # Another process: nothing is compiled, and what mlx is handed is what was compiled, whoever changed it.
    compiled.compiled.cache_clear()
    (gpu.mlx / f"{stem}.ptx").write_bytes(b"other")
    one().prepare()
    assert len(gpu.texts) == 1 and (gpu.mlx / f"{stem}.ptx").read_bytes() == code


def test_another_text_type_or_gpu_is_another_kernel(gpu) -> None:
    symbols = {one().symbol, one(inputs=("float16",)).symbol, one(groups=1).symbol, one(groups=2).symbol}
    assert len(symbols) == 3
    gpu.info["compute_capability_major"] = "8"
    compiled.architecture.cache_clear()
    compiled.compiled.cache_clear()
    assert compiled.architecture() == "sm_80" and one().symbol not in symbols


def test_several_at_once_and_a_failure_is_left_to_the_call(gpu, monkeypatch) -> None:
    compiled.prepare([one(), one(inputs=("float16",)), one()])
    assert len(gpu.texts) == 2

    def broken(*_):
        raise nvrtc.CompileError("no")

    monkeypatch.setattr(nvrtc, "compile_text", broken)
    bad = one(inputs=("bfloat16",))
    compiled.prepare([bad])
    with pytest.raises(nvrtc.CompileError, match="no"):
        bad.prepare()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """Calls of compiled kernels and of texts, in place of mlx's."""
    made: list = []
    monkeypatch.setattr(compiled, "why_not", lambda: "")
    monkeypatch.setattr(compiled, "caller", lambda symbol, grid, threadgroup, given: (
        lambda **k: made.append((symbol, grid, threadgroup, k))))  # fmt: skip
    monkeypatch.setattr(bound, "_with_text", lambda kernel, template: lambda **k: made.append(("text", k)))
    return made


def call(f, *arrays) -> None:
    f(inputs=list(arrays), output_shapes=[(8,)], output_dtypes=[mx.float32])


def test_a_call_gives_arrays_and_the_shapes_that_the_kernel_names(gpu, calls) -> None:
    f = bound.CudaCall(ROW_SUMS, launch(), ())
    assert gpu.texts == []
    x = mx.zeros((2, 4, 4))
    call(f, x)
    call(f, x[0])
    symbol = one().symbol
    assert [c[:3] for c in calls] == [(symbol, launch().grid, launch().threadgroup)] * 2
    first, second = (c[3] for c in calls)
    assert compiled.shaped(ROW_SUMS) == ("x",)
    assert first["scalars"] == [2, 4, 4, 1, 3] and second["scalars"] == [4, 4, 1, 1, 2]
    assert first["inputs"] == [x] and first["output_shapes"] == [(8,)]


def test_other_dtypes_and_many_dimensions_go_the_way_of_text(gpu, calls) -> None:
    f = bound.CudaCall(ROW_SUMS, launch(), ())
    call(f, mx.zeros((8, 4)))
    call(f, mx.zeros((8, 4), mx.float16))
    call(f, mx.zeros((1, 1, 1, 8, 4)))
    assert [c[0] for c in calls] == [one().symbol, "text", "text"]
    assert [note.partition(": ")[2] for note in f.notes] == [
        "called with float16 after float32", "an array of 5 dimensions",
    ]  # fmt: skip
    call(f, mx.zeros((8, 4)))
    assert calls[-1][0] == one().symbol and len(f.notes) == 2


@pytest.mark.parametrize("error", [nvrtc.CompileError("no"), OSError("no"), ValueError("no")])
def test_what_cannot_be_compiled_here_goes_to_mlx_as_text(gpu, calls, monkeypatch, error) -> None:
    def fails(*_):
        raise error

    monkeypatch.setattr(nvrtc, "compile_text", fails)
    f, other = (bound.CudaCall(ROW_SUMS, launch(), ()) for _ in range(2))
    for _ in range(2):
        call(f, mx.zeros((8, 4)))
    before = "kernel 'row_sums' is compiled by mlx, without bounds on registers: "
    assert f.notes == [f"{before}no"]
    monkeypatch.setattr(compiled, "why_not", lambda: "it does not work")
    call(other, mx.zeros((8, 4)))
    assert other.notes == [f"{before}it does not work"]
    assert [c[0] for c in calls] == ["text", "text", "text"]


def test_a_text_that_was_refused_is_not_compiled_again(gpu, calls, monkeypatch) -> None:
    asked = []

    def refuses(text, *_):
        asked.append(text)
        raise nvrtc.CompileError("no\n" + 5000 * "x")

    monkeypatch.setattr(nvrtc, "compile_text", refuses)
    compiled.prepare([one()])
    layers = [bound.CudaCall(ROW_SUMS, launch(), ()) for _ in range(3)]
    shared: list[str] = []
    for f in layers:
        f.notes = shared
        call(f, mx.zeros((8, 4)))
    compiled.prepare([one()])
    assert len(asked) == 1 and len(shared) == 1 and 1500 < len(shared[0]) < 1600


def test_what_the_compiler_takes_has_no_notes(gpu, calls) -> None:
    f = bound.CudaCall(ROW_SUMS, launch(), ())
    call(f, mx.zeros((8, 4)))
    assert calls[0][0] == one().symbol and f.notes == []


def test_notes_of_a_product_are_those_of_all_its_launches(gpu, calls, monkeypatch) -> None:
    """Also of one that is made long after the layer was decided on."""

    def bind(kernel, device, launch, fixed=()):
        def call(*, inputs, output_shapes, output_dtypes):
            call.notes.append(f"{launch.grid[0]} threads")
            return [mx.zeros(output_shapes[0])]

        call.notes = []
        return call

    monkeypatch.setattr(SimtKernel, "bind", bind)
    kernel = dataclasses.replace(ROW_SUMS, geometry=lambda *, rows, **_: launch(rows=rows))
    family = Family("sums", kernel, "cuda", (8, 0), (1, 16), 1, "")
    facts = {"n": 4, "k": 4, "out_dtype": "float32"}
    many = many_rows(kernel, "cuda", facts, (), lambda rows: rows)
    f = product(family, facts, (), lambda x: x, many)
    f(mx.zeros((1, 4)))
    assert f.notes == ["32 threads"]
    f(mx.zeros((20, 4)))
    f(mx.zeros((2, 4)))
    assert f.notes == ["32 threads", "640 threads", "512 threads"]


def test_fixed_arrays_come_last(gpu, calls) -> None:
    x = mx.zeros((8, 4))
    f = bound.CudaCall(ROW_SUMS, launch(), (x,))
    call(f)
    assert calls[0][3]["inputs"] == [x] and calls[0][3]["scalars"] == [8, 4, 1, 1, 2]
    monkey: list = []
    bound._with_fixed(lambda **k: monkey.append(k["inputs"]), (x,))(inputs=[1], output_shapes=[], output_dtypes=[])
    assert monkey == [[1, x]]


def test_why_not_says_what_is_missing(monkeypatch) -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device")
    compiled.why_not.cache_clear()
    assert compiled.why_not() != ""
    monkeypatch.setenv("MLX_ACCEL_CUDA_CACHE", "0")
    compiled.why_not.cache_clear()
    assert compiled.why_not() == "MLX_ACCEL_CUDA_CACHE=0"
    compiled.why_not.cache_clear()
