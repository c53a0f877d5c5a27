"""Kernels for Metal and CUDA from one source: docs/simt.md describes the dialect."""

from .kernel import Launch, SimtKernel, arguments, check_shapes
from .text import KernelText, preludes, text_of

__all__ = ["KernelText", "Launch", "SimtKernel", "arguments", "check_shapes", "preludes", "text_of"]
