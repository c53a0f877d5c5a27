"""Registry entries: launches, refusals, and a kernel run in the lab."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from rows import COPIED, ROW_SUMS

from backend_core.kernels_registry import Registry
from backend_core.simt import Launch, SimtKernel, arguments, check_dtypes, check_shapes
from backend_core.testing import lab


@pytest.mark.parametrize(
    ("grid", "threadgroup", "message"),
    [((100, 1, 1), (64, 1, 1), "not made of"), ((2048, 1, 1), (2048, 1, 1), "at most 1024"),
     ((48, 1, 1), (48, 1, 1), "whole SIMD groups"), ((64, 1, 1), (0, 1, 1), "not made of")],
)  # fmt: skip
def test_geometries_that_no_gpu_has_are_refused(grid, threadgroup, message) -> None:
    with pytest.raises(ValueError, match=message):
        Launch((), grid, threadgroup)


def test_launches_name_the_kernel_when_they_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="'row_sums': 1000 rows"):
        ROW_SUMS.launch(rows=1000, groups=1, dtype="float16")
    other = dataclasses.replace(ROW_SUMS, template=("T",))
    with pytest.raises(ValueError, match=r"template parameters \('T',\)"):
        other.launch(rows=1, groups=1, dtype="float16")
    greedy = dataclasses.replace(ROW_SUMS, threadgroup_bytes=lambda launch: 40000)
    with pytest.raises(ValueError, match="40000 bytes of threadgroup memory"):
        greedy.launch(rows=1, groups=1, dtype="float16")


def test_arguments_are_those_of_metal_kernel() -> None:
    launch = ROW_SUMS.launch(rows=3, groups=2, dtype="float16", twice=True)
    assert arguments(launch, mx) == {"template": [("T", mx.float16), ("GROUPS", 2), ("TWICE", True)],
                                     "grid": (192, 1, 1), "threadgroup": (64, 1, 1)}  # fmt: skip
    assert launch.value("GROUPS") == 2


def test_shapes_are_checked_by_name() -> None:
    check_shapes(ROW_SUMS, {"x": (2, 3)}, {"x": np.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"'row_sums': x is \(2, 3\), not \(3, 2\)"):
        check_shapes(ROW_SUMS, {"x": (3, 2)}, {"x": np.zeros((2, 3))})


def test_dtypes_are_checked_with_the_layer_and_what_to_do() -> None:
    arrays = {"scales": mx.zeros(1, mx.float16), "bias": mx.zeros(1, mx.int32)}
    check_dtypes(ROW_SUMS, "layers.0.q", {"scales": "float16", "bias": ("float32", "int32")}, arrays)
    with pytest.raises(
        ValueError, match=r"'row_sums': scales of layers\.0\.q is float16, not bfloat16; store it"
    ):
        check_dtypes(ROW_SUMS, "layers.0.q", {"scales": "bfloat16"}, arrays)
    with pytest.raises(
        ValueError, match="bias of q is int32, not float32 or float16; store it as float32"
    ):
        check_dtypes(ROW_SUMS, "q", {"scales": ("float32", "float16"), "bias": ("float32", "float16")}, arrays)


def test_kernels_without_their_device_say_so() -> None:
    with pytest.raises(ValueError, match="'cpu'"):
        ROW_SUMS.on("cpu")
    if not mx.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            COPIED.cuda()


def test_a_registered_kernel_is_announced_for_both_devices_and_hashed_with_the_preludes(monkeypatch, tmp_path) -> None:
    registry = Registry("toy")
    registry.simt(ROW_SUMS)
    assert [(k.name, k.device, k.path.name) for k in registry.kernels] == [
        ("row_sums", "metal", "rows.metal"), ("row_sums", "cuda", "rows.metal")]  # fmt: skip
    assert registry.simt_kernels == [ROW_SUMS]
    before = registry.content_hash()
    (tmp_path / "prelude_cuda.h").write_text("other")
    monkeypatch.setattr("backend_core.simt.preludes", lambda: tmp_path)
    assert registry.content_hash() != before
    with pytest.raises(ValueError, match="registered twice"):
        registry.simt(ROW_SUMS)


@pytest.mark.lab
def test_the_lab_runs_it() -> None:
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
    x = np.random.default_rng(1).standard_normal((5, 192)).astype(np.float16)
    for twice in (False, True):
        launch = ROW_SUMS.launch(rows=5, groups=4, dtype="float32", twice=twice)
        result = ROW_SUMS.lab()(inputs=[x], output_shapes=[(5,)], output_dtypes=[lab.float32],
                                **arguments(launch, lab)).check()  # fmt: skip
        want = x.astype(np.float64).sum(1) * (2 if twice else 1)
        np.testing.assert_allclose(result.outputs[0], want, atol=1e-4)
        assert result.report.buffers["x"].bytes_read == x.nbytes
        assert result.report.threadgroup_bytes == ROW_SUMS.threadgroup_bytes(launch)


@pytest.mark.lab
def test_stream_words_refuses_elements_of_two_bytes(tmp_path) -> None:
    source = tmp_path / "streamed.metal"
    body = "uint words[2];\nstream_words<2, false>(words, x);\ny[0] = words[1];\n"
    source.write_text(f"// --- kernel streamed ---\n{body}")
    kernel = SimtKernel("streamed", source, ("x",), ("y",), (), lambda *, n: Launch((), (n, 1, 1), (n, 1, 1)))

    def launch(x: np.ndarray) -> lab.Result:
        return kernel.lab()(inputs=[x], output_shapes=[(1,)], output_dtypes=[lab.uint32],
                            **arguments(kernel.launch(n=32), lab))  # fmt: skip

    assert launch(np.arange(8, dtype=np.uint32)).outputs[0][0] == 1
    with pytest.raises(lab.LabError, match="stream_words takes elements of four bytes"):
        launch(np.arange(8, dtype=np.uint16).astype(np.float16))
