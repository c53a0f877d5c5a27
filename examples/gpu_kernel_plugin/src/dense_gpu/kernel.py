"""The kernel as an entry, and cases for the lab's report."""

from pathlib import Path

import numpy as np

from backend_core.simt import Launch, SimtKernel
from backend_core.testing import lab

MOST_AT_ONCE = 8


def geometry(*, rows, n, x_dtype, **_):
    at_once = min(rows, MOST_AT_ONCE)
    template = (("T", x_dtype), ("ROWS", at_once), ("SIMD_GROUPS", 4))
    return Launch(template, (128 * -(-n // 4), -(-rows // at_once), 1), (128, 1, 1))


def eligible(*, k, x_dtype, weight_dtype, out_dtype, **_):
    if x_dtype not in ("float16", "bfloat16") or not x_dtype == weight_dtype == out_dtype:
        return f"x {x_dtype}, weight {weight_dtype}, result {out_dtype}: one of half precision is wanted"
    return "" if k % 8 == 0 else f"k = {k} is not a multiple of 8"


DENSE_QMV = SimtKernel(
    name="dense_qmv",
    source=Path(__file__).with_name("dense_qmv.metal"),
    inputs=("x", "w"),
    outputs=("y",),
    template=("T", "ROWS", "SIMD_GROUPS"),
    geometry=geometry,
    eligible=eligible,
)


def cases():
    for rows, n, k in ((1, 64, 1024), (3, 7, 264)):
        yield case(rows, n, k)


def case(rows, n, k, dtype="float16"):
    rng = np.random.default_rng([rows, n, k])
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in ((rows, k), (n, k)))
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    want, sizes = x64 @ w64.T, np.abs(x64) @ np.abs(w64.T)
    allowed = np.spacing(np.abs(want).astype(dtype)) + 4 * k**0.5 * 2.0**-24 * sizes
    facts = {"rows": rows, "n": n, "k": k, "x_dtype": dtype, "weight_dtype": dtype, "out_dtype": dtype}

    return lab.Case(
        name=f"{dtype}, {rows}x{k} times {n} rows",
        launch=DENSE_QMV.launch(**facts),
        inputs=(x, w),
        outputs=(((rows, n), dtype),),
        touched={"x": x.nbytes, "w": w.nbytes, "y": 2 * rows * n},
        once=("w", "y"),
        shapes={"x": (rows, k), "w": (n, k), "y": (rows, n)},
        excess=lambda outputs: float((np.abs(outputs[0] - want) / allowed).max()),
    )
