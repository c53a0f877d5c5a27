"""Kernel files as text for Metal, CUDA and the lab.

A kernel file is plain Metal. Functions come first; a line ``// --- kernel NAME ---`` begins the body of kernel NAME,
which goes to the next such line or to the end. A line ``#include "NAME"`` among the functions stands for those of
another file, beside this one or beside the preludes, once. The text that is handed over has no comments and no
indentation, because mlx copies and hashes it at every call, and of the prelude only the sections that it uses.
``#line`` keeps the compiler's messages at the lines of the file.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KERNEL = re.compile(r"^// --- kernel (\w+) ---$", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SECTION = re.compile(r"^//:(.*)$", re.MULTILINE)
#: An array in threadgroup memory, as opposed to a pointer to it.
_THREADGROUP_ARRAY = re.compile(r"\bthreadgroup\s+(?=[\w:<>]+\s+\w+\s*\[)")

#: Address spaces, which CUDA's pointers do not have.
_SPACES = re.compile(r"\b(?:device|constant|threadgroup|thread)\b ?")

#: Position attributes of Metal, and what they are on CUDA. `metal_kernel` declares those that a body names.
_POSITIONS = {
    "thread_position_in_threadgroup": "uint3 {} = {{threadIdx.x, threadIdx.y, threadIdx.z}};",
    "threadgroup_position_in_grid": "uint3 {} = {{blockIdx.x, blockIdx.y, blockIdx.z}};",
    "threads_per_threadgroup": "uint3 {} = {{blockDim.x, blockDim.y, blockDim.z}};",
    "threadgroups_per_grid": "uint3 {} = {{gridDim.x, gridDim.y, gridDim.z}};",
    "thread_position_in_grid": "uint3 {} = {{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + "
    "threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z}};",
    "thread_index_in_threadgroup": "uint {} = " + (linear := "threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * "
    "threadIdx.z)") + ";",
    "thread_index_in_simdgroup": f"uint {{}} = ({linear}) % 32;",
    "simdgroup_index_in_threadgroup": f"uint {{}} = ({linear}) / 32;",
}  # fmt: skip


@dataclass(frozen=True)
class KernelText:
    """What `metal_kernel` and `cuda_kernel` take: functions (`header`) and the kernel's body (`source`).

    files
        Name and text of the files that ``#line`` names in them.
    """

    header: str
    source: str
    files: tuple[tuple[str, str], ...] = ()


def text_of(path: Any, kernel: str, target: str) -> KernelText:
    """Kernel `kernel` of the file at `path`, as it is now, for ``"metal"`` (also the lab) or ``"cuda"``.

    Raises FileNotFoundError, and ValueError naming the file if it has no such kernel or includes one that is not there.
    """
    return _text_of(tuple(_files(path, {path.name})), kernel, target)


@functools.lru_cache(maxsize=512)
def _text_of(files: tuple[tuple[str, str], ...], kernel: str, target: str) -> KernelText:
    """files: names and texts; the last has the kernel."""
    name, whole = files[-1]
    marks = list(_KERNEL.finditer(whole))
    names = [m.group(1) for m in marks]
    if kernel not in names:
        raise ValueError(f"{name} has no kernel {kernel!r}; it has {', '.join(names) or 'none'}")
    i = names.index(kernel)
    end = marks[i + 1].start() if i + 1 < len(marks) else len(whole)
    functions = "".join(_with_lines(_INCLUDE.sub("\n", _functions(text)), 1, file) for file, text in files)
    first_line = whole.count("\n", 0, marks[i].end()) + 2
    body = _with_lines(whole[marks[i].end() + 1 : end], first_line, name)
    prelude = _prelude(target, functions + body)
    if target == "cuda":
        functions, body = _for_cuda(functions), _for_cuda(body)
        body = "".join(f"{text.format(name)}\n" for name, text in _POSITIONS.items() if name in body) + body
    return KernelText(prelude + functions, body, files)


def _functions(whole: str) -> str:
    """A file's text before its first kernel."""
    first = _KERNEL.search(whole)
    return whole if first is None else whole[: first.start()]


