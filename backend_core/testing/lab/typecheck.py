"""Checks a kernel's types with a compiler that knows address spaces.

The host has one address space, so a kernel may run in the lab that Metal's compiler refuses: a helper that takes
`const device T*` is given a `constant` pointer, because mx.fast.metal_kernel passes inputs of fewer than 8 elements
that way. clang's OpenCL C++ has the same address spaces as types of their own; kernels are compiled as that, against
declarations only, and nothing is run.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import compiler
from .brackets import unpaired
from .dialect import find_outside_dialect
from .dtypes import Sparse, as_array
from .errors import CompilerMissing, LabError
from .kernel import MetalKernel
from .pointers import find_untyped_pointers
from .rewrite_check import rewrite_for_check
from .signature import CONSTANT_BELOW, Generated, InputFacts

_FLAGS = ["-triple", "spir64", "-cl-std=clc++2021", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64", "-fsyntax-only", "-w"]

#: The variant of a kernel that is its text unchanged.
AS_GIVEN = "as given"


@dataclass(frozen=True)
class TypeFinding:
    """One thing that Metal's compiler would refuse.

    variant
        What was compiled: ``"as given"`` or ``"'scales' in constant"``.
    file, line, source
        Where in the kernel's text.
    """

    variant: str
    message: str
    file: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message} ({self.variant})\n    {self.line} | {self.source.strip()}"


@functools.lru_cache(maxsize=1)
def find_type_checker() -> tuple[str, ...]:
    """The command of a clang with OpenCL C++: of PyPI's ziglang, else the system's.

    Raises :class:`CompilerMissing`, which says what to install.
    """
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        zig = Path(spec.origin).parent / "zig"
        if zig.exists():
            return (str(zig), "clang")
    clang = shutil.which("clang")
    if clang is not None:
        probe = subprocess.run(
            [clang, "-cc1", *_FLAGS, "-x", "clcpp", "-"], input="__constant int x = 1;", capture_output=True, text=True
        )
        if probe.returncode == 0:
            return (clang,)
    raise CompilerMissing("the type check needs a clang with OpenCL C++: `pip install ziglang`")


def check_types(
    kernel: MetalKernel,
    *,
    inputs: Sequence[Any],
    output_dtypes: Sequence[Any],
    template: Sequence[tuple[str, Any]] = (),
    together: Sequence[Sequence[str]] = (),
) -> tuple[TypeFinding, ...]:
    """Compiles a kernel as generated, then once for each input as if it had fewer than 8 elements.

    inputs
        Arrays, numbers, ``lab.sparse`` or ``lab.InputFacts``, in the order of the input names.
    together
        Names of inputs that have the same number of elements by the kernel's contract.

    Returns what is wrong, nothing if all is well. Raises :class:`CompilerMissing` without a clang.
    """
    facts = [_facts(n, v) for n, v in zip(kernel.input_names, inputs, strict=True)]
    found = list(_check_generated(kernel, kernel.generated(facts, output_dtypes, template), AS_GIVEN))
    for item in facts:
        if item.ndim == 0 or item.size < CONSTANT_BELOW:
            continue
        names = next((tuple(group) for group in together if item.name in group), (item.name,))
        if item.name != names[0]:
            continue
        small = [replace(f, size=CONSTANT_BELOW - 1) if f.name in names else f for f in facts]
        text = kernel.generated(small, output_dtypes, template)
        known = {(f.message, f.file, f.line) for f in found}
        variant = f"{' and '.join(map(repr, names))} in constant"
        found += [f for f in _check_generated(kernel, text, variant) if (f.message, f.file, f.line) not in known]
    return tuple(found)


def check_msl(
    source: str | Path,
    functions: Sequence[str] = (),
    *,
    include_dirs: Sequence[str | Path] = (),
    defines: Sequence[str] = (),
) -> tuple[TypeFinding, ...]:
    """Compiles a whole Metal file; ``functions`` are the ``name<arguments>`` of templates to instantiate."""
    name = "kernel.metal"
    if isinstance(source, Path):
        name, text = str(source), source.read_text()
        include_dirs = [source.parent, *include_dirs]
    else:
        text = source
    folders = tuple(str(d) for d in include_dirs)
    whole = compiler.preprocess(f'#line 1 "{name}"\n{text}', {name: text}, folders, tuple(defines))
    return _check(whole, {name: text}, tuple(functions), AS_GIVEN, mlx=False)


def _facts(name: str, value: Any) -> InputFacts:
    if isinstance(value, InputFacts):
        return value
    if isinstance(value, Sparse):
        return InputFacts(name, value.dtype, value.size, len(value.shape))
    array, dtype = as_array(value)
    return InputFacts(name, dtype, array.size, array.ndim)


def _check_generated(kernel: MetalKernel, text: Generated, variant: str) -> tuple[TypeFinding, ...]:
    whole, texts = kernel.whole_text(text)
    return _check(compiler.preprocess(whole, dict(texts), (), ()), dict(texts), (), variant, mlx=True)


def _check(
    preprocessed: str, texts: dict[str, str], functions: tuple[str, ...], variant: str, mlx: bool
) -> tuple[TypeFinding, ...]:
    found: list[TypeFinding] = []

    def add(message: str, file: str, line: int) -> None:
        found.append(TypeFinding(variant, message, file, line, compiler.source_line(file, line, texts)))

    if wrong := unpaired(preprocessed):
        add(*wrong)
        return tuple(found)
    if variant == AS_GIVEN:  # the others differ in spaces of the kernel's parameters only
        for message, file, line in [*find_untyped_pointers(preprocessed), *find_outside_dialect(preprocessed)]:
            add(message, file, line)
    text, instances, outside = rewrite_for_check(preprocessed)
    for name, file, line in outside:
        add(f"threadgroup variable {name!r} is declared outside of a kernel", file, line)
    head = "#define LAB_WITH_MLX 1\n" if mlx else ""
    calls = [f"auto lab_use_{i} = &{f};" for i, f in enumerate(dict.fromkeys([*instances, *functions]))]
    tail = (
        '\n#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n# 1 "instances"\nvoid lab_instances() {\n'
        + "\n".join(calls)
        + "\n}\n"
    )
    command = [*find_type_checker(), "-cc1", *_FLAGS, "-ferror-limit", "20", "-fno-caret-diagnostics"]
    command += [f"-I{compiler.lab_files() / 'check'}", "-x", "clcpp", "-"]
    done = subprocess.run(command, input=f'{head}#include "metal.h"\n{text}{tail}', capture_output=True, text=True)
    errors = 0
    for match in re.finditer(r"^(.*?):(\d+):\d+: (?:fatal )?error: (.*)$", done.stderr, re.M):
        errors += 1
        add(match.group(3), match.group(1), int(match.group(2)))
    if done.returncode and not errors:
        raise LabError(f"the type check failed:\n{done.stderr}")
    return tuple(found)
