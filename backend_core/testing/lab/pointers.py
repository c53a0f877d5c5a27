"""Finds function parameters that are pointers or references without an address space, which Metal refuses."""

from __future__ import annotations

import re

from .tokens import Tokens
from .twins import SPACES

_SCOPES = {"namespace", "struct", "class", "union", "enum"}


def find_untyped_pointers(text: str) -> list[tuple[str, str, int]]:
    """(message, file, line) for each such parameter of functions in namespaces and classes of preprocessed text."""
    t = Tokens(text)
    out: list[tuple[str, str, int]] = []
    i = 0
    while i < len(t.text):
        if t.text[i] in ("(", "{") and t.kind[i] == "punct":
            close = t.closing(i)
            if t.text[i] == "(":
                after = t.next(close + 1)
                while after < len(t.text) and t.text[after] in ("const", "noexcept", "thread", "device", "constant"):
                    after = t.next(after + 1)
                if after < len(t.text) and t.text[after] in ("{", ":"):
                    out += _parameters(t, i, close)
                i = close
            elif not _is_scope(t, i):
                i = close
        i += 1
    return out


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
