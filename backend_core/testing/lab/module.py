"""A compiled kernel file: which kernels it has and what they take, and how text becomes one."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

from . import compiler, launch_abi
from .brackets import unpaired
from .errors import LabError
from .rewrite import KernelText, Rewritten, rewrite

#: Attributes of kernel parameters that say where a lane is, and the expression for each.
POSITIONS = {
    **{
        name: f"lab_w->{name}"
        for name in (
            "thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid",
            "threads_per_threadgroup", "dispatch_threads_per_threadgroup", "threads_per_grid", "threadgroups_per_grid",
            "thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup",
            "simdgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup",
        )
    },
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "lab_w->thread_index_in_simdgroup % 4",
    "quadgroup_index_in_threadgroup": "lab_w->thread_index_in_threadgroup / 4",
    "quadgroups_per_threadgroup": "lab_w->simdgroups_per_threadgroup * 8",
    "dispatch_quadgroups_per_threadgroup": "lab_w->dispatch_simdgroups_per_threadgroup * 8",
    "grid_size": "lab_w->threads_per_grid",
    "grid_origin": "lab_zero",
}  # fmt: skip


@dataclass(frozen=True)
class Param:
    """A kernel's parameter as compiled: kind "buffer" or "threadgroup", index, whether it may be absent."""

    name: str
    kind: str
    index: int
    read_only: bool
    itemsize: int
    optional: bool


@dataclass(frozen=True)
class Entry:
    """A kernel that can be launched."""

    name: str
    number: int
    params: tuple[Param, ...]


@dataclass(frozen=True)
class Module:
    """A loaded shared object."""

    path: Path
    library: ctypes.CDLL
    entries: dict[str, Entry]
    texts: dict[str, str]
    constants: dict[str, int]


def _attributes(kernel: KernelText) -> list[tuple[str, str]]:
    """What each parameter is: its attribute and argument. Pointers without an index get the next free one."""
    out = []
    for param in kernel.params:
        known = [(n, a) for n, a in param.attributes if n in ("buffer", "threadgroup") or n in POSITIONS]
        out.append(known[0] if known else ("", ""))
    for space in ("buffer", "threadgroup"):
        used = {int(a, 0) for n, a in out if n == space and a.isdigit()}
        for i, param in enumerate(kernel.params):
            mine = "threadgroup" if param.space == "threadgroup" else "buffer" if param.space else ""
            if out[i][0] or mine != space:
                continue
            index = next(k for k in range(len(used) + 1) if k not in used)
            used.add(index)
            out[i] = (space, str(index))
    for param, (name, _) in zip(kernel.params, out, strict=True):
        if not name:
            raise LabError(f"{kernel.name}: parameter {param.name!r} has no attribute that the lab knows")
    return out


#: Where compiler.build asks for it, all functions of the text become part of the kernel: g++ is told by `flatten`,
#: clang function by function.
_INLINE = """#define LAB_WHOLE
#ifdef LAB_INLINE_ALL
#ifdef __clang__
#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)
#else
#undef LAB_WHOLE
#define LAB_WHOLE __attribute__((flatten))
#endif
#endif
"""
_NO_MORE_INLINE = """#if defined(LAB_INLINE_ALL) && defined(__clang__)
#pragma clang attribute pop
#endif"""


def _glue(found: Rewritten, entries: dict[str, str]) -> tuple[str, dict[str, KernelText]]:
    """C++ text with a table of entries: host name -> function expression."""
    out = ['# 1 "lab"', _NO_MORE_INLINE, "static const unsigned lab_zero[3] = {0, 0, 0};"]
    rows, kernels = [], {}
    for number, (name, expression) in enumerate(entries.items()):
        base = expression.split("<")[0].split("::")[-1].strip()
        text = found.kernels.get(base)
        if text is None:
            known = ", ".join(sorted({*found.kernels, *found.host_names})) or "none"
            raise LabError(f"there is no kernel {name!r} in the text; it has: {known}")
        kernels[name] = text
        signature = f"lab_signature_{number}"
        out.append(f"typedef lab_types::bare_t<decltype({expression})> {signature};")
        arguments, params = [], []
        for i, (attribute, argument) in enumerate(_attributes(text)):
            kind = f"lab_invoke::nth_t<{i}, {signature}>"
            if attribute in ("buffer", "threadgroup"):
                code = 0 if attribute == "buffer" else 1
                arguments.append(f"lab_invoke::memory<{kind}>(lab_bound_{attribute}({argument}))")
                params.append(f"lab_invoke::describe<{i}, {signature}>({code}, {argument})")
            else:
                arguments.append(f"lab_invoke::position<{kind}>({POSITIONS[attribute]})")
                params.append(f"lab_invoke::describe<{i}, {signature}>(2, 0)")
        call = f"{expression}({', '.join(arguments)});"
        where = "auto* lab_w = lab_where(); (void)lab_w;"
        out.append(f"LAB_WHOLE static void lab_run_{number}() {{ {where} {call} }}")
        # A zero-length table is no C++, so one more row ends it.
        out.append(f"static const lab_param lab_params_{number}[] = {{{', '.join([*params, '{3, 0, 0, 0}'])}}};")
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        rows.append(f'{{"{quoted}", lab_run_{number}, lab_params_{number}, {len(params)}}}')
    out.append(f"static const lab_kernel_entry lab_entries[] = {{{', '.join(rows)}}};")
    constants = [f'{{{index}, "{v}", &{v}, sizeof({v}), &{v}_is_defined}}' for v, index in found.constants.items()]
    constants.append('{-1, "", nullptr, 0, nullptr}')
    out.append(f"static const lab_function_constant lab_constants[] = {{{', '.join(constants)}}};")
    out.append(
        f"static const lab_module lab_table = {{lab_entries, {len(rows)}, lab_constants, {len(found.constants)}}};"
    )
    out.append('extern "C" const lab_module* lab_get_module() { return &lab_table; }')
    return "\n".join(out) + "\n", kernels


