"""The CUDA text of the GPU kernels, compiled where nvcc or NVRTC is, and run where a GPU is."""

from __future__ import annotations

import mlx.core as mx
import pytest
from bonsai_qmv import gpu_offers
from gpu_harness import KERNELS, problem

from backend_core.testing.cuda_text import ARCHITECTURES, compile_cuda, compile_nvrtc, find_nvcc, find_nvrtc
from backend_core.testing.lab_device import to_mlx, wrong_rows

QMV, MMA, BITS, QMM = (KERNELS[f"affine_{name}"] for name in ("qmv", "mma", "bits", "qmm"))


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
@pytest.mark.parametrize(
    ("kernel", "bits", "group", "dtype", "scales", "rows", "symmetric", "bias"),
    [
        (QMV, 1, 32, "float32", "float32", 1, 0, False),
        (QMV, 3, 64, "bfloat16", "bfloat16", 8, 0, True),
        (QMV, 2, 128, "float16", "float32", 5, 2, False),
        (MMA, 1, 128, "float16", "float16", 1, 1, False),
        (MMA, 2, 128, "bfloat16", "bfloat16", 4, 0, True),
        (MMA, 2, 64, "float16", "float32", 8, 2, False),
        (MMA, 4, 32, "float16", "float16", 16, 0, False),
        (MMA, 8, 128, "float16", "float16", 3, 0, False),
        (BITS, 1, 128, "float16", "float32", 1, 0, True),
        (BITS, 1, 128, "bfloat16", "bfloat16", 8, 1, False),
        (QMM, 2, 128, "float16", "float16", 300, 2, True),
        (QMM, 2, 128, "float16", "float16", 300, 0, False),
        (QMM, 1, 64, "bfloat16", "bfloat16", 17, 0, False),
    ],
)
def test_it_compiles(compiler, kernel, bits, group, dtype, scales, rows, symmetric, bias) -> None:
    try:
        find_nvcc() if compiler == "nvcc" else find_nvrtc()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    out = dtype if dtype == scales else "float32"
    launch = kernel.launch(rows=rows, n=40, k=9 * group, bits=bits, group_size=group, x_dtype=dtype, out_dtype=out,
                           scales_dtype=scales, symmetric=symmetric, has_bias=bias, device="cuda")  # fmt: skip
    types = {"x": dtype, "w": "uint32", "scales": scales, "biases": scales, "bias": scales}
    for architecture in ARCHITECTURES if compiler == "nvrtc" else ("sm_90a",):
        compile_with = compile_nvrtc if compiler == "nvrtc" else compile_cuda
        assert compile_with(kernel, launch, types, {"y": out}, architecture).startswith(b"\x7fELF")


def on_gpu() -> str:
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else ""


def product(family, p):
    """``f(x)`` with the problem's weights on the family's device."""
    dtype = p.facts["scales_dtype"]
    scales, biases = to_mlx(p.scales, dtype), to_mlx(p.biases, dtype)
    extra = scales if p.bias is None else to_mlx(p.bias, dtype)
    fixed = (mx.array(p.w), scales, scales if p.facts["symmetric"] else biases, extra)
    return gpu_offers.product(family, {**p.facts, "device": family.device}, fixed)


@pytest.mark.gpu
@pytest.mark.parametrize("family", (gpu_offers.BITS, *gpu_offers.FAMILIES), ids=lambda f: f"{f.name}-{f.device}")
@pytest.mark.parametrize(
    ("bits", "group", "dtype", "n", "k", "symmetric", "bias"),
    [
        (2, 128, "float16", 40, 1152, 0, False),
        (1, 128, "bfloat16", 7, 128, 1, True),
        (2, 64, "float32", 24, 320, 2, False),
        (4, 32, "float16", 72, 288, 0, True),
        (3, 64, "float16", 23, 576, 0, False),
        (1, 128, "float16", 72, 1280, 1, True),
        (1, 128, "bfloat16", 40, 4096, 0, False),
    ],
)
def test_on_the_gpu_rows_are_right_and_have_the_bits_they_have_alone(family, bits, group, dtype, n, k, symmetric,
                                                                     bias) -> None:  # fmt: skip
    if family.device != on_gpu():
        pytest.skip(f"no {family.device} device")
    p = problem(bits, group, dtype, n, k, 17, symmetric=symmetric, bias=bias)
    if family.kernel.eligible(**p.facts):
        pytest.skip(f"{family.kernel.name} does not serve it")

    f, x = product(family, p), to_mlx(p.x, dtype)
    # More rows are another kernel's.
    alone = mx.concatenate([f(x[i : i + 1]) for i in range(16)])
    assert wrong_rows(f, x, [slice(0, rows) for rows in range(1, 18)], *p.expected(), alone) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "group", "dtype", "n", "k", "symmetric", "bias"),
    [
        (2, 128, "float16", 40, 1152, 0, False),
        (2, 128, "float16", 200, 1024, 2, True),
        (1, 64, "bfloat16", 7, 64, 1, False),
        (4, 32, "bfloat16", 72, 288, 0, True),
        (2, 64, "float32", 24, 320, 0, False),
    ],
)
def test_on_the_gpu_many_rows_are_right_and_have_the_bits_they_have_in_any_tile(bits, group, dtype, n, k, symmetric,
                                                                                bias) -> None:  # fmt: skip
    p = problem(bits, group, dtype, n, k, 129, symmetric=symmetric, bias=bias)
    facts = {**p.facts, "device": on_gpu() or "none"}
    family = next((f for f in gpu_offers.FAMILIES if f.device == on_gpu() and not f.kernel.eligible(**p.facts)), None)
    if family is None or gpu_offers.many_rows(facts) is None:
        pytest.skip("no GPU, or no kernel of many rows for it")
    f, x = product(family, p), to_mlx(p.x, dtype)
    assert wrong_rows(f, x, [slice(0, 17), slice(40, 104), slice(0, 129)], *p.expected(), f(x)) == []
