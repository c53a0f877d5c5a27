"""Cases of a plugin's kernels: what `python -m backend_core.testing.lab report PLUGIN` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend_core.simt import Launch


@dataclass(frozen=True)
class Case:
    """One launch of a kernel, and what its contract says about it.

    name
        Formats and sizes, for people.
    inputs
        numpy arrays in the order of the kernel's inputs.
    outputs
        Shape and dtype (mlx's name) of each output.
    touched
        Bytes of each buffer that are read (outputs: written) at least once, by the contract. Buffers that are not
        named are not compared.
    once
        Those of them of which no byte is requested twice.
    shapes
        Shapes that the contract demands of inputs; a launch that does not have them is refused.
    together
        Inputs that always have the same number of elements, which the type check must know.
    excess
        ``excess(outputs) -> float``: the largest error over the allowed one.
    """

    name: str
    launch: Launch
    inputs: Sequence[Any]
    outputs: Sequence[tuple[tuple[int, ...], str]]
    touched: Mapping[str, int] = field(default_factory=dict)
    once: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    excess: Callable[[Sequence[np.ndarray[Any, Any]]], float] | None = None
