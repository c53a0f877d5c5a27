"""mlx-accel plugin: dense bfloat16 layers with float32 activations on the CPU.

Stock widens the whole matrix to float32 at every call. The kernel reads the bfloat16 values where they lie.
"""

import functools
import importlib.resources
import sys

from backend_core import Offer, cpu_kernel, hookimpl, like


def library():
    """The shared library that CMake has built."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return importlib.resources.files(__name__) / "kernels" / f"bf16_linear.{suffix}"


@hookimpl
def register_kernels(registry):
    registry.cpu(name="bf16_linear", library=library(), symbol="bf16_linear", exactness="rounding")


@hookimpl
def select_linear(site):
    if (site.device, site.kind, site.mode) != ("cpu", "linear", "dense"):
        return None
    if (site.weight_dtype, site.x_dtype) != ("bfloat16", "float32"):
        return None
    return Offer("c", build, row_invariant=True, bytes_moved=site.weight_bytes + 4 * (site.k + site.n))


def build(layer):
    product = kernel().bind([layer.weight], output_shape=like(0, last=layer.weight.shape[0]), output_dtype=like(0))
    bias = layer.get("bias")
    return product if bias is None else lambda x: product(x) + bias


@functools.cache
def kernel():
    return cpu_kernel(library(), "bf16_linear", vjp=gradients)


def gradients(primals, cotangents, argnums):
    """As stock's, for LoRA training on an accelerated model."""
    import mlx.core as mx

    _, both = mx.vjp(lambda x, w: x @ w.T, list(primals), list(cotangents))
    return [both[i] for i in argnums]
