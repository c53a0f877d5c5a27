"""Finds what C++ has and Metal has not: statics and globals, recursion, `goto`, kernels that return something.

The compilers of the lab and of the type check take it, so it is looked for in the text.
"""

from __future__ import annotations

from collections.abc import Iterator

from .declarations import Declaration, declarations
from .rewrite import Rewritten, take_host_names, take_kernels
from .rewrite_rounds import functions
from .tokens import Tokens

_Found = tuple[str, str, int]
_WORDS = {
    "goto": "goto", "asm": "assembler", "__asm__": "assembler", "__asm": "assembler", "register": "register",
    "thread_local": "thread_local", "dynamic_cast": "dynamic_cast", "typeid": "typeid",
}  # fmt: skip
_BEFORE_A_CALL = {"return", "else", "do", "case"}


def find_outside_dialect(text: str) -> list[tuple[str, str, int]]:
    """(message, file, line) of everything found in preprocessed text."""
    t = Tokens(text)
    out = [*_words(t), *_atomics(t)]
    functions_seen: dict[str, list[Declaration]] = {}
    for d in declarations(t):
        out += _storage(t, d)
        if d.scope == "namespace" and t.text[d.last] == "{":
            for name in _function_name(t, d):
                functions_seen.setdefault(name, []).append(d)
    plain = {n for n, ds in functions_seen.items() if len(ds) == 1 and not ds[0].template}
    return out + list(_recursion(t, plain)) + list(_kernels(t, text))


def _words(t: Tokens) -> Iterator[_Found]:
    for i, text in enumerate(t.text):
        if t.kind[i] != "name":
            continue
        if text in _WORDS:
            yield f"Metal has no {_WORDS[text]}", *t.place(i)
        elif text == "long" and t.text[t.next(i + 1) % len(t.text)] == "long":
            yield "Metal has no long long; long has 64 bits", *t.place(i)


def _atomics(t: Tokens) -> Iterator[_Found]:
    for i, text in enumerate(t.text):
        opening = t.next(i + 1)
        if not (text.startswith("atomic_") and text.endswith("_explicit")) or opening >= len(t.text):
            continue
        if t.text[opening] != "(":
            continue
        for j in range(opening, t.closing(opening)):
            if t.text[j].startswith("memory_order_") and t.text[j] != "memory_order_relaxed":
                yield f"{text} takes memory_order_relaxed only", *t.place(j)


def _storage(t: Tokens, d: Declaration) -> Iterator[_Found]:
    """Variables that outlive a lane and are not in constant memory."""
    if d.scope != "namespace" and "static" not in t.text[d.first : d.last]:
        return
    words: list[str] = []
    name, j = "", d.first
    while j < d.last and t.text[j] not in ("=", "(", "{"):
        if t.text[j] == "<":
            before = t.previous(j - 1)
            if t.kind[before] != "name" or t.text[before] == "operator":
                return
            j = t.after_angles(j)
            continue
        if t.text[j] in ("[", "[["):
            j = t.closing(j) + 1
            continue
        if t.kind[j] == "name":
            words.append(name := t.text[j])
        j = t.next(j + 1)
    kept = {"static", "constexpr", "const", "inline", "volatile"}
    has_type = len([w for w in words if w not in kept]) > 1
    if t.text[j] == "(" or (t.text[d.last] == "{" and t.text[j] != "=") or not has_type or "constant" in words:
        return
    if set(words) & {"using", "typedef", "namespace", "friend", "extern", "operator", "template", "threadgroup",
                     "return", "static_assert", "goto"}:  # fmt: skip
        return
    if set(words) & {"struct", "class", "union", "enum"} and len(words) == 2:
        return  # announced only
    if d.scope == "namespace":
        yield f"variable {name!r} at program scope is not in constant memory", *t.place(d.first)
    elif "static" in words:
        yield f"static variable {name!r} is not in constant memory", *t.place(d.first)


def _function_name(t: Tokens, d: Declaration) -> Iterator[str]:
    j = d.first
    while j < d.last:
        if t.text[j] == "(":
            before = t.previous(j - 1)
            if t.kind[before] == "name" and t.text[before] not in ("__attribute__", "alignas", "decltype"):
                yield t.text[before]
                return
        j = t.closing(j) + 1 if t.text[j] in ("(", "[", "[[") else j + 1


def _recursion(t: Tokens, plain: set[str]) -> Iterator[_Found]:
    """Cycles of calls between functions that are neither templates nor overloaded nor members."""
    calls: dict[str, dict[str, int]] = {name: {} for name in plain}
    for name, first, last in functions(t):
        for i in range(first, last) if name in plain else ():
            after, before = t.next(i + 1), t.previous(i - 1)
            called = t.text[i] in plain and t.text[after] == "(" and t.text[before] not in (".", "->", "::")
            if called and (t.kind[before] != "name" or t.text[before] in _BEFORE_A_CALL):
                calls[name].setdefault(t.text[i], i)
    for name in sorted(plain):
        if name in _reach(calls, name):
            at = min(i for other, i in calls[name].items() if other == name or name in _reach(calls, other))
            yield f"function {name!r} calls itself: recursion", *t.place(at)


def _reach(calls: dict[str, dict[str, int]], start: str) -> set[str]:
    """What is called from there, at any depth."""
    reached, todo = set[str](), [start]
    while todo:
        new = set(calls[todo.pop()]) - reached
        reached |= new
        todo += new
    return reached


def _kernels(t: Tokens, text: str) -> Iterator[_Found]:
    found, same = Rewritten(""), Tokens(text)
    take_host_names(same, found)
    take_kernels(same, found)
    for name, kernel in found.kernels.items():
        at = next((i for i, x in enumerate(t.text) if x == name and t.text[t.next(i + 1)] == "("), -1)
        if at < 0:
            continue
        first = at
        while first > 0 and t.text[first - 1] not in (";", "}", "{", ">", "kernel"):
            first -= 1
        if "void" not in t.text[first:at]:
            yield f"kernel {name!r} returns a value", *t.place(at)
        seen: set[tuple[str, str]] = set()
        for param in kernel.params:
            if any(n == "function_constant" for n, _ in param.attributes):
                continue  # of two with one index, the constant picks one
            for attribute in param.attributes:
                if attribute[0] in ("buffer", "threadgroup", "texture", "sampler") and attribute in seen:
                    yield f"two parameters of kernel {name!r} have [[{attribute[0]}({attribute[1]})]]", *t.place(at)
                seen.add(attribute)