def _files(path: Any, taken: set[str]) -> list[tuple[str, str]]:
    """Names and texts of the files whose functions a file takes, itself last."""
    whole = path.read_text(encoding="utf-8")
    found: list[tuple[str, str]] = []
    for match in _INCLUDE.finditer(_functions(whole)):
        name = match.group(1)
        if name in taken:
            continue
        taken.add(name)
        other = next((p for p in (path.parent / name, preludes() / name) if p.is_file()), None)
        if other is None:
            raise ValueError(f"{path.name} includes {name!r}, which is neither beside it nor beside the preludes")
        found += _files(other, taken)
    return [*found, (path.name, whole)]


def plain(text: str) -> str:
    """The text without comments, indentation and empty lines."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    return "".join(f"{line.strip()}\n" for line in text.split("\n") if line.strip())


def _with_lines(text: str, first: int, file: str) -> str:
    """The plain text, with a ``#line`` wherever lines were left out."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    out, expected = [], -1
    for number, line in enumerate(text.split("\n"), first):
        if not line.strip():
            continue
        if number != expected:
            out.append(f'#line {number} "{file}"\n')
        out.append(f"{line.strip()}\n")
        expected = number + 1
    return "".join(out)


def _for_cuda(text: str) -> str:
    return _SPACES.sub("", _THREADGROUP_ARRAY.sub("__shared__ ", text))


#: A threadgroup array of a kernel's body.
_SHARED = re.compile(r"^__shared__ (\w+) (\w+)\[(.+)\];$", re.MULTILINE)


def given_at_launch(body: str) -> str:
    """CUDA's body with its threadgroup arrays in the memory that a launch asks for, one after the other."""
    end = "0"

    def part(match: re.Match[str]) -> str:
        nonlocal end
        (type_, name, length), begin = match.groups(), end
        end = f"end_of_{name}"
        return (
            f"{type_}* const {name} = reinterpret_cast<{type_}*>(given_memory + {begin});"
            f" constexpr int {end} = {begin} + (int(sizeof({type_})) * ({length}) + 15) / 16 * 16;"
        )

    parts = _SHARED.sub(part, body)
    return "extern __shared__ __align__(16) unsigned char given_memory[];\n" + parts


def _prelude(target: str, text: str) -> str:
    """The sections of the target's prelude that `text` needs, and those that these need."""
    always, sections = _sections(target)
    taken: set[int] = set()
    while True:
        have = text + "".join(sections[i][1] for i in taken)
        words = set(re.findall(r"\w+", have))
        more = {i for i, (names, _) in enumerate(sections) if i not in taken and words & names}
        if not more:
            break
        taken |= more
    return always + "".join(sections[i][1] for i in sorted(taken))


@functools.cache
def _sections(target: str) -> tuple[str, list[tuple[set[str], str]]]:
    whole = (preludes() / f"prelude_{target}.h").read_text(encoding="utf-8")
    parts = _SECTION.split(whole)
    sections = [(set(names.split()), plain(body)) for names, body in zip(parts[1::2], parts[2::2], strict=True)]
    return plain(parts[0]), sections


def positions_on_cuda() -> frozenset[str]:
    """Metal's positions that a body may name on CUDA."""
    return frozenset(_POSITIONS)


@functools.cache
def names_on_cuda() -> frozenset[str]:
    """What CUDA's prelude has under Metal's names."""
    always, sections = _sections("cuda")
    defined = re.findall(r"^(?:#define|typedef .*?) (\w+)(?:;| |$)", always, re.MULTILINE)
    return frozenset(defined).union(*(names for names, _ in sections))


def preludes() -> Any:
    """The directory of the preludes: beside the package in a source tree, else in the package."""
    # The source tree first: an editable installation also holds copies, of when it was installed.
    beside = Path(__file__).resolve().parents[2] / "kernels" / "simt"
    return beside if beside.is_dir() else importlib.resources.files("backend_core") / "kernels" / "simt"
