"""Kernels for Metal and CUDA from one source: docs/simt.md describes the dialect."""

from .families import MOST_ROWS, Family, family_for, many_rows, product
from .kernel import Launch, SimtKernel, arguments, check_dtypes, check_shapes, constants
from .text import KernelText, preludes, text_of

__all__ = [
    "MOST_ROWS", "Family", "KernelText", "Launch", "SimtKernel", "arguments", "check_dtypes", "check_shapes",
    "constants", "family_for", "many_rows", "preludes", "product", "text_of",
]  # fmt: skip
