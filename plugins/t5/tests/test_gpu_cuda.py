"""The CUDA text of the GPU kernels, compiled where nvcc or NVRTC is, and run where a GPU is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from t5_gpu import KERNELS, problem
from t5_ternary import gpu_offers

from backend_core.testing.cuda_text import ARCHITECTURES, compile_cuda, compile_nvrtc, find_nvcc, find_nvrtc
from backend_core.testing.lab_device import to_mlx, typed, values, wrong_rows

QMV, MMA, QMM = (KERNELS[f"t5_{name}"] for name in ("qmv", "mma", "qmm"))


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
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
def test_it_compiles(compiler, kernel, group, groups, dtype, scales, rows, bias) -> None:
    try:
        find_nvcc() if compiler == "nvcc" else find_nvrtc()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    out = dtype if dtype == scales else "float32"
    launch = kernel.launch(rows=rows, n=40, k=groups * group, group_size=group, x_dtype=dtype, out_dtype=out,
                           scales_dtype=scales, has_bias=bias, device="cuda")  # fmt: skip
    types = {"x": dtype, "w": "uint8", "scales": scales, "bias": scales}
    for architecture in ARCHITECTURES if compiler == "nvrtc" else ("sm_90a",):
        compile_with = compile_nvrtc if compiler == "nvrtc" else compile_cuda
        assert compile_with(kernel, launch, types, {"y": out}, architecture).startswith(b"\x7fELF")


def product(family, p, many=None):
    """``f(x)`` with the problem's weights on the family's device, told what an offer tells its kernel of them."""
    dtype, w = p.facts["scales_dtype"], mx.array(p.w)
    scales = to_mlx(p.scales, dtype)
    facts = {**p.facts, "device": family.device}
    if family is gpu_offers.MMA:
        facts |= {"ratio": gpu_offers.ratio_of(scales), "zeros": gpu_offers.zeros_of(w, facts["group_size"])}
    return gpu_offers.product(family, facts, (w, scales, scales if p.bias is None else to_mlx(p.bias, dtype)), many)


@pytest.mark.gpu
@pytest.mark.parametrize("family", (gpu_offers.MMA, *gpu_offers.FAMILIES), ids=lambda f: f"{f.name}-{f.device}")
@pytest.mark.parametrize(
    ("group", "dtype", "n", "k", "bias"),
    [
        (128, "float16", 40, 5120, False),
        (128, "bfloat16", 23, 640, True),
        (64, "float16", 72, 2048, True),
        (64, "float32", 24, 320, False),
    ],
)
def test_on_the_gpu_rows_are_right_and_have_the_bits_they_have_alone(family, group, dtype, n, k, bias) -> None:
    if family.device != ("metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else ""):
        pytest.skip(f"no {family.device} device")
    p = problem(group, dtype, n, k, 16, bias=bias)
    if family.kernel.eligible(**p.facts):
        pytest.skip(f"{family.kernel.name} does not serve it")
    # Not more uneven than the matrix kernel takes.
    scales = values(p.scales)
    p.scales = typed(np.copysign(np.maximum(np.abs(scales), 0.02), scales), dtype)
    f, x = product(family, p), to_mlx(p.x, dtype)
    alone = mx.concatenate([f(x[i : i + 1]) for i in range(16)])
    assert wrong_rows(f, x, [slice(0, rows) for rows in range(1, 17)], *p.expected(), alone) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "dtype", "n", "k", "bias"),
    [
        (128, "float16", 200, 1152, False),
        (128, "bfloat16", 7, 128, True),
        (64, "float16", 72, 1024, True),
        (64, "bfloat16", 40, 192, False),
        (128, "float32", 24, 384, False),
    ],
)
def test_on_the_gpu_many_rows_are_right_and_have_the_bits_they_have_in_any_tile(group, dtype, n, k, bias) -> None:
    device = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else ""
    p = problem(group, dtype, n, k, 129, bias=bias)
    facts = {**p.facts, "device": device or "none"}
    family = next((f for f in gpu_offers.FAMILIES if f.device == device and not f.kernel.eligible(**p.facts)), None)
    if family is None or (many := gpu_offers.many_rows(facts)) is None:
        pytest.skip("no GPU, or no kernel of many rows for it")
    f, x = product(family, p, many), to_mlx(p.x, dtype)
    assert wrong_rows(f, x, [slice(0, 17), slice(40, 104), slice(0, 129)], *p.expected(), f(x)) == []
