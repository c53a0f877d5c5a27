"""What CUDA does not have is found in kernels for both, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_core.simt import Launch, SimtKernel
from backend_core.testing.lab.one_source import find_metal_only

pytestmark = pytest.mark.lab

FIRST = "uint i = thread_position_in_grid.x;\n"


def kernel(folder: Path, body: str, functions: str = "", devices: tuple[str, ...] = ("metal", "cuda")) -> SimtKernel:
    own = folder / str(len(list(folder.iterdir())))  # a file is read once
    own.mkdir()
    source = own / "toy.metal"
    source.write_text(f"{functions}// --- kernel toy ---\n{FIRST}{body}\n")
    launch = Launch((), (32, 1, 1), (32, 1, 1))
    return SimtKernel("toy", source, ("x",), ("y",), (), lambda **_: launch, devices=devices)


FAULTS = {
    "float4 v = float4(1); y[i] = v.x;": "'float4' is a constructor",
    "float4 v, w; v.x = w.x = x[i]; y[i] = (v * w).x;": "'v' is a vector",
    "uint3 p = thread_position_in_grid + 1; y[p.x] = 1;": "'thread_position_in_grid' is a vector",
    "y[i] = x[i].xy;": "'xy' is a swizzle",
    "half4 h; y[i] = h.x;": "'half4' is a type",
    "simdgroup_matrix<float, 8, 8> m;": "'simdgroup_matrix' is a type",
    "atomic_fetch_add_explicit(y, 1u, memory_order_relaxed);": "'atomic_fetch_add_explicit' is a function",
    "y[i] = quad_sum(x[i]);": "'quad_sum' is a function",
    "y[i] = simd_min(x[i]);": "'simd_min' is a function",
    "if (simd_any(x[i] > 0)) y[i] = 1;": "'simd_any' is a function",
    "y[i] = clz(int(x[i]));": "'clz' is a function",
    "y[i] = threads_per_grid.x;": "'threads_per_grid' is a position",
    "y[i] = metal::exp(x[i]);": "'metal' is a namespace",
}

NEAR_MISSES = [
    "y[i] = simd_sum(x[i]) + simd_shuffle_down(x[i], 1) + exp(x[i]) * max(1.0f, fma(x[i], 2.0f, 3.0f));",
    "threadgroup uint4 t[32];\nt[i].x = popcount(as_type<uint>(x[i]));\nuint4 v = t[i];\ny[i] = v.x * 2;",
    "uint3 p = thread_position_in_grid;\ny[p.x] = p.y * 2;",
    "struct { int xy; } s;\ns.xy = 1;\ny[i] = s.xy;",
    "#ifdef __CUDACC__\nfloat4 v = make_float4(1, 1, 1, 1);\n#else\nfloat4 v = float4(1);\n#endif\ny[i] = v.x;",
    "{ float4 v; v.x = 1; y[i] = v.x; }\nfloat v = 2;\ny[i] = v * 2;",
]


@pytest.mark.parametrize("body", FAULTS)
def test_what_metal_alone_has(tmp_path: Path, body: str) -> None:
    found = find_metal_only(kernel(tmp_path, body))
    assert FAULTS[body] in found[0].message
    assert (found[0].file, found[0].line, found[0].source) == ("toy.metal", 3, body)


@pytest.mark.parametrize("body", NEAR_MISSES)
def test_what_both_have(tmp_path: Path, body: str) -> None:
    assert find_metal_only(kernel(tmp_path, body)) == []


def test_functions_of_the_file(tmp_path: Path) -> None:
    own = "METAL_FUNC float clamp(float v) { return min(v, 1.0f); }\n"
    assert find_metal_only(kernel(tmp_path, "y[i] = clamp(x[i]);", own)) == []
    other = "METAL_FUNC float f(float v) { return saturate(v); }\n"
    (found,) = find_metal_only(kernel(tmp_path, "y[i] = f(x[i]);", other))
    assert "'saturate' is a function" in found.message and found.line == 1


def test_kernels_of_metal_alone(tmp_path: Path) -> None:
    alone = kernel(tmp_path, "y[i] = quad_sum(x[i]);", devices=("metal",))
    assert find_metal_only(alone) == []
    assert alone.launch().grid == (32, 1, 1)
    with pytest.raises(ValueError, match="kernel 'toy' does not run on 'cuda'"):
        alone.launch(device="cuda")
