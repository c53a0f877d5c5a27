"""Cases of the GPU kernels for the lab's report: every width of codes, edges, few and many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from backend_core.simt import SimtKernel
from backend_core.simt.tiles import COLUMNS
from backend_core.testing import lab

from . import reference
from .gpu_tiles import AFFINE_QMM_SIMD

#: bits, group, dtype, n, k, rows, symmetric, bias. N = 7 and N % 16 = 8 are edges of tiles; 21 groups one of shares.
CASES = (
    (2, 128, "float16", 64, 1024, 1, 0, False),
    (2, 128, "float16", 64, 1024, 1, 2, False),
    (2, 128, "float16", 64, 1024, 8, 2, False),
    (1, 128, "float16", 64, 2048, 1, 1, False),
    (1, 128, "float16", 24, 1152, 4, 0, True),
    (1, 64, "bfloat16", 24, 64 * 21, 4, 0, False),
    (2, 32, "bfloat16", 7, 32 * 5, 16, 0, True),
    (4, 64, "float16", 40, 320, 2, 0, True),
    (2, 128, "float32", 24, 384, 3, 2, False),
)
#: The same for the kernel of many rows on Metal: a tile of 64 columns and of 32 or 64 rows, and parts of tiles.
MANY = (
    (2, 128, "float16", 64, 256, 64, 0, False),
    (2, 128, "float16", 64, 256, 32, 2, False),
    (1, 128, "float16", 64, 256, 64, 1, False),
    (1, 64, "bfloat16", 24, 192, 65, 0, True),
    (4, 32, "bfloat16", 7, 96, 17, 0, False),
    (4, 64, "float16", 40, 64, 33, 4, True),
    (2, 32, "float32", 72, 64, 63, 0, False),
)


def cases(kernel: SimtKernel) -> Iterator[lab.Case]:
    """Those that the kernel can serve."""
    for bits, group, dtype, n, k, rows, symmetric, bias in MANY if kernel is AFFINE_QMM_SIMD else CASES:
        facts = {"rows": rows, "n": n, "k": k, "bits": bits, "group_size": group, "x_dtype": dtype,
                 "scales_dtype": dtype, "out_dtype": dtype, "symmetric": symmetric, "has_bias": bias}  # fmt: skip
        if not kernel.eligible(**facts):
            yield _case(kernel, facts)


def _case(kernel: SimtKernel, f: dict[str, Any]) -> lab.Case:
    rows, n, k, bits, dtype = f["rows"], f["n"], f["k"], f["bits"], f["x_dtype"]
    groups = (n, k // f["group_size"])
    rng = np.random.default_rng([bits, n, k, rows])
    x, scales = _typed(rng.standard_normal((rows, k)), dtype), _typed(rng.uniform(0.01, 0.03, groups), dtype)
    wide = -0.5 * f["symmetric"] * _values(scales) if f["symmetric"] else rng.normal(0, 0.02, groups)
    biases, bias = _typed(wide, dtype), _typed(rng.standard_normal(n), dtype) if f["has_bias"] else None
    words = reference.pack(rng.integers(0, 1 << bits, (n, k)), bits)
    weights = reference.dequantize64(words, _values(scales), _values(biases), bits)
    want, allowed = reference.bound(_values(x), weights, dtype, None if bias is None else _values(bias))

    def excess(outputs: Sequence[np.ndarray]) -> float:
        off = np.abs(_values(outputs[0]) - want) / allowed
        return float(np.where(np.isnan(off), np.inf, off).max())

    size = 4 if dtype == "float32" else 2
    touched = {
        "x": rows * k * size, "w": n * k * bits // 8, "scales": n * groups[1] * size,
        "biases": 0 if f["symmetric"] else n * groups[1] * size, "bias": n * size if bias is not None else 0,
        "y": rows * n * size,
    }  # fmt: skip
    kind = f"{bits}-bit g{f['group_size']} {dtype}, {n}x{k}, {rows} row{'s' if rows > 1 else ''}"
    extra = [word for word, on in (("biases follow from scales", f["symmetric"]), ("bias", bias is not None)) if on]
    return lab.Case(
        name=", ".join([kind, *extra]),
        launch=kernel.launch(**f),
        # What is not read may be anything of its type.
        inputs=(x, words, scales, biases, scales if bias is None else bias),
        outputs=(((rows, n), dtype),),
        touched=touched,
        # All rows of a tile share what is read of the weights; beyond the last column tiles take that column again.
        once=("w", "y") if n % (COLUMNS if kernel is AFFINE_QMM_SIMD else 16) == 0 else ("y",),
        together=(("scales", "biases"),),
        shapes={"w": words.shape, "scales": groups, "biases": groups},
        excess=excess,
    )


def _typed(a: np.ndarray, dtype: str) -> Any:
    return lab.to_bfloat16(a) if dtype == "bfloat16" else a.astype(dtype)


def _values(a: Any) -> np.ndarray:
    return np.asarray(lab.to_float32(a), np.float64)
