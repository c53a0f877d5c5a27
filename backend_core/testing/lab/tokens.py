"""Metal text as tokens that can be replaced without moving lines."""

from __future__ import annotations

import re

from .errors import LabError

_TOKEN = re.compile(
    r"""(?P<marker>^[ \t]*\#[^\n]*)
      | (?P<space>\s+)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<punct>\[\[|->|::|<<=|>>=|[-+*/%&|^=!<>]=|\#\#|.)""",
    re.X | re.M | re.S,
)


class Tokens:
    """Tokens of the text; those taken out stay as empty strings or as the line breaks they held."""

    def __init__(self, text: str) -> None:
        self.kind: list[str] = []
        self.text: list[str] = []
        for match in _TOKEN.finditer(text):
            self.kind.append(str(match.lastgroup))
            self.text.append(match.group())

    def next(self, i: int) -> int:
        """The first token at or after i that is neither space nor marker; the number of tokens at the end."""
        while i < len(self.kind) and (self.kind[i] in ("space", "marker") or not self.text[i]):
            i += 1
        return i

    def previous(self, i: int) -> int:
        """The last such token at or before i, or -1."""
        while i >= 0 and (self.kind[i] in ("space", "marker") or not self.text[i]):
            i -= 1
        return i

    def closing(self, i: int) -> int:
        """The token that closes the bracket at i (for `[[` the second `]`)."""
        pairs = {"(": ")", "[": "]", "{": "}"}
        if self.text[i] == "[[":
            depth, j = 2, i
            while depth:
                j += 1
                if j >= len(self.text):
                    raise LabError("an attribute [[ is never closed")
                depth += {"[": 1, "[[": 2, "]": -1}.get(self.text[j], 0)
            return j
        opening, close, depth = self.text[i], pairs[self.text[i]], 0
        for j in range(i, len(self.text)):
            if self.kind[j] != "punct":
                continue
            if self.text[j] == opening or (opening == "[" and self.text[j] == "[["):
                depth += len(self.text[j])
            elif self.text[j] == close:
                depth -= 1
                if depth == 0:
                    return j
        file, line = self.place(i)
        raise LabError(f"{file}:{line}: error: the bracket {opening!r} is never closed")

    def after_angles(self, i: int) -> int:
        """The token after the `>` that closes the `<` at i."""
        depth = 0
        while i < len(self.text):
            t = self.text[i]
            if t in "([{" and t:
                i = self.closing(i)
            elif t == "<" and (depth == 0 or self.kind[self.previous(i - 1)] == "name"):  # else "less than"
                depth += 1
            elif t in (">", ">=", ">>="):
                depth -= 1
                if depth == 0:
                    return i + 1
            elif t in (";", "{"):
                break
            i += 1
        raise LabError("template arguments are never closed")

    def place(self, i: int) -> tuple[str, int]:
        """File and line of the token at i, by the line markers before it."""
        lines = 0
        for j in range(i - 1, -1, -1):
            if self.kind[j] == "marker":
                match = re.match(r'[ \t]*#(?:line)?\s*(\d+)\s+"([^"]*)"', self.text[j])
                if match:
                    # The marker's own line break does not count.
                    return match.group(2), int(match.group(1)) + lines - 1
            lines += self.text[j].count("\n")
        return "", lines + 1

    def blank(self, first: int, last: int) -> None:
        """Takes tokens out, but for line breaks and markers."""
        for j in range(first, last + 1):
            if self.kind[j] != "marker":
                self.text[j] = "\n" * self.text[j].count("\n")

    def join(self, first: int, last: int) -> str:
        return "".join(self.text[first : last + 1])
