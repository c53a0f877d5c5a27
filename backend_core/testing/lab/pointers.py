"""Finds pointers and references without an address space, which Metal refuses.

Parameters, variables, members, results of functions, and casts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .declarations import declarations, pointer_declared
from .tokens import Tokens
from .twins import SPACES

_SCOPES = {"namespace", "struct", "class", "union", "enum"}


def find_untyped_pointers(text: str) -> list[tuple[str, str, int]]:
    """(message, file, line) for each of them in preprocessed text."""
    t = Tokens(text)
    return [*_of_parameters(t), *_of_declarations(t), *_of_casts(t)]


def _of_declarations(t: Tokens) -> Iterator[tuple[str, str, int]]:
    for d in declarations(t):
        found = pointer_declared(t, d)
        if found is None or found[2] & (SPACES | {"auto", "decltype", "typename"}):
            continue
        mark, name, _ = found
        kind = "pointer" if mark == "*" else "reference"
        if d.scope != "block" and t.text[t.next(name + 1)] == "(":
            yield f"function {t.text[name]!r} returns a {kind} without an address space", *t.place(name)
        else:
            yield f"{t.text[name]!r} is a {kind} without an address space", *t.place(name)


def _of_casts(t: Tokens) -> Iterator[tuple[str, str, int]]:
    """`(T*)p` and `reinterpret_cast<T*>(p)`."""
    for i, text in enumerate(t.text):
        before = t.previous(i - 1)
        if text == "(" and before >= 0 and (t.kind[before] == "punct" or t.text[before] == "return"):
            end = t.closing(i)
            words = [t.text[j] for j in range(i + 1, end) if t.text[j].strip()]
            ends = bool(words) and words[-1] == "*" and re.match(r"[A-Za-z_]", words[0])
            cast = ends and t.text[before] not in (")", "]", ">") and not {"(", ",", "=", "["} & set(words)
        elif text.endswith("_cast") and t.text[t.next(i + 1)] == "<":
            end = t.after_angles(t.next(i + 1)) - 1
            words = [t.text[j] for j in range(t.next(i + 1) + 1, end) if t.text[j].strip()]
            cast = bool(words) and words[-1] in ("*", "&")
        else:
            continue
        if cast and not SPACES & set(words):
            yield "a cast to a pointer without an address space", *t.place(i)


def _of_parameters(t: Tokens) -> list[tuple[str, str, int]]:
    out: list[tuple[str, str, int]] = []
    i = 0
    while i < len(t.text):
        if t.text[i] in ("(", "{") and t.kind[i] == "punct":
            close = t.closing(i)
            if t.text[i] == "(":
                after = t.next(close + 1)
                while after < len(t.text) and t.text[after] in ("const", "noexcept", "thread", "device", "constant"):
                    after = t.next(after + 1)
                if after < len(t.text) and t.text[after] in ("{", ":") and not _is_initialiser(t, i):
                    out += _parameters(t, i, close)
                i = close
            elif not _is_scope(t, i):
                i = close
        i += 1
    return out


def _is_initialiser(t: Tokens, i: int) -> bool:
    """Whether the bracket at i holds the value of a member in a constructor's list."""
    before = t.previous(t.previous(i - 1) - 1)
    return before >= 0 and (
        t.text[before] == "," or (t.text[before] == ":" and t.text[t.previous(before - 1)] in (")", "thread"))
    )


def _is_scope(t: Tokens, i: int) -> bool:
    """Whether the brace at i opens a namespace or a class: nothing but names since the statement began."""
    j = t.previous(i - 1)
    words = []
    while j >= 0 and t.text[j] not in (";", "{", "}", ")"):
        words.append(t.text[j])
        j = t.previous(j - 1)
    return any(w in _SCOPES for w in words)


def _parameters(t: Tokens, opening: int, close: int) -> list[tuple[str, str, int]]:
    out = []
    start, depth, j = opening + 1, 0, opening + 1
    while j <= close:
        text = t.text[j]
        if text == "<":
            j = t.after_angles(j) - 1
        elif text in ("(", "[", "[[", "{"):
            j = t.closing(j)
        elif depth == 0 and (text == "," or j == close):
            words = [w for w in t.text[start:j] if w.strip()]
            if ("*" in words or "&" in words) and not SPACES & set(words) and "=" not in words:
                name = next((w for w in reversed(words) if re.match(r"\w", w)), "?")
                file, line = t.place(j)
                kind = "pointer" if "*" in words else "reference"
                out.append((f"parameter {name!r} is a {kind} without an address space", file, line))
            start = j + 1
        j += 1
    return out
