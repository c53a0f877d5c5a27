"""From addresses in a compiled kernel to lines of the kernel's text, through addr2line (part of binutils)."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A file name as in the kernel's text, and a line from 1."""

    file: str
    line: int


@functools.lru_cache(maxsize=4096)
def _chain(library: Path, offset: int) -> tuple[Place, ...]:
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or offset == 0:
        return ()
    # A return address points behind the call.
    command = [tool, "-i", "-e", str(library), hex(offset - 1)]
    done = subprocess.run(command, capture_output=True, text=True)
    places = []
    for line in done.stdout.splitlines():
        file, _, number = line.split(" ")[0].rpartition(":")
        if number.isdigit() and file and file != "??":
            places.append(Place(file, int(number)))
    return tuple(places)


def chain(library: Path, offset: int, callers: tuple[int, ...] = ()) -> tuple[Place, ...]:
    """Where an address is, innermost first: inlined calls, then the callers. Empty if unknown."""
    found = list(_chain(library, offset))
    for caller in callers:
        if caller:
            found += _chain(library, caller)
    return tuple(found)


def in_kernel(places: tuple[Place, ...], texts: dict[str, str]) -> Place | None:
    """The innermost of these places that lies in the kernel's own text, not in the lab's library.

    Texts are known by name; a place in an included file is known by its path.
    """
    for place in places:
        # The debugger's path of "x.metal" is "<folder of the build>/x.metal".
        for name in texts:
            if place.file == name or place.file.endswith("/" + name):
                return Place(name, place.line)
        if place.file.endswith((".metal", ".h")) and "/include/lab/" not in place.file:
            return place
    return None


def source_line(place: Place, texts: dict[str, str]) -> str:
    """The text of that line, ``""`` if it is not there."""
    text = texts.get(place.file)
    if text is None:
        try:
            text = Path(place.file).read_text(errors="replace")
        except OSError:
            return ""
    lines = text.splitlines()
    return lines[place.line - 1] if 0 < place.line <= len(lines) else ""
