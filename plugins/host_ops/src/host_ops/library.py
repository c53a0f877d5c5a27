"""Where the kernels are."""

from __future__ import annotations

import importlib.resources
import sys
from typing import Any


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "host_ops.dylib" if sys.platform == "darwin" else "host_ops.so"
    return importlib.resources.files("host_ops") / "kernels" / name
