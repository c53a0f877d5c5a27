"""Brackets of a kernel's text that have no partner, at the line where they stand.

A compiler finds them too late: a body with a bracket too many ends the function that is written around it, one with a
bracket too few ends it never, and what is reported is a line of that function.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: Ends the name of the part of the text that is the function around a body.
SIGNATURE = ".signature"

_PART = re.compile(
    r"""^[ \t]*\#(?:line)?[ \t]*(?P<line>\d+)[ \t]+"(?P<file>[^"\n]*)"[^\n]*
      | ^[ \t]*\#[^\n]*
      | "(?:\\.|[^"\\\n])*"
      | \.?\d(?:'?[\w.])*
      | '(?:\\.|[^'\\\n])*'
      | (?P<bracket>[()\[\]{}])""",
    re.X | re.M,
)
_PARTNER = {")": "(", "]": "[", "}": "{"}


class Unpaired(NamedTuple):
    """A bracket without a partner."""

    message: str
    file: str
    line: int


class _Open(NamedTuple):
    bracket: str
    file: str
    line: int

    def never_closed(self) -> Unpaired:
        return Unpaired(f"the bracket {self.bracket!r} is never closed", self.file, self.line)


def unpaired(preprocessed: str) -> Unpaired | None:
    """The first bracket without a partner in preprocessed text, None if there is none.

    What stands before a signature, and what stands between its parts, pairs by itself, unless the whole text does: a
    body may end the function and begin another.
    """
    return _scan(preprocessed, whole=True) and _scan(preprocessed, whole=False)


def _scan(preprocessed: str, whole: bool) -> Unpaired | None:
    opened: list[_Open] = []
    file, base, own = "", 1, 0  # own: how many brackets were open where this part began
    line, scanned = 0, 0
    for match in _PART.finditer(preprocessed):
        line, scanned = line + preprocessed.count("\n", scanned, match.start()), match.start()
        if match["file"] is not None:
            if not whole and file.endswith(SIGNATURE) != match["file"].endswith(SIGNATURE):
                if not file.endswith(SIGNATURE) and len(opened) > own:
                    return opened[own].never_closed()
                own = 0 if match["file"].endswith(SIGNATURE) else len(opened)
            # The line after the marker has its number.
            file, base = match["file"], int(match["line"]) - line - 1
        elif bracket := match["bracket"]:
            if bracket not in _PARTNER:
                opened.append(_Open(bracket, file, base + line))
            elif len(opened) > own and opened[-1].bracket == _PARTNER[bracket]:
                opened.pop()
            elif any(o.bracket == _PARTNER[bracket] for o in opened[own:]):
                return opened[-1].never_closed()
            else:
                return Unpaired(f"the bracket {bracket!r} closes nothing", file, base + line)
    return opened[0].never_closed() if opened else None
