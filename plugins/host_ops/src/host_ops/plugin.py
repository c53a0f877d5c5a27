"""Hooks: one offer, ``native``, for every op on the CPU that this library has a kernel for.

All offers take any number of rows, are of exactness ``rounding`` (``reference.py`` states the bounds) and
row-invariant, and read parameters where they lie.
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

if TYPE_CHECKING:
    from backend_core.kernels_registry import Registry
    from backend_core.offers import Offer
    from backend_core.sites import OpSite

FLOATS = ("float32", "float16", "bfloat16")

KERNELS = ("rms_norm", "rope")


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "host_ops.dylib" if sys.platform == "darwin" else "host_ops.so"
    return importlib.resources.files("host_ops") / "kernels" / name


@hookimpl
def register_kernels(registry: Registry) -> None:
    for name in KERNELS:
        registry.cpu(name=name, library=library(), symbol=f"host_ops_{name}", exactness="rounding")


@hookimpl
def select_op(site: OpSite) -> Offer | None:
    if site.device != "cpu" or site.x_dtype not in FLOATS or site.weight_dtype not in ("", *FLOATS):
        return None
    build = BUILDERS.get(site.op)
    if build is None:
        return None
    from backend_core.offers import Offer
    from backend_core.sites import itemsize

    size = site.dims * itemsize(site.x_dtype)
    return Offer(
        name="native",
        build=build,
        exactness="rounding",
        row_invariant=True,
        bytes_moved=2 * size,
        preference=10,
    )


def _rms_norm(module: Any) -> Callable[..., Any]:
    from . import ops

    return ops.rms_norm(module["weight"], module.eps)


def _rope(module: Any) -> Callable[..., Any]:
    from . import ops

    return ops.rope(module.dims, module.traditional, module.base, module.scale)


BUILDERS: dict[str, Callable[[Any], Callable[..., Any]]] = {"rms_norm": _rms_norm, "rope": _rope}
