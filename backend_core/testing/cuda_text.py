"""Compiles the CUDA text of a kernel with nvcc or NVRTC, without a GPU.

    from backend_core.testing.cuda_text import compile_cuda, compile_nvrtc
    launch = kernel.launch(..., device="cuda")
    compile_cuda(kernel, launch, {"x": "float16", "w": "uint32"}, {"y": "float16"})
    compile_nvrtc(kernel, launch, {"x": "float16", "w": "uint32"}, {"y": "float16"}, "sm_89")

For nvcc, what mlx writes around the text is written anew here as far as kernels see it: the signature, template
parameters as constants, and shapes, strides and dimensions of inputs whose names occur. For NVRTC it is the text that a
user's machine compiles.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from backend_core.simt import Launch, SimtKernel, compiled, nvrtc
from backend_core.testing.lab.cases import Case
from backend_core.testing.lab.dtypes import dtype_of

#: GPUs that kernels with matrix instructions are compiled for in tests: A100, L40 and RTX 40, H100 and H200.
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
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


@functools.cache
def find_nvrtc() -> str:
    """Loads NVRTC of CUDA 12 or newer into the process and gives its version: from the package nvidia-cuda-nvrtc, from
    CUDA_HOME, or from where the system's loader looks.

    Raises FileNotFoundError, which says what to install; CUDA's headers are needed too.
    """
    for library in _libraries():
        try:
            # NVRTC asks for this one by name alone.
            for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")) if library.is_absolute() else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        nvrtc.include_folders()
        return nvrtc.version()
    raise FileNotFoundError("NVRTC was not found: pip install nvidia-cuda-nvrtc, or set CUDA_HOME")


def _libraries() -> Iterable[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [p for root in (spec and spec.submodule_search_locations) or () for p in Path(root).glob("*/lib")]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders += [Path(home) / part for home in homes if home for part in ("lib64", "lib")]
    for folder in folders:
        yield from sorted(folder.glob("libnvrtc.so.1[2-9]"), reverse=True)
    if name := ctypes.util.find_library("nvrtc"):
        yield Path(name)


def compile_nvrtc(kernel: SimtKernel, launch: Launch, inputs: Mapping[str, str], outputs: Mapping[str, str],
                  architecture: str = "sm_90a") -> bytes:  # fmt: skip
    """The machine code (cubin) that a user's machine makes of the kernel. inputs, outputs: as of :func:`cuda_text`.

    Raises nvrtc.CompileError with the compiler's message, FileNotFoundError as :func:`find_nvrtc`, ValueError if the
    kernel names strides or the names are not the kernel's.
    """
    find_nvrtc()
    if (names := (tuple(inputs), tuple(outputs))) != (kernel.inputs, kernel.outputs):
        raise ValueError(f"kernel {kernel.name!r} takes {kernel.inputs} and gives {kernel.outputs}, not {names}")
    text = compiled.text_of(kernel, launch.template, list(inputs.values()), list(outputs.values()), f"{kernel.name}_1")
    return nvrtc.compile_text(text, kernel.name, architecture)


def dtypes_of(kernel: SimtKernel, case: Case) -> tuple[dict[str, str], dict[str, str]]:
    """Inputs and outputs of a case as the compilers here take them."""
    inputs = {name: dtype_of(a).name for name, a in zip(kernel.inputs, case.inputs, strict=True)}
    return inputs, {name: dtype for name, (_, dtype) in zip(kernel.outputs, case.outputs, strict=True)}