def generate(text: str, functions: tuple[str, ...], include: str) -> tuple[str, dict[str, KernelText]]:
    """Preprocessed Metal text as C++ text with entries for its kernels, behind this header of the lab.

    functions
        ``name<arguments>`` to instantiate besides the kernels that are no templates and those with host names.
    """
    found = rewrite(text)
    entries = {name: name for name, kernel in found.kernels.items() if not kernel.template}
    entries |= found.host_names
    entries |= {f: f for f in functions if f not in entries}
    if not entries:
        raise LabError("there is no kernel in the text ([[kernel]] void f(...) or kernel void f(...))")
    glue, kernels = _glue(found, entries)
    flags = "".join(f"static bool {v}_is_defined;\n" for v in found.constants)
    head = f'#include "{include}"\n{flags}#define is_function_constant_defined(x) x##_is_defined\n'
    return head + _INLINE + found.text + "\n" + glue, kernels


def _param(text: KernelText, raw: launch_abi.Param, i: int) -> Param:
    kind = {0: "buffer", 1: "threadgroup"}.get(raw.kind, "position")
    optional = any(name == "function_constant" for name, _ in text.params[i].attributes)
    read_only = bool(raw.read_only) or text.params[i].space == "constant"
    return Param(text.params[i].name, kind, raw.index, read_only, raw.pointee_bytes, optional)


def load(
    text: str,
    texts: tuple[tuple[str, str], ...],
    functions: tuple[str, ...] = (),
    include_dirs: tuple[str, ...] = (),
    defines: tuple[str, ...] = (),
    include: str = "lab/metal.h",
) -> Module:
    """Compiles Metal text (cached on disk) and loads it. Raises :class:`LabError` with the compiler's message.

    texts
        Name and text of the files that the text's line directives name, for messages.
    """
    return _load(compiler.preprocess(text, dict(texts), include_dirs, defines), texts, functions, include)


def forget() -> None:
    """Loads from the disk again what this process has loaded."""
    _load.cache_clear()


@functools.lru_cache(maxsize=512)
def _load(preprocessed: str, texts: tuple[tuple[str, str], ...], functions: tuple[str, ...], include: str) -> Module:
    by_name = dict(texts)
    if wrong := unpaired(preprocessed):
        listed = compiler.shown(wrong.file, wrong.line, wrong.message, by_name)
        raise LabError("\n".join(["the kernel does not compile:", *listed]))
    cpp, kernels = generate(preprocessed, functions, include)
    path = compiler.build(cpp, by_name)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # the file is damaged, by a full disk for example
        path.unlink(missing_ok=True)
        path = compiler.build(cpp, by_name)
        library = ctypes.CDLL(str(path))
    library.lab_get_module.restype = ctypes.POINTER(launch_abi.Module)
    library.lab_run.argtypes = [ctypes.POINTER(launch_abi.Launch)]
    library.lab_run.restype = ctypes.c_int
    table = library.lab_get_module().contents
    entries = {}
    for number in range(table.kernel_count):
        raw = table.kernels[number]
        key = raw.name.decode()
        kernel = kernels[key]
        params = tuple(_param(kernel, raw.params[i], i) for i in range(raw.param_count))
        entries[key] = Entry(key, number, tuple(p for p in params if p.kind != "position"))
    constants = {table.constants[i].name.decode(): i for i in range(table.constant_count)}
    return Module(path, library, entries, by_name, constants)
