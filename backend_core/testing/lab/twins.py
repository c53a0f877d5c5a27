"""Declarations that differ in their address spaces only.

Metal text may overload by address space: member functions for `device` and for `thread` objects, a specialisation
for `device T*` and one for `constant T*`. The host has one address space, so all but the first are taken out.
"""

from __future__ import annotations

from .tokens import Tokens

SPACES = {"device", "constant", "threadgroup", "thread", "ray_data", "object_data"}
_SCOPES = {"namespace", "struct", "class", "union"}


def drop_twins(t: Tokens) -> None:
    """Takes out later twins, in namespaces and classes; function bodies are not entered."""
    _scope(t, 0, len(t.text), {})


def _scope(t: Tokens, i: int, end: int, seen: dict[str, bool]) -> None:
    while i < end:
        i = t.next(i)
        if i >= end:
            return
        if t.text[i] in ("}", ";"):
            i += 1
            continue
        if t.text[i] in ("public", "private", "protected") and t.text[t.next(i + 1)] == ":":
            i = t.next(i + 1) + 1
            continue
        i = _declaration(t, i, end, seen)


def _declaration(t: Tokens, i: int, end: int, seen: dict[str, bool]) -> int:
    """Handles the declaration at i and returns the token behind it."""
    j, scope, function, value = i, False, False, False
    while j < end and t.text[j] not in (";", "{"):
        text, before = t.text[j], t.previous(j - 1)
        if text in ("(", "[", "[["):
            function = function or text == "("
            j = t.closing(j)
        elif text == "<" and not value and t.kind[before] == "name" and t.text[before] != "operator":
            j = t.after_angles(j) - 1
        elif text == "=" and t.text[before] != "operator":
            function = value = True  # an initialiser follows, no scope; `<` may be "less than" in it
        elif t.kind[j] == "name" and text in _SCOPES:
            scope = True
        j += 1
    if j >= end:
        return end
    head = [x for x in t.text[i:j] if x.strip()]
    key = " ".join(x for x in [*head, t.text[j]] if x not in SPACES)
    spaced = any(x in SPACES for x in head)
    last = j
    if t.text[j] == "{":
        last = t.closing(j)
        after = t.next(last + 1)
        if (scope and not function) or (after < end and t.text[after] == ";"):
            if after < end and t.text[after] == ";":
                last = after
        elif not scope and after < end and t.text[after] in (",", "{"):
            # A constructor's initialiser list with braces: up to the body behind it.
            while (after < end and t.text[after] in (",", "{")) or (after < end and t.kind[after] == "name"):
                last = t.closing(after) if t.text[after] == "{" else after
                after = t.next(last + 1)
    if spaced and key in seen:
        t.blank(i, last)
        return last + 1
    if spaced or key in seen or (t.text[j] == "{" and function):
        seen[key] = True
    if t.text[j] == "{" and scope and not function:
        inner = seen if "namespace" in head else {}
        _scope(t, j + 1, t.closing(j), inner)
    return last + 1
