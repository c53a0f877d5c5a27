"""Compiles the CUDA text of a kernel with nvcc, without a GPU.

    from backend_core.testing.cuda_text import compile_cuda
    compile_cuda(kernel, kernel.launch(...), {"x": "float16", "w": "uint32"}, {"y": "float16"})

What mlx writes around the text is written anew here as far as kernels see it: the signature, template parameters as
constants, and shapes, strides and dimensions of inputs whose names occur. NVRTC, which mlx uses, is the same compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from backend_core.simt import Launch, SimtKernel

_TYPES = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip

_BEFORE = """#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cooperative_groups.h>
struct Shape { int v[8]; __device__ int operator[](int i) const { return v[i]; } };
struct Strides { int64_t v[8]; __device__ int64_t operator[](int i) const { return v[i]; } };
"""
#: What the host's headers define and the compiler that mlx-accel runs on a user's machine (NVRTC) does not know.
_HOST_S_OWN = "".join(f"#undef {name}\n" for name in ("INFINITY", "NAN", "HUGE_VALF", "M_PI", "FLT_MAX", "FLT_MIN"))


class CudaError(Exception):
    """The text does not compile; the message is the compiler's, with lines of the kernel's file."""


def find_nvcc() -> str:
    """The path of nvcc. Raises FileNotFoundError, which says what to install."""
    if path := shutil.which("nvcc"):
        return path
    raise FileNotFoundError("nvcc is not on the PATH: install the CUDA toolkit")


def cuda_text(kernel: SimtKernel, launch: Launch, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """A whole CUDA file with the kernel in it. inputs, outputs: mlx's names of the dtypes, in the kernel's order.

    Raises ValueError if the names are not the kernel's.
    """
    if (names := (tuple(inputs), tuple(outputs))) != (kernel.inputs, kernel.outputs):
        raise ValueError(f"kernel {kernel.name!r} takes {kernel.inputs} and gives {kernel.outputs}, not {names}")
    text = kernel.text("cuda")
    arguments = []
    for name, dtype in inputs.items():
        arguments.append(f"const {_TYPES[dtype]}* {name}")
        for part, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if f"{name}_{part}" in text.source:
                arguments.append(f"const __grid_constant__ {kind} {name}_{part}")
    arguments += [f"{_TYPES[dtype]}* {name}" for name, dtype in outputs.items()]
    signature = ",\n    ".join(arguments)
    return (
        f"{_BEFORE}{_HOST_S_OWN}{text.header}\nnamespace mlx::core::cu {{\nnamespace cg = cooperative_groups;\n"
        f"__global__ void custom_kernel_{kernel.name}(\n    {signature}) {{\n"
        f"{kernel.cuda_body(launch.template)}\n}}\n}}\n"
    )


def compile_cuda(kernel: SimtKernel, launch: Launch, inputs: Mapping[str, str], outputs: Mapping[str, str],
                 architecture: str = "sm_90a") -> bytes:  # fmt: skip
    """The machine code (cubin) of the kernel.

    Raises CudaError with the compiler's message, FileNotFoundError without nvcc, ValueError as :func:`cuda_text`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / f"{kernel.name}.cu", Path(folder) / "out.cubin"
        source.write_text(cuda_text(kernel, launch, inputs, outputs), encoding="utf-8")
        command = [find_nvcc(), f"-arch={architecture}", "-std=c++17", "-cubin", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CudaError(f"kernel {kernel.name!r}:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes()
