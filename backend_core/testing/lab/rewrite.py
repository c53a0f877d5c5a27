"""Turns preprocessed Metal text into C++ text that the host compiler accepts.

The text stays as it is but for what C++ has no words for: attributes are taken out and remembered, `threadgroup`
variables become references to storage shared by the group, swizzles become calls, function constants become
variables that the host sets. Lines keep their numbers, so that messages point into the kernel's text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import LabError
from .rewrite_rounds import count_rounds
from .rewrite_shifts import check_shifts
from .tokens import Tokens
from .twins import drop_twins

_SWIZZLE = re.compile(r"(?:[xyzw]{2,4}|[rgba]{2,4})\Z")
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="}
_PLACES = {c: i % 4 for i, c in enumerate("xyzwrgba")}


@dataclass
class Param:
    """A kernel's parameter: its name, its attributes, each as (name, argument), and its address space."""

    name: str
    attributes: list[tuple[str, str]]
    space: str  # "device", "constant", "threadgroup" or ""


@dataclass
class KernelText:
    """A kernel found in the text. `template` is true if it needs template arguments."""

    name: str
    params: list[Param]
    template: bool


@dataclass
class Rewritten:
    """The text for the compiler and what was found in it."""

    text: str
    kernels: dict[str, KernelText] = field(default_factory=dict)
    host_names: dict[str, str] = field(default_factory=dict)  # host name -> "function<arguments>"
    constants: dict[str, int] = field(default_factory=dict)  # variable -> function constant index
    bodies: list[tuple[int, int]] = field(default_factory=list)  # first and last token of each kernel's body


def rewrite(text: str) -> Rewritten:
    """Rewrites preprocessed Metal text. Raises LabError for brackets that are never closed."""
    tokens = Tokens(text)
    out = Rewritten("")
    drop_twins(tokens)
    take_host_names(tokens, out)
    take_kernels(tokens, out)
    take_function_constants(tokens, out)
    share_threadgroup_variables(tokens)
    _make_constant_const(tokens)
    count_rounds(tokens)
    check_shifts(tokens)
    _rewrite_swizzles(tokens)
    out.text = "".join(tokens.text)
    return out


def _attributes(text: str) -> list[tuple[str, str]]:
    """`buffer(0), function_constant(x)` as pairs."""
    found = []
    for part in re.findall(r"[A-Za-z_][\w:]*(?:\s*\([^()]*\))?", text):
        name, _, argument = part.partition("(")
        found.append((name.strip().removeprefix("metal::"), argument.rstrip(") ").strip()))
    return found


def take_host_names(t: Tokens, out: Rewritten) -> None:
    """`template [[host_name("n")]] [[kernel]] ... f<args>...;` is remembered and taken out."""
    for i, text in enumerate(t.text):
        if text != "template" or t.kind[i] != "name":
            continue
        j = t.next(i + 1)
        host = ""
        while j < len(t.text) and t.text[j] == "[[":
            close = t.closing(j)
            if match := re.search(r'host_name\s*\(\s*((?:"[^"]*"\s*)+)\)', t.join(j, close)):
                host = "".join(re.findall(r'"([^"]*)"', match.group(1)))
            j = t.next(close + 1)
        if not host:
            continue
        end = j
        function = ""
        while end < len(t.text) and t.text[end] != ";":
            if t.text[end] == "decltype":
                end = t.closing(t.next(end + 1))
            elif t.kind[end] == "name" and not function and t.text[t.next(end + 1)] == "<":
                close = t.after_angles(t.next(end + 1))
                function = t.join(end, close - 1)
                end = close - 1
            elif t.text[end] == "(":
                end = t.closing(end)
            end += 1
        out.host_names[host] = " ".join(function.split())
        t.blank(i, end)


def take_kernels(t: Tokens, out: Rewritten) -> None:
    """Finds `[[kernel]] void f(...)` and `kernel void f(...)`, takes the attributes of the parameters out."""
    i = 0
    while i < len(t.text):
        attribute = t.text[i] == "[["
        word = t.kind[i] == "name" and t.text[i] == "kernel"
        if attribute:
            close = t.closing(i)
            inner = t.join(i + 1, close - 2)
            names = [name for name, _ in _attributes(inner)]
            if "function_constant" not in names:
                before = t.previous(i - 1)
                is_template = before >= 0 and t.text[before] == ">"
                t.blank(i, close)
                if "kernel" in names or "host_name" in names:
                    _take_signature(t, close + 1, out, is_template)
            i = close + 1
            continue
        if word:
            before = t.previous(i - 1)
            t.blank(i, i)
            _take_signature(t, i + 1, out, before >= 0 and t.text[before] == ">")
        i += 1


