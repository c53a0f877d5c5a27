"""Hooks: one offer for every affine linear layer and output embedding, on the CPU and on GPUs.

``gpu_offers`` makes those for GPUs. The offer for the CPU is ``affine``: any rows, any dtypes that stock accepts, 1 to
6 and 8 bits, exactness ``rounding``, row-invariant. The weights are used where they lie; nothing is copied or repacked.
"""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

if TYPE_CHECKING:
    import mlx.core as mx

    from backend_core.kernels_registry import Registry
    from backend_core.offers import Offer
    from backend_core.simt import SimtKernel
    from backend_core.sites import LinearSite

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
FLOATS = ("float32", "float16", "bfloat16")
KINDS = ("linear", "embedding")

SYMBOL = "bonsai_affine_matmul"
FACTS = "bonsai_affine_facts"


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "bonsai_affine.dylib" if sys.platform == "darwin" else "bonsai_affine.so"
    return importlib.resources.files("bonsai_qmv") / "kernels" / name


@hookimpl
def register_kernels(registry: Registry) -> None:
    from .gpu_kernels import KERNELS

    for kernel in KERNELS:
        registry.simt(kernel, exactness="rounding", cases=functools.partial(_cases, kernel))
    # Where layers run on a GPU, the plugin may have been installed without a compiler.
    if library().is_file() or not _on_gpu():
        registry.cpu(name="affine_matmul", library=library(), symbol=SYMBOL, exactness="rounding")


def _cases(kernel: SimtKernel) -> Iterable[Any]:
    from . import lab_cases

    return lab_cases.cases(kernel)


def _on_gpu() -> bool:
    from backend_core.machine import default_device

    return default_device() != "cpu"


@hookimpl
def select_linear(site: LinearSite) -> Offer | list[Offer] | None:
    if site.kind not in KINDS or site.mode != "affine":
        return None
    if site.bits not in BITS or site.group_size not in GROUP_SIZES:
        return None
    if site.x_dtype not in FLOATS or site.scales_dtype not in FLOATS:
        return None
    if site.device != "cpu":
        from . import gpu_offers

        return gpu_offers.offers(site) or None
    from backend_core.offers import Offer
    from backend_core.sites import itemsize

    return Offer(
        name="affine",
        build=functools.partial(build, bits=site.bits, group_size=site.group_size, n=site.n, kind=site.kind),
        exactness="rounding",
        row_invariant=True,
        bytes_moved=site.weight_bytes + site.k * itemsize(site.x_dtype) + site.n * itemsize(site.out_dtype),
        preference=10,
        note=f"decoded in registers, {site.bits} bits, groups of {site.group_size}",
    )


def build(
    module: Any, *, bits: int, group_size: int, n: int, kind: str = "linear"
) -> Callable[[mx.array], mx.array]:
    """The layer's product as a callable ``f(x)``: x (..., k) -> (..., n), any float dtype, any rows.

    module
        Holds ``weight`` (n, k * bits // 32) uint32, ``scales`` and ``biases`` (n, k // group_size), and for
        kind ``linear`` possibly ``bias`` (n,), which is then added.

    The result has the dtype that stock's has. Raises ValueError if the arrays do not fit each other, and what
    :func:`backend_core.cpu_kernel` raises.
    """
    from backend_core.cpu_kernel import like, result_type

    arrays = [module["weight"], module["scales"], module["biases"]]
    weight, scales, biases = arrays
    k = scales.shape[-1] * group_size
    if weight.ndim != 2 or weight.shape != (n, k * bits // 32):
        raise ValueError(f"weight is {weight.shape}, not (n, k * bits / 32) = {(n, k * bits // 32)}")
    if scales.shape != (n, k // group_size) or biases.shape != scales.shape:
        raise ValueError(f"scales {scales.shape} and biases {biases.shape} are not {(n, k // group_size)}")
    if kind == "linear" and "bias" in module:
        arrays.append(module["bias"])
    return _kernel(bits, group_size).bind(
        arrays,
        output_shape=like(0, last=n),
        output_dtype=result_type(0, *range(2, 1 + len(arrays))),
        params=[bits, group_size, *facts(weight, scales, biases, bits, group_size)],
    )


def facts(weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> list[float | int]:
    """What the kernel may take for granted about these weights: [spread, symmetric, ratio, zeros], or nothing.

    spread
        How much more rounding errors of x count than the size of the weights says (about 1.2; see
        ``kernels/facts_body.h``). Decides which rows of x may be taken as fixed point.
    symmetric, ratio
        1 if ``biases == -ratio * scales`` bit for bit; then biases are not read.
    zeros
        The share of weights next to zero in the row that has most of them.

    A sample of the weights is read, and all scales and biases. Empty on processors without AVX-512 VNNI, where nobody
    asks.
    """
    import mlx.core as mx

    from backend_core import native

    if "avx512_vnni" not in native.status().isa_names:
        return []
    (known,) = _facts()(
        inputs=[mx.zeros((1, scales.shape[-1] * group_size)), weight, scales, biases],
        output_shapes=[(4,)],
        output_dtypes=[mx.float32],
        params=[bits, group_size],
    )
    spread, symmetric, ratio, zeros = known.tolist()
    return [spread, int(symmetric), ratio if symmetric else 0.0, zeros]


@functools.cache
def _facts() -> Any:
    from backend_core.cpu_kernel import cpu_kernel

    return cpu_kernel(library(), FACTS, name="bonsai_qmv/facts", ensure_row_contiguous=False)


@functools.cache
def _kernel(bits: int, group_size: int) -> Any:
    """One kernel object per format, since the gradient has to know the format."""
    from backend_core.cpu_kernel import cpu_kernel

    return cpu_kernel(
        library(),
        SYMBOL,
        name="bonsai_qmv/affine",
        ensure_row_contiguous=False,
        vjp=functools.partial(_vjp, bits=bits, group_size=group_size),
    )


def _vjp(
    primals: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    argnums: Sequence[int],
    *,
    bits: int,
    group_size: int,
) -> list[mx.array]:
    """Stock's gradients for x, scales, biases and bias; differentiating the codes is stock's error."""
    import mlx.core as mx

    def stock(*chosen: mx.array) -> mx.array:
        arrays = list(primals)
        for i, a in zip(argnums, chosen, strict=True):
            arrays[i] = a
        x, weight, scales, biases, *bias = arrays
        y = mx.quantized_matmul(x, weight, scales, biases, True, group_size, bits)
        return y + bias[0] if bias else y

    _, gradients = mx.vjp(stock, [primals[i] for i in argnums], list(cotangents))
    return gradients
