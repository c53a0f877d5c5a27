"""The kernel lab: runs Metal kernels on any machine with a C++ compiler and reports what a GPU hides.

    from backend_core.testing import lab

    double = lab.metal_kernel(
        name="double", input_names=["a"], output_names=["o"],
        source="uint i = thread_position_in_grid.x; o[i] = 2 * a[i];",
    )
    result = double(inputs=[a], grid=(64, 1, 1), threadgroup=(64, 1, 1),
                    output_shapes=[a.shape], output_dtypes=[lab.float32])
    result.check()
    result.outputs[0], result.report.buffers["a"].bytes_read

:func:`metal_kernel` takes what mx.fast.metal_kernel takes, :func:`run_msl` whole Metal files.
"""

from __future__ import annotations

from .cases import Case
from .compiler import find_compiler, use_cache
from .dtypes import (
    BFloat16Array,
    LabDtype,
    Sparse,
    bfloat16,
    bool_,
    dtype_of,
    float16,
    float32,
    int8,
    int16,
    int32,
    int64,
    sparse,
    to_bfloat16,
    to_float32,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .errors import CompilerMissing, LabError
from .kernel import MetalKernel, metal_kernel
from .msl import run_msl
from .report import BufferCounts, Fault, Report, Result, ThreadgroupCounts
from .signature import InputFacts
from .typecheck import TypeFinding, check_msl, check_types, find_type_checker

__all__ = [
    "BFloat16Array",
    "BufferCounts",
    "Case",
    "CompilerMissing",
    "Fault",
    "InputFacts",
    "LabDtype",
    "LabError",
    "MetalKernel",
    "Report",
    "Result",
    "Sparse",
    "ThreadgroupCounts",
    "TypeFinding",
    "bfloat16",
    "bool_",
    "check_msl",
    "check_types",
    "dtype_of",
    "find_compiler",
    "find_type_checker",
    "float16",
    "float32",
    "int8",
    "int16",
    "int32",
    "int64",
    "metal_kernel",
    "run_msl",
    "sparse",
    "to_bfloat16",
    "to_float32",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "use_cache",
]  # fmt: skip
