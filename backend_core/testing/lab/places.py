"""From addresses in a compiled kernel to lines of the kernel's text, through addr2line (part of binutils)."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import compiler
from .brackets import SIGNATURE


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
        match = re.match(r"(.+):(\d+)(?: \(discriminator \d+\))?$", line)
        if match and match.group(1) != "??":
            places.append(Place(match.group(1).removeprefix(compiler.TEXT_FOLDER), int(match.group(2))))
    return tuple(places)


def chain(library: Path, offset: int, callers: tuple[int, ...] = ()) -> tuple[Place, ...]:
    """Where an address is, innermost first: inlined calls, then the callers. Empty if unknown."""
    found = list(_chain(library, offset))
    for caller in callers:
        if caller:
            found += _chain(library, caller)
    return tuple(found)


def in_kernel(places: tuple[Place, ...], texts: dict[str, str]) -> Place | None:
    """The innermost of these places that lies in the kernel's own text, not in what the lab put around it.

    Texts are known by name; a place in an included file is known by its path.
    """
    for place in places:
        if place.file in texts:
            return place
        file = f"/{place.file}"
        if file.endswith(("/lab", SIGNATURE)) or file.startswith("/<") or f"/{compiler.OWN_FOLDER}" in file:
            continue
        # Where the compiler could not leave out the folder that it worked in, which is gone.
        known = [name for name in texts if file.endswith(f"/{name}")]
        if known and not Path(place.file).exists():
            return Place(max(known, key=len), place.line)
        return place
    return None
