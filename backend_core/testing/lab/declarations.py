"""Where declarations and statements begin in preprocessed Metal text, and what scope they are in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .errors import LabError
from .tokens import Tokens

_SCOPES = {"namespace", "struct", "class", "union"}
_NO_TYPES = {
    "return", "using", "if", "else", "for", "while", "do", "switch", "case", "default", "break", "continue", "goto",
    "delete", "new", "throw", "operator", "friend", "static_assert", "public", "private", "protected", "sizeof", "enum",
    "namespace", "struct", "class", "union", "template", "extern",
}  # fmt: skip


@dataclass(frozen=True)
class Declaration:
    """A declaration of a namespace or class, or the beginning of a statement.

    scope
        ``"namespace"``, ``"class"`` or ``"block"``.
    first, last
        The first token behind template parameters, and the last one: the `;`, or the `{` of a body. In a block last is
        the `;` that follows, or the token before the next bracket.
    template
        Whether template parameters precede.
    """

    scope: str
    first: int
    last: int
    template: bool


def declarations(t: Tokens) -> Iterator[Declaration]:
    """All of them, function bodies included."""
    yield from _scope(t, 0, len(t.text), "namespace")


def _scope(t: Tokens, i: int, end: int, scope: str) -> Iterator[Declaration]:
    i = t.next(i)
    while i < end:
        if t.text[i] in (";", "}"):
            i = t.next(i + 1)
            continue
        if t.text[i] in ("public", "private", "protected") and t.text[t.next(i + 1)] == ":":
            i = t.next(t.next(i + 1) + 1)
            continue
        first, template = i, False
        while t.text[first] == "template" and t.text[t.next(first + 1)] == "<":
            first, template = t.next(t.after_angles(t.next(first + 1))), True
        last = _end(t, first, end)
        if last >= end:
            return
        yield Declaration(scope, first, last, template)
        i = last + 1
        if t.text[last] == "{":
            words, close = set(t.text[first:last]), t.closing(last)
            if not words & _SCOPES or _has_parameters(t, first, last):
                if not words & {"enum", "="}:
                    yield from _block(t, last + 1, close)
            else:
                inner = "namespace" if words & {"namespace", "extern"} else "class"
                yield from _scope(t, last + 1, close, inner)
            i = close + 1
        i = t.next(i)


def _end(t: Tokens, i: int, end: int) -> int:
    """The `;` or the `{` of a body that ends the declaration at i, braces of initial values passed over."""
    value = members = False
    while i < end and t.text[i] != ";":
        text, before = t.text[i], t.previous(i - 1)
        if text in ("(", "[", "[["):
            i = t.closing(i)
        elif text == "<" and not value and t.kind[before] == "name" and t.text[before] != "operator":
            i = t.after_angles(i) - 1
        elif text == "=" and t.text[before] != "operator":
            value = True
        elif text == ":" and t.text[before] == ")":
            members = True  # a constructor's list
        elif text == "{":
            named = members and (t.kind[before] == "name" or t.text[before] == ">")
            if not value and not named:
                return i
            i = t.closing(i)
        i += 1
    return i


def _has_parameters(t: Tokens, first: int, last: int) -> bool:
    """Whether there are round brackets before the body, as a function has that returns a struct named as such."""
    j = first
    while j < last:
        if t.text[j] == "(" and t.text[t.previous(j - 1)] not in ("alignas", "__attribute__"):
            return True
        j = t.closing(j) + 1 if t.text[j] in ("(", "[", "[[") else j + 1
    return False


def _block(t: Tokens, i: int, end: int) -> Iterator[Declaration]:
    """Beginnings of statements, also in the brackets of a `for`."""
    while i < end:
        before = t.previous(i - 1)
        begins = t.text[before] in (";", "{", "}", ")", "else", "do")
        if t.text[before] == "(":
            begins = t.text[t.previous(before - 1)] == "for"
        if t.kind[i] == "name" and begins:
            last = i
            while last < end and t.text[last] not in (";", "{", "}"):
                last = t.closing(last) + 1 if t.text[last] in ("(", "[", "[[") else last + 1
            yield Declaration("block", i, min(last, end - 1), False)
        i = t.next(i + 1)


def pointer_declared(t: Tokens, d: Declaration) -> tuple[str, int, set[str]] | None:
    """``"*"`` or ``"&"``, the token of the name, and the words of the type, if a pointer or reference is declared."""
    j, words = d.first, set[str]()
    while j < d.last and t.text[j] not in ("*", "&"):
        if t.text[j] == "<":
            try:
                j = t.next(t.after_angles(j))
            except LabError:
                return None  # less than
            continue
        if t.text[j] == "[[":
            j = t.next(t.closing(j) + 1)
            continue
        if (t.kind[j] != "name" and t.text[j] != "::") or t.text[j] in _NO_TYPES:
            return None
        words.add(t.text[j])
        j = t.next(j + 1)
    if j >= d.last or not words:
        return None
    mark = t.text[j]
    while j < d.last and (t.text[j] in ("*", "&", "const", "volatile", "restrict") or t.text[j] in _SPACES):
        words.add(t.text[j])
        j = t.next(j + 1)
    after = t.next(j + 1)
    if after >= len(t.text) or t.kind[j] != "name" or t.text[after] not in ("=", ";", ",", "[", "(", "{", ":"):
        return None
    return mark, j, words


_SPACES = {"device", "constant", "threadgroup", "thread"}
