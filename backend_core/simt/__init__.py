"""Kernels for Metal and CUDA from one source: docs/simt.md describes the dialect."""

from .kernel import Launch, SimtKernel, arguments, check_shapes, constants
from .text import KernelText, preludes, text_of

__all__ = ["KernelText", "Launch", "SimtKernel", "arguments", "check_shapes", "constants", "preludes", "text_of"]