def _take_signature(t: Tokens, i: int, out: Rewritten, is_template: bool) -> None:
    i = t.next(i)
    name = ""
    while i < len(t.text) and t.text[i] != "(":
        if t.text[i] in (";", "{"):
            return
        if t.text[i] == "[[":
            close = t.closing(i)
            t.blank(i, close)
            i = close
        elif t.kind[i] == "name":
            name = t.text[i]
        i = t.next(i + 1)
    if i >= len(t.text) or name in out.kernels:
        return
    close = t.closing(i)
    body = t.next(close + 1)
    if body < len(t.text) and t.text[body] == "{":
        out.bodies.append((body, t.closing(body)))
    params: list[Param] = []
    start, j, last_name, attributes = i + 1, i + 1, "", list[tuple[str, str]]()
    while j <= close:
        text = t.text[j]
        if text == "[[":
            end = t.closing(j)
            attributes += _attributes(t.join(j + 1, end - 2))
            t.blank(j, end)
            j = end
        elif text == "<":
            j = t.after_angles(j) - 1
        elif text == "(":
            j = t.closing(j)
        elif text == "," or j == close:
            if t.next(start) < j:
                words = set(t.text[start:j])
                space = next((s for s in ("device", "constant", "threadgroup") if s in words), "")
                params.append(Param(last_name, attributes, space))
            start, last_name, attributes = j + 1, "", []
        elif t.kind[j] == "name" and not attributes:
            last_name = text
        j += 1
    out.kernels[name] = KernelText(name, params, is_template)


def take_function_constants(t: Tokens, out: Rewritten) -> None:
    """`constant bool x [[function_constant(3)]];` becomes a variable that the host sets."""
    for i, text in enumerate(t.text):
        if text != "[[":
            continue
        close = t.closing(i)
        for name, argument in _attributes(t.join(i + 1, close - 2)):
            if name != "function_constant":
                continue
            variable = t.text[t.previous(i - 1)]
            try:
                index = int(argument, 0)
            except ValueError:
                index = -1
            out.constants[variable] = index
            first = i
            while first > 0 and t.text[first] not in (";", "{", "}") and t.kind[first] != "marker":
                if t.text[first] in ("constant", "const"):
                    t.text[first] = "static" if t.text[first] == "constant" else ""
                first -= 1
        t.blank(i, close)


def _make_constant_const(t: Tokens) -> None:
    """`constant T*` becomes `const T*`: what lies in that address space is const whether the text says so or not."""
    around = {"const", "constexpr", "constant", "static", "inline", "volatile"}
    for i, text in enumerate(t.text):
        if text != "constant" or t.kind[i] != "name":
            continue
        first, last = t.previous(i - 1), t.next(i + 1)
        said = False
        while first >= 0 and t.text[first] in around:
            said, first = said or t.text[first] == "const", t.previous(first - 1)
        while last < len(t.text) and t.text[last] in around:
            said, last = said or t.text[last] == "const", t.next(last + 1)
        behind = first >= 0 and t.text[first] == ")"  # a member function's, and a constructor cannot be const
        t.text[i] = "" if said or behind else "const"


_STORAGE = (
    'lab_type_{0}& {0} = *static_cast<lab_type_{0}*>(lab_threadgroup_variable("{0}", {1}, sizeof(lab_type_{0}), '
    "alignof(lab_type_{0}), lab_padding::of<lab_type_{0}>(), sizeof(lab_padding::element_t<lab_type_{0}>)));"
)


def share_threadgroup_variables(t: Tokens, shared: str = _STORAGE) -> None:
    """`threadgroup T a[4], b;` becomes references to storage of the group; pointers stay as they are.

    shared
        The text for a variable, with places for its name and for a number that no other declaration has.
    """
    i = 0
    while i < len(t.text):
        if t.text[i] == "threadgroup" and t.kind[i] == "name":
            first = _declaration_start(t, i)
            before = t.previous(first - 1)
            if before < 0 or t.text[before][-1] in ";{}:":
                end = _share(t, i, shared)
                if end > i and first < i:
                    t.blank(first, i - 1)  # alignment and `volatile` make no difference here
                i = end
        i += 1


