"""Turns preprocessed Metal text into OpenCL C++ for the type check: address spaces stay, names of OpenCL go."""

from __future__ import annotations

from .rewrite import (
    Rewritten,
    share_threadgroup_variables,
    take_function_constants,
    take_host_names,
    take_kernels,
)
from .rewrite_constructors import VECTOR, rewrite_constructors
from .tokens import Tokens

#: Words that mean something in OpenCL and are names in Metal.
_RENAMED = {
    **{f"atomic_{t}": f"metal_atomic_{t}" for t in ("int", "uint", "bool", "float", "ulong")},
    **{
        word: f"{word}_in_metal"
        for word in (
            "local",
            "global",
            "generic",
            "read_only",
            "write_only",
            "read_write",
            "pipe",
            "complex",
            "event_t",
        )
    },
}


def rewrite_for_check(text: str) -> tuple[str, list[str], list[tuple[str, str, int]]]:
    """Rewrites preprocessed Metal text for a compiler that has its address spaces and vectors.

    Returns the text, the ``function<arguments>`` that host names instantiate, and threadgroup variables that are
    declared outside of kernels, as (name, file, line).
    """
    t = Tokens(text)
    for i, word in enumerate(t.text):
        if t.kind[i] == "name":
            t.text[i] = _RENAMED.get(word, word)
        elif t.kind[i] == "number" and word.endswith("bf"):
            t.text[i] = f"((bfloat){word.removesuffix('bf')}f)"
        if word == "thread" and _is_reference_to_const(t, i):
            # A reference to const in the private address space takes no temporary there; a generic one does.
            t.text[i] = ""
        if word == "vec" and _is_vector_of_bools(t, i):
            t.text[t.next(t.next(i + 1) + 1)] = "int"  # as bool4 is, since a comparison gives integers there
    found = Rewritten("")
    take_host_names(t, found)
    take_kernels(t, found)
    take_function_constants(t, found)
    outside = _outside_of_kernels(t, found)
    share_threadgroup_variables(t, shared="threadgroup lab_type_{0}& {0} = *lab_shared<lab_type_{0}>();")
    rewrite_constructors(t)
    for first, last in _function_bodies(t):
        for i in range(first, last):
            if t.kind[i] == "name":
                _initialise_by_call(t, i)
    for i in range(len(t.text)):
        if t.kind[i] == "name":
            _name_constructor(t, i)
    for i, word in enumerate(t.text):
        if word == "decltype":
            _take_private(t, i)
    return "".join(t.text), list(found.host_names.values()), outside


def _take_private(t: Tokens, i: int) -> None:
    """A variable's type there has the private address space, which no field and no result may have."""
    opening = t.next(i + 1)
    if t.text[t.next(opening + 1)] != "auto":
        close = t.closing(opening)
        t.text[i], t.text[close] = "metal::lab_bare_t<decltype", ")>"


def _is_reference_to_const(t: Tokens, i: int) -> bool:
    """Whether the `thread` at i belongs to such a reference: ``thread const T&``, ``const thread T&``."""
    before = t.previous(i - 1)
    const = before >= 0 and t.text[before] == "const"
    while i < len(t.text) and t.text[i] not in ("*", "&", ",", ")", ";", "=", "(", "{"):
        const = const or t.text[i] == "const"
        i = t.after_angles(i) if t.text[i] == "<" else i + 1
    return const and i < len(t.text) and t.text[i] == "&"


def _is_vector_of_bools(t: Tokens, i: int) -> bool:
    opening = t.next(i + 1)
    kind = t.next(opening + 1)
    return kind < len(t.text) and t.text[opening] == "<" and t.text[kind] == "bool"


def _function_bodies(t: Tokens) -> list[tuple[int, int]]:
    """First and last token of the blocks that follow a `)`, outermost ones."""
    out = []
    i = 0
    while i < len(t.text):
        before = t.previous(i - 1)
        if t.text[i] == "{" and before >= 0 and t.text[before] in (")", "const"):
            close = t.closing(i)
            out.append((i, close))
            i = close
        i += 1
    return out


def _initialise_by_call(t: Tokens, i: int) -> None:
    """`float4 v(a, b);` in a function becomes `float4 v = float4(a, b);`, also for `vec<T, 4>`."""
    name = t.next(i + 1)
    if t.text[i] == "vec" and name < len(t.text) and t.text[name] == "<":
        name = t.next(t.after_angles(name))
    elif not VECTOR.match(t.text[i]):
        return
    opening = t.next(name + 1)
    if opening >= len(t.text) or t.kind[name] != "name" or t.text[opening] != "(":
        return
    after = t.next(t.closing(opening) + 1)
    if t.next(opening + 1) < t.closing(opening) and after < len(t.text) and t.text[after] in (";", ","):
        kind = "".join(t.text[i:name]).strip()
        made = kind if t.text[i] != "vec" else f"metal::{kind}"
        t.text[opening] = f" = metal::lab_make<{made}>("


def _name_constructor(t: Tokens, i: int) -> None:
    """`float4(a, b)` and `vec<T, 4>(a, b)` become calls of a template: vectors have no constructors there."""
    word, after, before = t.text[i], t.next(i + 1), t.previous(i - 1)
    if after >= len(t.text) or (before >= 0 and t.text[before] == "operator"):  # the name of a conversion
        return
    declared = before >= 0 and t.kind[before] == "name" and t.text[before] != "return"
    if VECTOR.match(word) and t.text[after] == "(" and not declared:
        t.text[i] = f"metal::lab_make<{word}>"
    elif word == "vec" and t.text[after] == "<":
        behind = t.after_angles(after)
        following = t.next(behind)
        if following < len(t.text) and t.text[following] == "(":
            inner = t.join(i, behind - 1)
            if before >= 0 and t.text[before] == "::":
                t.blank(t.previous(before - 1), before)
            t.blank(i, behind - 1)
            t.text[i] = f"metal::lab_make<metal::{inner}>"


def _outside_of_kernels(t: Tokens, found: Rewritten) -> list[tuple[str, str, int]]:
    out = []
    for i, text in enumerate(t.text):
        if text != "threadgroup" or t.kind[i] != "name" or any(a <= i <= b for a, b in found.bodies):
            continue
        before = t.previous(i - 1)
        if before >= 0 and t.text[before][-1] not in ";{}:":
            continue
        j = t.next(i + 1)
        name = ""
        while j < len(t.text) and t.text[j] not in (";", "*", "&", "(", "=", "[", ","):
            name = t.text[j] if t.kind[j] == "name" else name
            j = t.after_angles(j) if t.text[j] == "<" else t.next(j + 1)
        if j < len(t.text) and t.text[j] in (";", "[", ","):
            out.append((name, *t.place(i)))
    return out
