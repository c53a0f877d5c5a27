"""Hooks: checkpoints with t5 weights, and the product with them; `gpu_offers` makes the offers for GPUs."""

from __future__ import annotations

import functools
import importlib.resources
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

if TYPE_CHECKING:
    from backend_core.kernels_registry import Registry
    from backend_core.offers import Offer
    from backend_core.policy import Policy
    from backend_core.simt import SimtKernel
    from backend_core.sites import CheckpointSite, LinearSite

MODE = "t5"
FLOATS = ("float32", "float16", "bfloat16")
KINDS = ("linear", "embedding", "switch")

SYMBOL = "t5_matmul"
EXPERTS = "t5_experts"
FACTS = "t5_facts"
WORDS = "t5_words"


def library() -> Any:
    """The shared library with the CPU kernels, a file of ``importlib.resources``."""
    name = "t5_kernels.dylib" if sys.platform == "darwin" else "t5_kernels.so"
    return importlib.resources.files("t5_ternary") / "kernels" / name


@hookimpl
def register_kernels(registry: Registry) -> None:
    from .gpu_kernels import KERNELS

    for kernel in KERNELS:
        registry.simt(kernel, exactness="rounding", cases=functools.partial(_cases, kernel))
    # Where layers run on a GPU, the plugin may have been installed without a compiler.
    if library().is_file() or not _on_gpu():
        registry.cpu(name="matmul", library=library(), symbol=SYMBOL, exactness="rounding")
        registry.cpu(name="experts", library=library(), symbol=EXPERTS, exactness="rounding")
        registry.cpu(name="words", library=library(), symbol=WORDS, exactness="bitwise")


def _cases(kernel: SimtKernel) -> Iterable[Any]:
    from . import lab_cases

    return lab_cases.cases(kernel)


def _on_gpu() -> bool:
    from backend_core.machine import default_device

    return default_device() != "cpu"


@hookimpl
def select_linear(site: LinearSite) -> Offer | list[Offer] | None:
    if site.kind not in KINDS or site.mode != MODE:
        return None
    if site.x_dtype not in FLOATS or site.scales_dtype not in FLOATS:
        return None
    if site.device != "cpu":
        from . import gpu_offers

        return (gpu_offers.offers(site) or None) if site.kind != "switch" else None
    from backend_core.offers import Offer
    from backend_core.sites import itemsize

    from .product import build, build_experts

    switch = site.kind == "switch"
    groups = site.n * site.k // site.group_size
    weights = site.n * site.k // 64 * 13 + groups * itemsize(site.scales_dtype)
    return Offer(
        name="experts" if switch else "packed",
        build=build_experts if switch else functools.partial(build, kind=site.kind),
        exactness="rounding",
        row_invariant=True,
        bytes_moved=weights + site.k * itemsize(site.x_dtype) + site.n * itemsize(site.out_dtype),
        preference=10,
        note=f"1.625 bits a weight and its scale, groups of {site.group_size}, decoded in registers",
    )


@hookimpl
def adapt_checkpoint(site: CheckpointSite, policy: Policy) -> Offer | None:
    if site.quant_method != MODE and not has_t5(Path(site.path)):
        return None
    from backend_core.offers import Offer

    return Offer("checkpoint", build=functools.partial(_adapt, policy=policy), exactness="bitwise")


def _adapt(arguments: dict[str, Any], policy: Policy) -> dict[str, Any]:
    from .loading import adapt

    return adapt(arguments, policy)


def has_t5(directory: Path) -> bool:
    """Whether a checkpoint has t5 weights, by the marker or the shapes of its tensors. Reads headers only."""
    from backend_core.errors import ModelError

    from . import marker
    from .recognise import find
    from .tensors import read_file

    try:
        if marker.find(json.loads((directory / "config.json").read_text(encoding="utf-8"))) is not None:
            return True
        forms = {t.name: (t.dtype, t.shape) for file in directory.glob("*.safetensors") for t in read_file(file)[0]}
    except (OSError, ValueError, AttributeError, ModelError):
        return False  # for the host to name
    return bool(find(forms, None))
