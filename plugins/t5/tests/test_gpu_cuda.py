"""The CUDA text of the GPU kernels, compiled where nvcc is."""

from __future__ import annotations

import pytest
from t5_gpu import KERNELS

from backend_core.testing.cuda_text import compile_cuda, find_nvcc

QMV, MMA, QMM = (KERNELS[f"t5_{name}"] for name in ("qmv", "mma", "qmm"))


@pytest.mark.parametrize(
    ("kernel", "group", "groups", "dtype", "scales", "rows", "bias"),
    [
        (QMV, 128, 9, "float32", "float32", 1, False),
        (QMV, 64, 9, "bfloat16", "bfloat16", 8, True),
        (QMV, 128, 8, "float16", "float32", 5, False),
        (MMA, 128, 40, "float16", "float16", 1, False),
        (MMA, 128, 9, "bfloat16", "bfloat16", 4, True),
        (MMA, 64, 80, "float16", "float16", 8, False),
        (MMA, 64, 9, "bfloat16", "bfloat16", 16, False),
        (QMM, 128, 9, "float16", "float16", 300, True),
        (QMM, 64, 9, "bfloat16", "bfloat16", 17, False),
    ],
)
def test_it_compiles(kernel, group, groups, dtype, scales, rows, bias) -> None:
    try:
        find_nvcc()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    out = dtype if dtype == scales else "float32"
    launch = kernel.launch(rows=rows, n=40, k=groups * group, group_size=group, x_dtype=dtype, out_dtype=out,
                           scales_dtype=scales, has_bias=bias, device="cuda")  # fmt: skip
    types = {"x": dtype, "w": "uint8", "scales": scales, "bias": scales}
    assert compile_cuda(kernel, launch, types, {"y": out}).startswith(b"\x7fELF")
