"""GPU kernels in the lab: random problems and launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from bonsai_qmv import gpu_kernels, reference

from backend_core.simt import SimtKernel, arguments
from backend_core.testing import lab, lab_device
from backend_core.testing.lab_device import typed, values

KERNELS = {kernel.name: kernel for kernel in gpu_kernels.KERNELS}


@dataclass
class Problem:
    """x (rows, k) and one layer's weights; `symmetric` is the kernels' fact of that name."""

    x: np.ndarray
    w: np.ndarray
    scales: np.ndarray
    biases: np.ndarray
    bias: np.ndarray | None
    facts: dict[str, Any]

    def part(self, rows: slice) -> Problem:
        """The same with some rows of x."""
        return Problem(self.x[rows], self.w, self.scales, self.biases, self.bias, self.facts)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(result in float64, largest error that `rounding` allows)."""
        f = self.facts
        weights = reference.dequantize64(self.w, values(self.scales), values(self.biases), f["bits"])
        bias = None if self.bias is None else values(self.bias)
        return reference.bound(values(self.x), weights, f["out_dtype"], bias)


def problem(bits: int, group: int, dtype: str, n: int, k: int, rows: int = 17, *, scales: str = "",
            symmetric: int = 0, bias: bool = False, seed: int = 0) -> Problem:  # fmt: skip
    """Random codes, normal x; scales of x's dtype unless another is named."""
    rng = np.random.default_rng([seed, bits, group, n, k])
    scales = scales or dtype
    s = typed(rng.uniform(0.01, 0.03, (n, k // group)), scales)
    b = -0.5 * symmetric * values(s) if symmetric else rng.normal(0, 0.02, (n, k // group))
    return Problem(
        x=typed(rng.standard_normal((rows, k)), dtype),
        w=reference.pack(rng.integers(0, 1 << bits, (n, k)), bits),
        scales=s,
        biases=typed(b, scales),
        bias=typed(rng.standard_normal(n), scales) if bias else None,
        facts={"n": n, "k": k, "bits": bits, "group_size": group, "x_dtype": dtype, "scales_dtype": scales,
               "out_dtype": dtype if dtype == scales else "float32", "symmetric": symmetric, "has_bias": bias},
    )  # fmt: skip


def run(kernel: SimtKernel, p: Problem, as_rows: int = 0, **over: Any) -> lab.Result:
    """The kernel on the problem; launched as for `as_rows` rows where that is more than there are."""
    rows, f = len(p.x), p.facts
    launch = kernel.launch(**{**f, "rows": max(as_rows, rows)}, **over)
    groups = (f["n"], f["k"] // f["group_size"])
    contract = {"w": (f["n"], f["k"] // 32 * f["bits"]), "scales": groups, "biases": groups}
    return kernel.lab()(
        inputs=[p.x, p.w, p.scales, p.biases, p.scales if p.bias is None else p.bias],
        output_shapes=[(rows, f["n"])], output_dtypes=[getattr(lab, f["out_dtype"])], contract=contract,
        **arguments(launch, lab),
    )  # fmt: skip


def excess(p: Problem, y: np.ndarray) -> float:
    """Largest error over the allowed one, inf where y is not a number."""
    return lab_device.excess(y, *p.expected())
