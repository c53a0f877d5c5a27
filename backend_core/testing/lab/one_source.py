"""Finds what CUDA does not have in a kernel that is for both: see "The file" in docs/simt.md.

The lab and the type check read the text as Metal, where all of this exists. What stands in branches of `__CUDACC__` is
not looked at: there each side has its own.
"""

from __future__ import annotations

import re

from backend_core.simt import SimtKernel
from backend_core.simt.text import names_on_cuda, positions_on_cuda

from .rewrite import members_like_swizzles
from .rewrite_rounds import functions
from .signature import ATTRIBUTES
from .tokens import Tokens
from .typecheck import TypeFinding

_TYPES = re.compile(
    r"(?:packed_\w+|(?:bool|bfloat)[234]|half[34]|vec|simdgroup_(?:matrix|\w*8x8)|"
    r"atomic(?:_(?:int|uint|bool|float|ulong))?)\Z"
)
#: CUDA has structures of these names: memory, without operators and constructors.
_STRUCTURES = re.compile(r"(?:u?char|u?short|u?int|u?long|float)[234]\Z")
_OPERATORS = set("+-*/%<>|^[") | {"+=", "-=", "*=", "/=", "==", "!=", "<=", ">="}
_FUNCTIONS = re.compile(r"(?:simd|quad|atomic|simdgroup|pack|unpack)_\w+\Z")
_LIBRARY = {
    "absdiff", "addsat", "subsat", "clz", "ctz", "extract_bits", "insert_bits", "hadd", "rhadd", "mad24", "mul24",
    "madhi", "madsat", "mulhi", "max3", "min3", "median3", "fmax3", "fmin3", "fmedian3", "reverse_bits", "rotate",
    "clamp", "mix", "saturate", "sign", "smoothstep", "step", "select", "fract", "powr", "tanpi", "divide", "dot",
    "cross", "length", "length_squared", "normalize", "distance", "distance_squared", "reflect", "refract",
    "faceforward",
}  # fmt: skip
_SCOPES = {"metal", "fast", "precise"}
_SWIZZLE = re.compile(r"(?:[xyzw]{2,4}|[rgba]{2,4})\Z")
_CONDITION = re.compile(r"[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b(.*)")


def find_metal_only(kernel: SimtKernel) -> list[TypeFinding]:
    """What of the kernel's text exists on Metal alone, each name once; nothing if it is not for CUDA."""
    if "cuda" not in kernel.devices:
        return []
    text = kernel.text("metal")
    own = text.header.find("#line ")  # the prelude, which CUDA has another one of, has no such line
    t = Tokens(_without_branches((text.header[own:] if own >= 0 else "") + text.source))
    known = names_on_cuda() | {name for name, _, _ in functions(t)}
    members = members_like_swizzles(t)
    computed = _computed(t)
    found: dict[str, TypeFinding] = {}
    for i, word in enumerate(t.text):
        if t.kind[i] != "name" or word in known or word in found:
            continue
        before, after = t.text[t.previous(i - 1)], t.text[t.next(i + 1) % len(t.text)]
        if before in (".", "->"):
            what = "a swizzle, which Metal alone has" if _SWIZZLE.match(word) and word not in members else ""
        elif _TYPES.match(word):
            what = "a type that Metal alone has"
        elif _STRUCTURES.match(word) and after == "(":
            what = "a constructor that Metal alone has"
        elif i in computed:
            what = "a vector, and Metal alone computes with vectors"
        elif after == "(" and (word in _LIBRARY or _FUNCTIONS.match(word)):
            what = "a function that Metal alone has"
        elif word in ATTRIBUTES and word not in positions_on_cuda():
            what = "a position that Metal alone has"
        elif word in _SCOPES and after == "::":
            what = "a namespace that Metal alone has"
        else:
            continue
        if what:
            file, line = t.place(i)
            message = f"{word!r} is {what}; the kernel is for CUDA too"
            found[word] = TypeFinding("on CUDA", message, file, line, _line_of(t, i))
    return list(found.values())


def _computed(t: Tokens) -> set[int]:
    """Where variables of vector types, and positions of three numbers, are operands."""
    out = set()
    for i, word in enumerate(t.text):
        if ATTRIBUTES.get(word) == "uint3":
            out |= {i} if _is_operand(t, i) else set()
        elif t.kind[i] == "name" and _STRUCTURES.match(word):
            name = t.next(i + 1)
            if name >= len(t.text) or t.kind[name] != "name" or t.text[t.next(name + 1) % len(t.text)] == "[":
                continue
            out |= {j for j in range(name + 1, _scope_end(t, name)) if t.text[j] == t.text[name] and _is_operand(t, j)}
    return out


def _is_operand(t: Tokens, i: int) -> bool:
    before, after = t.text[t.previous(i - 1)], t.text[t.next(i + 1) % len(t.text)]
    if before in (".", "->") or after in (".", "("):
        return False
    return after in _OPERATORS or before in ("+", "/", "%")


def _scope_end(t: Tokens, i: int) -> int:
    """Behind the block that the declaration at i is in, or the body of the function that it is a parameter of."""
    depth = opened = 0
    while i < len(t.text):
        if t.text[i] == "{":
            depth, opened = depth + 1, opened + 1
        elif t.text[i] == "}":
            depth -= 1
            if depth < 0:
                break
        elif t.text[i] == ")" and not opened:
            after = t.next(i + 1)
            return t.closing(after) if after < len(t.text) and t.text[after] == "{" else i
        elif t.text[i] == "(":
            i = t.closing(i)
        i += 1
    return i


def _without_branches(text: str) -> str:
    """The text with lines that stand in branches of `__CUDACC__` emptied."""
    out, depth, inside = [], 0, 0
    for line in text.split("\n"):
        match = _CONDITION.match(line)
        if match and match.group(1) == "endif":
            inside = 0 if depth == inside else inside
            depth -= 1
        elif match:
            depth += 1
            if not inside and "__CUDACC__" in match.group(2):
                inside = depth
        out.append("" if inside and not line.lstrip().startswith("#line") else line)
    return "\n".join(out)


def _line_of(t: Tokens, i: int) -> str:
    first = last = i
    while first > 0 and "\n" not in t.text[first - 1]:
        first -= 1
    while last + 1 < len(t.text) and "\n" not in t.text[last + 1]:
        last += 1
    return t.join(first, last).strip()
