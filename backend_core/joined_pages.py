"""Huge pages for weights: what a joined stack reads once a token, in pages of 2 MB instead of 4 KB.

The weights of a small model are some hundred arrays of some hundred KB each. No allocator gives huge pages to so small
a block, though the blocks lie side by side; and a processor that reads all of them once a token looks up a page for
every 64 lines. Linux from 6.1 on can put the pages of a range together where they are (``madvise`` with
``MADV_COLLAPSE``): addresses and contents stay, and whoever holds the arrays notices nothing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Bytes of a huge page on x86-64, and on ARM with pages of 4 KB; a range that is none is refused by the system.
PAGE = 1 << 21
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_COLLAPSE = 25


def allowed() -> bool:
    """True if this is Linux and its owner has not switched huge pages off."""
    try:
        return sys.platform == "linux" and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def collapse(arrays: Iterable[Any]) -> int:
    """Put the memory of evaluated mlx arrays into huge pages, as far as the system does; how many pages it made.

    Every huge page that an array touches, with whatever else lies in it. Costs a copy of that memory. What has no
    buffer (bfloat16 has none) is left out. What the system refuses (an older kernel, no free huge page, memory that is
    a file) stays as it is.
    """
    import numpy as np

    if not allowed():
        return 0
    pages: set[int] = set()
    for array in arrays:
        try:
            begin = np.asarray(memoryview(array)).__array_interface__["data"][0]
        except (TypeError, ValueError, RuntimeError, BufferError):
            continue
        pages.update(range(begin // PAGE, (begin + array.nbytes - 1) // PAGE + 1))
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(madvise(page * PAGE, PAGE, _MADV_COLLAPSE) == 0 for page in sorted(pages))
