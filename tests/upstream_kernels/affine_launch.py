"""Text and launches of mlx's kernels for affine-quantized matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from upstream_kernels.affine import Affine, rounded
from upstream_kernels.geometry import GEOMETRIES

from backend_core.testing import lab

#: What the library of an instance is made of, in this order.
HEADERS = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
#: kernel, type, group, bits, further template arguments.
Instance = tuple[str, str, int, int, str]


def text(kernels: Mapping[str, Instance]) -> str:
    """Metal text that includes mlx's headers and instantiates these kernels under these names."""
    lines = [f'#include "mlx/backend/metal/kernels/{name}"' for name in HEADERS]
    for name, (kernel, metal, group, bits, more) in kernels.items():
        lines.append(f'instantiate_kernel("{name}", {kernel}, {metal}, {group}, {bits}, {more})')
    return "\n".join(lines)


def launch(
    upstream: Path, kernels: Mapping[str, Instance], name: str, w: Affine, x: Any, n: int, layers: int = 1
) -> lab.Result:
    """Runs one of these kernels; the result's only output is y (rows of x, n) in the matrix' type.

    layers: how often all threadgroups are started; once is right.
    """
    (m, k), (kernel, _, _, _, more) = x.shape, kernels[name]
    geometry = GEOMETRIES[kernel]
    y = rounded(np.zeros((m, n)), w.metal)
    # Dimensions, shapes and strides of batches: x, then weight, scales and biases. There is no batch.
    batch = [np.zeros(1, t) for t in (np.int32, np.int32, np.int64, np.int32, np.int32, np.int64, np.int64, np.int64)]
    values = [w.weight, w.scales, w.biases, x, y, k, n, *([m] if geometry.with_rows else []), *batch]
    return lab.run_msl(
        text(kernels), name, dict(enumerate(values)), grid=geometry.grid(m, n, more, layers),
        threadgroup=geometry.threads, outputs=[4], include_dirs=[upstream],
    )  # fmt: skip
