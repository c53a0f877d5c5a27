"""GPU kernels in the lab: random problems, launches, and the kernels in place of a GPU's for whole layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bonsai_qmv import gpu_kernels, reference

from backend_core.simt import Launch, SimtKernel, arguments
from backend_core.testing import lab

KERNELS = {kernel.name: kernel for kernel in gpu_kernels.KERNELS}


def typed(a: np.ndarray, dtype: str) -> np.ndarray:
    """Float values as the lab's array of `dtype`."""
    return lab.to_bfloat16(a) if dtype == "bfloat16" else a.astype(dtype)


def values(a: np.ndarray) -> np.ndarray:
    """The lab's array as float64."""
    return np.asarray(lab.to_float32(a), np.float64)


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
    want, allowed = p.expected()
    ratio = np.abs(values(y) - want) / allowed
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


class LabDevice:
    """What stands for a GPU: kernels take and give mlx arrays, and run in the lab with all checks.

    header
        Text that is put before every kernel's functions.
    calls
        Facts of every call: kernel, rows of the launch, the template's SYMMETRIC.
    failed
        How many calls raised.
    """

    name = "metal"
    header = ""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.failed = 0

    def bind(self, kernel: SimtKernel, launch: Launch, fixed: Any = ()) -> Any:
        """In place of ``kernel.bind(device, launch, fixed)``."""
        import mlx.core as mx

        made = kernel.lab()
        if self.header:
            made = replace(made, header=made.header + self.header)

        def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any) -> list[mx.array]:
            self.calls.append({"kernel": kernel.name, "rows": rows_of(launch), "symmetric": launch.value("SYMMETRIC")})
            try:
                result = made(
                    inputs=[from_mlx(a) for a in (*inputs, *fixed)], output_shapes=output_shapes,
                    output_dtypes=[dtype_of(d) for d in output_dtypes], **arguments(launch, lab),
                )  # fmt: skip
                # A launch on CUDA may ask for more than Metal has.
                result.check(("threadgroup-memory",) if self.name == "cuda" else ())
            except Exception:
                self.failed += 1
                raise
            outputs = zip(result.outputs, output_dtypes, strict=True)
            return [mx.array(np.asarray(lab.to_float32(y))).astype(d) for y, d in outputs]

        return call


def rows_of(launch: Launch) -> int:
    """Rows that a launch makes."""
    template = dict(launch.template)
    if "ROWS" in template:
        return int(template["ROWS"]) * launch.grid[1]
    if "TILE_ROWS" in template:
        return int(template["TILE_ROWS"]) * launch.grid[0] // launch.threadgroup[0]
    return 64 * int(template["WARPS_M"]) * launch.grid[0] // launch.threadgroup[0]


def dtype_of(dtype: Any) -> Any:
    """The lab's dtype of an mlx dtype."""
    return getattr(lab, str(dtype).rpartition(".")[2])


def from_mlx(a: Any) -> np.ndarray:
    """The lab's array of an mlx array."""
    import mlx.core as mx

    return lab.to_bfloat16(np.array(a.astype(mx.float32))) if a.dtype == mx.bfloat16 else np.array(a)
