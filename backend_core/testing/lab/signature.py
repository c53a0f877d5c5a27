"""The Metal function that mx.fast.metal_kernel (mlx 0.32.4) writes around a kernel's body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .dtypes import LabDtype, dtype_of
from .errors import LabError

#: Attributes that are added when the body contains their name, in this order, with their types.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

#: Inputs of fewer elements than this are passed in the constant address space.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class InputFacts:
    """What the signature depends on: an input's type, its number of elements and of dimensions."""

    name: str
    dtype: LabDtype
    size: int
    ndim: int


@dataclass(frozen=True)
class Argument:
    """What a buffer index holds: the input or output itself, or its shape, strides or number of dimensions."""

    name: str
    part: str  # "input", "output", "shape", "strides", "ndim"


@dataclass(frozen=True)
class Generated:
    """The text of a kernel.

    before, after
        What precedes and follows the body: `before + body + after` is the whole text, header included.
    function
        The name to launch, with its template arguments.
    arguments
        One per buffer index.
    """

    header: str
    before: str
    after: str
    function: str
    arguments: tuple[Argument, ...]


def template_arguments(template: Sequence[tuple[str, Any]]) -> list[tuple[str, str, str]]:
    """(parameter kind, name, value as text) for each template parameter. Raises LabError for other types."""
    out = []
    for name, value in template:
        if isinstance(value, bool):
            out.append(("bool", name, str(int(value))))
        elif isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                raise LabError(f"template parameter {name!r}: {value} does not fit into int")
            out.append(("int", name, str(value)))
        else:
            try:
                out.append(("typename", name, dtype_of(value).metal))
            except ValueError as e:
                raise LabError(f"template parameter {name!r}: a dtype, an int or a bool is wanted ({e})") from None
    return out


def generate(
    name: str,
    source: str,
    header: str,
    inputs: Sequence[InputFacts],
    outputs: Sequence[tuple[str, LabDtype]],
    template: Sequence[tuple[str, Any]] = (),
    atomic_outputs: bool = False,
) -> Generated:
    """Writes the function around a body, as mlx does."""
    parameters = template_arguments(template)
    suffix = "".join(f"_{value}" for _, _, value in parameters).replace("-", "_")
    full = f"custom_kernel_{name}" + (f"_{suffix}" if parameters else "")
    lines: list[str] = []
    arguments: list[Argument] = []

    def add(text: str, argument: Argument) -> None:
        lines.append(f"  {text} [[buffer({len(arguments)})]]")
        arguments.append(argument)

    for item in inputs:
        full += f"_{item.dtype.metal}" + ("s" if item.ndim == 0 else "c" if item.size < CONSTANT_BELOW else "")
        space = "constant" if item.size < CONSTANT_BELOW else "device"
        mark = "&" if item.ndim == 0 else "*"
        add(f"const {space} {item.dtype.metal}{mark} {item.name}", Argument(item.name, "input"))
        if item.ndim == 0:
            continue
        for part, text in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if f"{item.name}_{part}" in source:
                add(f"const constant {text} {item.name}_{part}", Argument(item.name, part))
    for output, dtype in outputs:
        full += f"_{dtype.metal}"
        kind = f"atomic<{dtype.metal}>" if atomic_outputs else dtype.metal
        add(f"device {kind}* {output}", Argument(output, "output"))
    for attribute, kind in ATTRIBUTES.items():
        if attribute in source:
            lines.append(f"  {kind} {attribute} [[{attribute}]]")
    before = ""
    if parameters:
        before += f"template <{', '.join(f'{kind} {p}' for kind, p, _ in parameters)}>\n"
    before += f"[[kernel]] void {full}(\n" + ",\n".join(lines) + ") {\n"
    after = "\n}\n"
    function = full
    if parameters:
        values = ", ".join(value for _, _, value in parameters)
        after += f'\ntemplate [[host_name("{full}")]] [[kernel]] decltype({full}<{values}>) {full}<{values}>;\n'
    return Generated(header, before, after, function, tuple(arguments))
