"""Cases of the GPU kernels for the lab's report: both groups, edges, few and many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from backend_core.simt import SimtKernel
from backend_core.testing import lab

from . import reference
from .gpu_kernels import T5_MMA, T5_QMV
from .layout import packed_columns

#: group, dtype, n, k, rows, bias. N = 7 and N % 16 = 8 are edges of tiles; rows of 9 groups do not end at 16 bytes.
CASES = (
    (128, "float16", 64, 1024, 1, False),
    (128, "float16", 64, 1024, 8, False),
    (64, "float16", 64, 1024, 1, False),
    (64, "bfloat16", 24, 64 * 9, 4, False),
    (128, "bfloat16", 7, 128 * 9, 16, True),
    (128, "float32", 24, 384, 3, True),
)
#: The same for the kernels of many rows: whole tiles of 32 or 64 rows and 64 columns, and parts of tiles.
MANY = (
    (128, "float16", 64, 256, 64, False),
    (64, "float16", 64, 192, 32, False),
    (128, "bfloat16", 24, 128, 65, True),
    (64, "bfloat16", 7, 64, 17, False),
    (128, "float32", 72, 128, 33, True),
)


def cases(kernel: SimtKernel) -> Iterator[lab.Case]:
    """Those that the kernel can serve."""
    for group, dtype, n, k, rows, bias in CASES if kernel in (T5_QMV, T5_MMA) else MANY:
        facts = {"rows": rows, "n": n, "k": k, "group_size": group, "x_dtype": dtype, "scales_dtype": dtype,
                 "out_dtype": dtype, "has_bias": bias}  # fmt: skip
        if not kernel.eligible(**facts):
            yield _case(kernel, facts)


def _case(kernel: SimtKernel, f: dict[str, Any]) -> lab.Case:
    rows, n, k, group, dtype = f["rows"], f["n"], f["k"], f["group_size"], f["x_dtype"]
    rng = np.random.default_rng([group, n, k, rows])
    x, scales = _typed(rng.standard_normal((rows, k)), dtype), _typed(rng.uniform(0.01, 0.03, (n, k // group)), dtype)
    bias = _typed(rng.standard_normal(n), dtype) if f["has_bias"] else None
    packed = reference.pack(rng.integers(0, 3, (n, k)), group)
    weights = reference.dequantize64(packed, _values(scales), group)
    want, allowed = reference.bound(_values(x), weights, dtype, None if bias is None else _values(bias))

    def excess(outputs: Sequence[np.ndarray]) -> float:
        off = np.abs(_values(outputs[0]) - want) / allowed
        return float(np.where(np.isnan(off), np.inf, off).max())

    size = 4 if dtype == "float32" else 2
    touched = {
        "x": rows * k * size, "w": n * packed_columns(k, group), "scales": n * k // group * size,
        "bias": n * size if bias is not None else 0, "y": rows * n * size,
    }  # fmt: skip
    kind, launch = f"g{group} {dtype}, {n}x{k}, {rows} row{'s' if rows > 1 else ''}", kernel.launch(**f)
    few = kernel in (T5_QMV, T5_MMA)
    # All rows of a pass or tile share what is read of the weights; beyond the last column that one is read again.
    once = n % 16 == 0 and launch.grid[1] == 1 if few else n % 64 == 0
    return lab.Case(
        name=kind if bias is None else f"{kind}, bias",
        launch=launch,
        # What is not read may be anything of its type.
        inputs=(x, packed, scales, scales if bias is None else bias),
        outputs=(((rows, n), dtype),),
        touched=touched,
        once=("w", "y") if once else ("y",),
        shapes={"w": packed.shape, "scales": (n, k // group)},
        excess=excess,
    )


def _typed(a: np.ndarray, dtype: str) -> Any:
    return lab.to_bfloat16(a) if dtype == "bfloat16" else a.astype(dtype)


def _values(a: Any) -> np.ndarray:
    return np.asarray(lab.to_float32(a), np.float64)
