"""Whether a compiled kernel hands structures or vectors to functions that were not inlined.

What a function takes by value as it lies in memory, or what is stored as it returns it, is no access that compilers
instrument, so no check would see it. Inlining everything costs half of the time to compile again; few kernels need it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

_SCALARS = {
    "void", "bool", "char", "short", "int", "long", "float", "half", "double", "_Float16", "unsigned", "signed",
    "uchar", "ushort", "uint", "ulong", "int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t",
    "int64_t", "uint64_t", "size_t", "ptrdiff_t", "float16_t",
}  # fmt: skip
#: The lab's own functions, which are given copies.
_OWN = re.compile(r"(?:\S* )?(?:lab_\w+|metal::lab_simd_detail::|_sub_I_|_GLOBAL__|__)")
_KERNELS = re.compile(r"bare_t<decltype\(([\w:]+)")


def hands_over_values(built: Path, text: str) -> bool:
    """Whether an object file has such functions; True if it cannot be told.

    text
        What was compiled, for the results of functions, which are no part of their names.
    """
    nm = shutil.which("nm")
    if nm is None:
        return True
    done = subprocess.run([nm, "-C", "--defined-only", str(built)], capture_output=True, text=True)
    if done.returncode:
        return True
    kernels = set(_KERNELS.findall(text))
    symbols = (line.split(" ", 2) for line in done.stdout.splitlines())
    names = {name for _, kind, name in symbols if kind in "tTwW" and not _OWN.match(name)}
    return any(_takes_values(name, kernels, text) for name in names)


def _takes_values(symbol: str, kernels: set[str], text: str) -> bool:
    """``f(float const*, metal::vec<float, 4>)``: whether a parameter or the result is no number and no pointer."""
    symbol = re.sub(r"\s*(?:\[clone [^]]*\]|\[abi:\w+\])|\) const\Z", lambda m: ")" * m.group().startswith(")"), symbol)
    opening = _last_bracket(symbol)
    if opening < 0:
        return False
    conversion = re.search(r"\boperator ([\w:]+)\Z", symbol[:opening])
    result, name = (conversion.group(1), "") if conversion else _head(symbol[:opening])
    plain = name.split("<")[0]
    if plain in kernels or plain.split("::")[-1] in kernels:
        return False
    types = [t for t in _split(symbol[opening + 1 : symbol.rindex(")")]) if t]
    if result:
        types.append(result)
    else:
        before = re.findall(rf"([\w>*&]+)\s+{re.escape(plain.split('::')[-1])}\s*\(", text)
        types += [word for word in before if word not in ("return", "else", "case")]
    return any(not _is_scalar(t) for t in types)


def _is_scalar(kind: str) -> bool:
    kind = kind.strip()
    if kind.endswith(("*", "&", ")")) or "(*)" in kind or "(&)" in kind:
        return True
    words = set(kind.split()) - {"const", "volatile", "constexpr", "inline", "static"}
    return kind == "metal::mem_flags" or words <= _SCALARS


def _last_bracket(symbol: str) -> int:
    """Where the bracket of the parameters opens."""
    depth = 0
    for i in range(symbol.rfind(")"), -1, -1):
        depth += {")": 1, "(": -1}.get(symbol[i], 0)
        if depth == 0:
            return i if symbol[i] == "(" else -1
    return -1


def _head(head: str) -> tuple[str, str]:
    """Result and name; there is a result before the names of templates only."""
    depth = 0
    for i in range(len(head) - 1, -1, -1):
        depth += {">": 1, ")": 1, "<": -1, "(": -1}.get(head[i], 0)
        if head[i] == " " and depth == 0:
            return head[:i], head[i + 1 :]
    return "", head


def _split(types: str) -> list[str]:
    out, depth = [""], 0
    for c in types:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(c, 0)
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return [t.strip() for t in out]
