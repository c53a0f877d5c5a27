"""The CUDA text of kernels, compiled where nvcc is."""

from __future__ import annotations

import dataclasses
import re

import pytest
from rows import COPIED, ROW_SUMS

from backend_core.testing.cuda_text import CudaError, compile_cuda, cuda_text, find_nvcc


@pytest.fixture
def nvcc() -> str:
    try:
        return find_nvcc()
    except FileNotFoundError as e:
        pytest.skip(str(e))


LAUNCH = ROW_SUMS.launch(rows=3, groups=2, dtype="float16")


def test_the_text_has_mlx_s_signature() -> None:
    text = cuda_text(ROW_SUMS, LAUNCH, {"x": "bfloat16"}, {"y": "float16"})
    arguments = re.search(r"__global__ void custom_kernel_row_sums\((.*?)\) {", text, re.S)
    assert [a.strip() for a in arguments.group(1).split(",")] == [
        "const __nv_bfloat16* x", "const __grid_constant__ Shape x_shape", "__half* y"]  # fmt: skip
    assert "using T = __half;\nconstexpr int GROUPS = 2;\nconstexpr bool TWICE = false;\n" in text


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="row_sums"):
        cuda_text(ROW_SUMS, LAUNCH, {"z": "float16"}, {"y": "float16"})


def test_it_compiles(nvcc) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        launch = ROW_SUMS.launch(rows=3, groups=2, dtype=dtype, twice=True)
        assert compile_cuda(ROW_SUMS, launch, {"x": dtype}, {"y": dtype}).startswith(b"\x7fELF")
    assert compile_cuda(COPIED, COPIED.launch(n=32), {"x": "uint32"}, {"y": "uint32"})


def test_a_syntax_error_is_shown_at_its_line(nvcc, tmp_path) -> None:
    source = tmp_path / "broken.metal"
    source.write_text("// nothing\n\n// --- kernel row_sums ---\nconst int a = 1;\ny[0] = x[0] + missing;\n")
    broken = dataclasses.replace(ROW_SUMS, source=source)
    with pytest.raises(CudaError, match=r'broken\.metal\(5\): error: identifier "missing" is undefined'):
        compile_cuda(broken, LAUNCH, {"x": "float16"}, {"y": "float16"})


def test_stream_words_refuses_elements_of_two_bytes(nvcc, tmp_path) -> None:
    source = tmp_path / "streamed.metal"
    source.write_text("// --- kernel copied ---\nuint words[2];\nstream_words<2, false>(words, x);\ny[0] = words[1];\n")
    streamed = dataclasses.replace(COPIED, source=source)
    with pytest.raises(CudaError, match="stream_words takes elements of four bytes"):
        compile_cuda(streamed, streamed.launch(n=32), {"x": "float16"}, {"y": "uint32"})
