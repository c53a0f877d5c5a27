"""Makes loops count their rounds where lanes wait for each other in them.

Lanes that reach one SIMD operation or barrier in different rounds of a loop around it are not together there, though
they wait at the same place.

``for (...) BODY`` becomes ``for (lab_rounds lab_r; lab_r.once();) for (...) if (lab_r.next()) ;
else BODY``: the object counts for its lane while it lives, however the loop is left.
"""

from __future__ import annotations

import re

from .tokens import Tokens

_WAITS = re.compile(r"(?:(?:simd|quad|simdgroup)_\w+|threadgroup_barrier)\Z")
_CONTROL = {"if", "for", "while", "switch", "catch"}
_BEHIND_PARAMETERS = {"const", "thread", "device", "constant", "threadgroup", "noexcept", "volatile"}


def count_rounds(t: Tokens) -> None:
    """Rewrites, in place, the loops in which lanes wait for each other, here or in functions called there."""
    loops = [i for i, text in enumerate(t.text) if text in ("for", "while", "do") and t.kind[i] == "name"]
    if not loops:
        return
    waiting = _waiting_functions(t)
    ends = {t.next(statement_end(t, t.next(i + 1)) + 1) for i in loops if t.text[i] == "do"}  # the `while` of each
    found = []
    for i in loops:
        if i in ends or not any(n in waiting or _WAITS.match(n) for n in _called(t, i, statement_end(t, i))):
            continue
        found.append((i, t.next(i + 1) if t.text[i] == "do" else t.next(t.closing(t.next(i + 1)) + 1)))
    for i, body in reversed(found):
        t.text[body] = "if (lab_r.next()) ; else " + t.text[body]
        t.text[i] = "for (lab_rounds lab_r; lab_r.once();) " + t.text[i]


def statement_end(t: Tokens, i: int) -> int:
    """The last token of the statement that begins at i."""
    word = t.text[i]
    if word == "{":
        return t.closing(i)
    if word == "do":
        return _semicolon(t, t.next(statement_end(t, t.next(i + 1)) + 1))
    if word in _CONTROL:
        opening = t.next(i + 1)
        if t.text[opening] == "constexpr":
            opening = t.next(opening + 1)
        end = statement_end(t, t.next(t.closing(opening) + 1))
        after = t.next(end + 1)
        if word == "if" and after < len(t.text) and t.text[after] == "else":
            return statement_end(t, t.next(after + 1))
        return end
    return _semicolon(t, i)


def _semicolon(t: Tokens, i: int) -> int:
    while i < len(t.text) and t.text[i] != ";":
        i = t.closing(i) + 1 if t.text[i] in ("(", "[", "[[", "{") else i + 1
    return min(i, len(t.text) - 1)


def _called(t: Tokens, first: int, last: int) -> set[str]:
    """Names followed by `(` or `<` between these tokens."""
    out = set()
    for i in range(first, last + 1):
        if t.kind[i] == "name":
            after = t.next(i + 1)
            if after < len(t.text) and t.text[after] in ("(", "<"):
                out.add(t.text[i])
    return out


def _waiting_functions(t: Tokens) -> set[str]:
    """Names of the text's functions in which lanes wait for each other."""
    calls: dict[str, set[str]] = {}
    for name, first, last in functions(t):
        calls.setdefault(name, set()).update(_called(t, first, last))
    waiting = {name for name, called in calls.items() if any(_WAITS.match(c) for c in called)}
    while more := {name for name, called in calls.items() if name not in waiting and called & waiting}:
        waiting |= more
    return waiting


def functions(t: Tokens) -> list[tuple[str, int, int]]:
    """(name, first and last token of the body) of every function with a body."""
    opened: list[int] = []
    opening_of: dict[int, int] = {}
    for i, text in enumerate(t.text):
        if t.kind[i] == "punct" and text == "(":
            opened.append(i)
        elif t.kind[i] == "punct" and text == ")" and opened:
            opening_of[i] = opened.pop()
    out = []
    for i, text in enumerate(t.text):
        if text != "{" or t.kind[i] != "punct":
            continue
        before = t.previous(i - 1)
        while before >= 0 and t.text[before] in _BEHIND_PARAMETERS:
            before = t.previous(before - 1)
        if before not in opening_of:
            continue
        name = t.previous(opening_of[before] - 1)
        if name >= 0 and t.kind[name] == "name" and t.text[name] not in _CONTROL | {"constexpr"}:
            out.append((t.text[name], i, t.closing(i)))
    return out
