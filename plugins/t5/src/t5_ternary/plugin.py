"""Hooks: checkpoints with t5 weights, and the product with them on the CPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend_core import hookimpl

if TYPE_CHECKING:
    from backend_core.offers import Offer
    from backend_core.policy import Policy
    from backend_core.sites import CheckpointSite

MODE = "t5"


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
