"""Rotary embeddings of mlx and of the hosts: what each of them computes, in one form.

All of them turn pairs of features by angles ``position * frequency`` and may multiply the result by a factor. They
differ in how frequencies come about (Llama 3's scaling, YaRN, LongRoPE, proportional ones), and that is over when the
module has been made: it holds an array of periods.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import reference
from .walk import stock_class


@dataclass(frozen=True)
class Rotation:
    """What a rotary embedding does to x (..., rows, features).

    frequencies
        (dims / 2,) float64: pair i of the row at position p turns by ``p * frequencies[i]``.
    factor
        The rotated features are multiplied by it; features from dims on stay as they are.
    traditional
        True: pairs are neighbours; False: feature i goes with feature i + dims / 2.
    plain
        True for ``nn.RoPE``, whose frequencies follow from a base and a scale.
    """

    frequencies: np.ndarray
    factor: float = 1.0
    traditional: bool = False
    plain: bool = False

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)

    @property
    def content(self) -> str:
        """Identifies frequencies and factor."""
        data = self.frequencies.tobytes() + np.float64(self.factor).tobytes()
        return hashlib.sha256(data).hexdigest()[:12]


def rotation_of(module: Any) -> Rotation | None:
    """What a rotary embedding computes, None for a module that is none, or whose frequencies change from call to call.

    module
        ``nn.RoPE``, or ``Llama3RoPE``, ``YarnRoPE``, ``SuScaledRoPE`` or ``ProportionalRoPE`` of mlx-lm or (but for
        ``SuScaledRoPE``, which chooses its frequencies by the length) mlx-vlm.
    """
    import mlx.nn as nn

    cls = stock_class(module)
    if cls is nn.RoPE:
        exponents = -np.arange(module.dims // 2, dtype=np.float64) * 2.0 / max(module.dims, 1)
        frequencies = float(module.scale) * np.float64(module.base) ** exponents
        return Rotation(frequencies, 1.0, bool(module.traditional), plain=True)
    read = _classes().get(cls)
    return None if read is None else read(module)


def is_rope(cls: type) -> bool:
    """True for the classes whose instances are called ``rope(x, offset)`` and may be sites."""
    import mlx.nn as nn

    return cls is nn.RoPE or cls in _classes()


def _by_periods(module: Any, dims: str = "dims", factor: str = "") -> Rotation | None:
    periods = module.get("_freqs")
    if periods is None or periods.ndim != 1 or 2 * periods.size != getattr(module, dims):
        return None
    # An infinite period is a pair that does not turn.
    frequencies = 1.0 / reference.as_numpy(periods).astype(np.float64)
    value = getattr(module, factor) if factor else 1.0
    if not isinstance(value, (int, float)):
        return None
    return Rotation(frequencies, float(value), bool(getattr(module, "traditional", False)))


def _proportional(module: Any) -> Rotation | None:
    # mlx-vlm's gives its input back if nothing is to be turned.
    return _by_periods(module) if getattr(module, "rope_angles", 1) > 0 else None


#: (module, class) -> how to read an instance. Looked up in sys.modules: nothing is imported for a model not using it.
_READERS: dict[tuple[str, str], Callable[[Any], Rotation | None]] = {
    ("mlx_lm.models.rope_utils", "Llama3RoPE"): _by_periods,
    ("mlx_lm.models.rope_utils", "YarnRoPE"): lambda m: _by_periods(m, factor="mscale"),
    ("mlx_lm.models.rope_utils", "SuScaledRoPE"): lambda m: _by_periods(m, "dim", "_scale"),
    ("mlx_lm.models.rope_utils", "ProportionalRoPE"): _proportional,
    ("mlx_vlm.models.rope_utils", "Llama3RoPE"): _by_periods,
    ("mlx_vlm.models.rope_utils", "YarnRoPE"): lambda m: _by_periods(m, factor="mscale"),
    ("mlx_vlm.models.rope_utils", "ProportionalRoPE"): _proportional,
}


def _classes() -> dict[type, Callable[[Any], Rotation | None]]:
    found = {}
    for (module, name), read in _READERS.items():
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type):
            found[cls] = read
    return found
