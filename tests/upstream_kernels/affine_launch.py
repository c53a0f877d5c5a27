"""Text and launches of mlx's kernels for affine-quantized matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from upstream_kernels.affine import Affine, rounded

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
    upstream: Path,
    source: str,
    name: str,
    w: Affine,
    x: Any,
    n: int,
    groups: tuple[int, int, int],
    threads: tuple[int, int, int] = (32, 2, 1),
    with_rows: bool = False,
) -> lab.Result:
    """Runs one kernel; the result's only output is y (rows of x, n) in the matrix' type.

    groups, threads
        Threadgroups, and threads of each, along x, y and z.
    with_rows
        The kernel takes the number of rows of x behind n.
    """
    m, k = x.shape
    y = rounded(np.zeros((m, n)), w.metal)
    # Dimensions, shapes and strides of batches: x, then weight, scales and biases. There is no batch.
    batch = [np.zeros(1, t) for t in (np.int32, np.int32, np.int64, np.int32, np.int32, np.int64, np.int64, np.int64)]
    values = [w.weight, w.scales, w.biases, x, y, k, n, *([m] if with_rows else []), *batch]
    grid = tuple(g * t for g, t in zip(groups, threads, strict=True))
    return lab.run_msl(
        source, name, dict(enumerate(values)), grid=grid, threadgroup=threads, outputs=[4], include_dirs=[upstream]
    )
