"""Constructors of structures for the type check, where vectors have none and objects are built in any address space."""

from __future__ import annotations

import re

from .tokens import Tokens

VECTOR = re.compile(r"(?:packed_)?(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]\Z")
_BEFORE_A_CONSTRUCTOR = (";", "{", "}", ":", ">", "constexpr", "explicit", "inline")


def rewrite_constructors(t: Tokens) -> None:
    """Rewrites the constructors of every structure in place.

    ``P(float x) thread : a(x), b(x, x) {}`` becomes ``P(float x) : a(x), b(metal::lab_make<float2>(x, x)) {}``. Metal
    builds what a function returns in ``thread``, OpenCL C++ in an address space of its own, which a constructor for
    one space alone does not serve.
    """
    for i, word in enumerate(t.text):
        if word not in ("struct", "class"):
            continue
        name = t.next(i + 1)
        body = _body(t, name)
        if body is None:
            continue
        members = _vector_members(t, *body)
        for j in range(*body):
            if t.text[j] == t.text[name] and t.text[t.previous(j - 1)] in _BEFORE_A_CONSTRUCTOR:
                _rewrite_one(t, t.next(j + 1), members)


def _body(t: Tokens, name: int) -> tuple[int, int] | None:
    """First and last token of the braces of the structure that is named there; None for a declaration or a use."""
    j = t.next(name + 1)
    while j < len(t.text) and t.text[j] not in ("{", ";", "(", ")", "=", "&", "*"):
        j = t.next(t.after_angles(j)) if t.text[j] == "<" else t.next(j + 1)
    if j >= len(t.text) or t.text[j] != "{" or t.kind[name] != "name":
        return None
    return j, t.closing(j)


def _vector_members(t: Tokens, first: int, last: int) -> dict[str, str]:
    """Type by name of what is declared as a vector between these tokens."""
    out = {}
    for i in range(first, last):
        j = t.next(i + 1)
        if t.text[i] == "vec" and t.text[j] == "<":
            j = t.next(t.after_angles(j))
        elif not VECTOR.match(t.text[i]):
            continue
        kind = t.join(i, t.previous(j - 1)).strip()
        while t.kind[j] == "name" and t.text[t.next(j + 1)] in (";", ","):
            out[t.text[j]] = f"metal::{kind}" if kind.startswith("vec") else kind
            j = t.next(j + 1)
            if t.text[j] == ";":
                break
            j = t.next(j + 1)
    return out


def _rewrite_one(t: Tokens, opening: int, members: dict[str, str]) -> None:
    if t.text[opening] != "(":
        return
    i = t.next(t.closing(opening) + 1)
    if t.text[i] == "thread":
        t.text[i] = ""
        i = t.next(i + 1)
    if t.text[i] in ("threadgroup", "device", "constant"):
        i = t.next(i + 1)
    if t.text[i] != ":":
        return
    while t.text[i] in (":", ","):
        name = t.next(i + 1)
        start = t.next(name + 1)
        while t.text[start] not in ("(", "{"):
            start = t.next(t.after_angles(start)) if t.text[start] == "<" else t.next(start + 1)
        end = t.closing(start)
        if t.text[start] == "(" and t.text[name] in members:
            t.text[start], t.text[end] = f"(metal::lab_make<{members[t.text[name]]}>(", "))"
        i = t.next(end + 1)
