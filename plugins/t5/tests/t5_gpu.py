"""GPU kernels in the lab: random problems and launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from t5_ternary import gpu_kernels, reference
from t5_ternary.layout import packed_columns

from backend_core.simt import SimtKernel, arguments
from backend_core.testing import lab, lab_device
from backend_core.testing.lab_device import typed, values

KERNELS = {kernel.name: kernel for kernel in gpu_kernels.KERNELS}


@dataclass
class Problem:
    """x (rows, k) and one layer's weights."""

    x: np.ndarray
    w: np.ndarray
    scales: np.ndarray
    bias: np.ndarray | None
    facts: dict[str, Any]

    def part(self, rows: slice) -> Problem:
        """The same with some rows of x."""
        return replace(self, x=self.x[rows])

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(result in float64, largest error that `rounding` allows)."""
        weights = reference.dequantize64(self.w, values(self.scales), self.facts["group_size"])
        bias = None if self.bias is None else values(self.bias)
        return reference.bound(values(self.x), weights, self.facts["out_dtype"], bias)


def problem(group: int, dtype: str, n: int, k: int, rows: int = 17, *, scales: str = "", bias: bool = False,
            zeros: float = 1 / 3, seed: int = 0) -> Problem:  # fmt: skip
    """Random trits, a share `zeros` of them weights of zero, normal x; scales of x's dtype unless another is named."""
    rng = np.random.default_rng([seed, group, n, k])
    scales, rest = scales or dtype, (1 - zeros) / 2
    return Problem(
        x=typed(rng.standard_normal((rows, k)), dtype),
        w=reference.pack(rng.choice(3, (n, k), p=(rest, zeros, rest)), group),
        scales=typed(rng.uniform(0.01, 0.1, (n, k // group)) * rng.choice((-1, 1), (n, k // group)), scales),
        bias=typed(rng.standard_normal(n), scales) if bias else None,
        facts={"n": n, "k": k, "group_size": group, "x_dtype": dtype, "scales_dtype": scales,
               "out_dtype": dtype if dtype == scales else "float32", "has_bias": bias},
    )  # fmt: skip


def run(kernel: SimtKernel, p: Problem, as_rows: int = 0, **over: Any) -> lab.Result:
    """The kernel on the problem; launched as for `as_rows` rows where that is more than there are."""
    rows, f = len(p.x), p.facts
    launch = kernel.launch(**{**f, "rows": max(as_rows, rows)}, **over)
    contract = {"w": (f["n"], packed_columns(f["k"], f["group_size"])), "scales": (f["n"], f["k"] // f["group_size"])}
    return kernel.lab()(
        inputs=[p.x, p.w, p.scales, p.scales if p.bias is None else p.bias],
        output_shapes=[(rows, f["n"])], output_dtypes=[getattr(lab, f["out_dtype"])], contract=contract,
        **arguments(launch, lab),
    )  # fmt: skip


def excess(p: Problem, y: np.ndarray) -> float:
    """Largest error over the allowed one, inf where y is not a number."""
    return lab_device.excess(y, *p.expected())
