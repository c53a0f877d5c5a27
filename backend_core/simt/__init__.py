"""Kernels for Metal and CUDA from one source: docs/simt.md describes the dialect."""

from .families import MOST_ROWS, Family, family_for, product
from .kernel import Launch, SimtKernel, arguments, check_shapes, constants
from .text import KernelText, preludes, text_of

__all__ = [
    "MOST_ROWS", "Family", "KernelText", "Launch", "SimtKernel", "arguments", "check_shapes", "constants", "family_for",
    "preludes", "product", "text_of",
]  # fmt: skip