def _declaration_start(t: Tokens, i: int) -> int:
    """Where the declaration begins that has `threadgroup` at i: `alignas(16) volatile threadgroup float s[4];`."""
    first = i
    while True:
        j = t.previous(first - 1)
        if j >= 0 and t.text[j] in ("volatile", "const", "static"):
            first = j
        elif j >= 0 and t.text[j] == ")":
            opening = j
            while opening >= 0 and t.text[opening] != "(":
                opening -= 1
            word = t.previous(opening - 1)
            if word < 0 or t.text[word] != "alignas":
                return first
            first = word
        else:
            return first


def _share(t: Tokens, i: int, shared: str) -> int:
    end = i
    first_name = -1
    pending = -1  # the last name, once we know that the type is complete
    j = t.next(i + 1)
    while j < len(t.text) and t.text[j] != ";":
        text = t.text[j]
        if text == "{" and {"struct", "union", "class"} & set(t.text[i:j]):
            j = t.closing(j)  # the type is defined on the spot
            pending = -1
        elif text in ("=", "{"):
            file, line = t.place(i)
            raise LabError(f"{file}:{line}: error: a threadgroup variable has no initial value in Metal")
        elif text in ("*", "&", "("):
            return i  # a pointer, a reference, a function: an ordinary declaration
        if text == "<":
            j = t.after_angles(j) - 1
        elif text in ("[", "[[", ","):
            first_name = pending
            break
        elif text == "alignas":
            j = t.closing(t.next(j + 1))
        elif t.kind[j] == "name":
            pending = j
        j = t.next(j + 1)
    else:
        first_name = pending
    if first_name < 0:
        return i
    base = re.sub(r"\balignas\s*\([^()]*\)", "", t.join(i + 1, first_name - 1)).strip()
    parts: list[str] = []
    if base.endswith("}"):
        parts.append(f"using lab_base_{t.text[first_name]} = {' '.join(base.split())};")
        base = f"lab_base_{t.text[first_name]}"
    j = first_name
    name, bounds = t.text[first_name], ""
    while True:
        j = t.next(j + 1)
        if j >= len(t.text):
            return i
        text = t.text[j]
        if text == "[" or text == "[[":
            close = t.closing(j)
            bounds += " ".join(t.join(j, close).split())
            j = close
        elif text in (",", ";"):
            # The place of the name in the text is the number; 0 is that of a [[threadgroup(i)]].
            parts.append(f"using lab_type_{name} = {base} {bounds}; " + shared.format(name, j))
            if text == ";":
                end = j
                break
            j = t.next(j + 1)
            name, bounds = t.text[j], ""
        else:
            return i
    t.blank(i, end)
    t.text[i] = " ".join(parts) + t.text[i]
    t.kind[i] = "done"
    return end


def members_like_swizzles(t: Tokens) -> set[str]:
    """Names that look like swizzles in the bodies of structures, outside of their functions."""
    own = set()
    for i, text in enumerate(t.text):
        if text not in ("struct", "class", "union") or t.kind[i] != "name":
            continue
        j = t.next(i + 1)
        while j < len(t.text) and t.text[j] not in ("{", ";", "(", ")", ">", "="):
            j = t.next(j + 1)
        if j >= len(t.text) or t.text[j] != "{":
            continue
        end, j = t.closing(j), t.next(j + 1)
        while j < end:
            if t.text[j] in ("(", "{", "[", "[["):
                j = t.closing(j)
            elif t.kind[j] == "name" and _SWIZZLE.match(t.text[j]) and t.text[t.previous(j - 1)] not in (".", "->"):
                own.add(t.text[j])
            j = t.next(j + 1)
    return own


def _rewrite_swizzles(t: Tokens) -> None:
    """`v.xyz` becomes a call; names of members that the text itself declares (`ab`) are left alone."""
    own = members_like_swizzles(t)
    for i, text in enumerate(t.text):
        if t.kind[i] != "name" or not _SWIZZLE.match(text) or text in own:
            continue
        before, after = t.previous(i - 1), t.next(i + 1)
        if t.text[before] not in (".", "->"):
            continue
        assigned = after < len(t.text) and t.text[after] in _ASSIGN
        places = ", ".join(str(_PLACES[c]) for c in text)
        t.text[i] = f"template lab_swizzle{'_assign' if assigned else ''}<{places}>()"
