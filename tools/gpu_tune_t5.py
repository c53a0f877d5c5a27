"""Times of the t5 matrix kernel under several geometries, next to the 2-bit one, without mlx; as gpu_tune.py does it.

    PYTHONPATH=. python tools/gpu_tune_t5.py

Needs nvcc, ptxas and cupy. Variants are compiled ahead, launched as CUDA graphs over weights that do not fit the
second-level cache, and checked against float64; an empty kernel's time is taken off.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_tune
import numpy as np

#: What t5_mma.metal calls ZEROS, for weights of which a third are zero.
ZEROS = 80


@dataclass(frozen=True)
class Variant:
    rows: int
    k: int
    simd_groups: int = 0
    depth: int = 0

    def facts(self, n: int) -> dict[str, Any]:
        return {"rows": self.rows, "n": n, "k": self.k, "group_size": 128, "x_dtype": "float16", "device": "cuda",
                "scales_dtype": "float16", "out_dtype": "float16", "ratio": 24, "zeros": ZEROS,
                "simd_groups": self.simd_groups, "depth": self.depth}  # fmt: skip


def variants() -> list[Variant]:
    found = [Variant(rows, k) for rows in (1, 2, 4, 8) for k in (5120, 17408)]
    found += [Variant(1, 5120, groups, 2) for groups in (10, 12, 15)]
    return found + [Variant(1, 17408, groups, 2) for groups in (11, 12)] + [Variant(4, 5120, 8, 2)]


def build(variant: Variant, folder: Path, name: str) -> gpu_tune.Built:
    """Raises RuntimeError with the compiler's message."""
    from t5_ternary.gpu_kernels import T5_MMA

    from backend_core.simt.compiled import bounds

    launch = T5_MMA.launch(**variant.facts(8192))
    given = T5_MMA.bytes_at_launch(launch.template)
    path = folder / f"{name}.cu"
    path.write_text(
        f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{T5_MMA.text('cuda').header}"
        f'extern "C" __global__ void {bounds(launch.template)}tuned(const __half* x, const uchar* w, '
        "const __half* scales, __half* y, int m, int n, int k) {\n"
        "const __half* bias = scales;\nconst int x_ndim = 2;\n"
        "const int x_shape[2] = {m, k}, scales_shape[1] = {n};\n"
        f"{T5_MMA.cuda_body(launch.template)}\n}}\n"
    )
    command = ["nvcc", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", str(path.with_suffix(".cubin")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    numbers = [re.search(p, done.stderr + done.stdout) for p in (r"Used (\d+) registers", r"(\d+) bytes spill loads")]
    registers, spilled = (int(m.group(1)) if m else 0 for m in numbers)
    return gpu_tune.Built(path.with_suffix(".cubin"), registers, spilled, given, launch.threadgroup[0], given)


class Weights:
    """[(w, scales)] by shape, enough to leave the second-level cache behind."""

    def __init__(self, cp: Any) -> None:
        self.cp, self.sets = cp, {}

    def of(self, n: int, k: int) -> list[Any]:
        if (n, k) not in self.sets:
            from t5_ternary import reference

            rng = np.random.default_rng(n + k)
            trits = rng.integers(0, 3, (n, k), dtype=np.uint8)
            if (most := int((trits.reshape(n, -1, 128) == 1).sum(axis=2).max())) > ZEROS:
                raise ValueError(f"{most} weights of a group are zero, more than the {ZEROS} that kernels are told")
            w = self.cp.asarray(reference.pack(trits, 128))
            scales = self.cp.asarray(rng.uniform(0.02, 0.03, (n, k // 128)).astype(np.float16))
            count = max(4, -(-gpu_tune.CYCLE // w.nbytes))
            self.sets[n, k] = [(self.cp.roll(w, i, 0), scales.copy()) for i in range(count)]
        return self.sets[n, k]


def wrong(w: Any, scales: Any, x: Any, y: Any) -> float:
    """Largest error of some columns over the bound of `rounding`."""
    from t5_ternary import reference

    chosen = np.r_[0:40, len(w) - 24 : len(w)]
    weights = reference.dequantize64(w.get()[chosen], scales.get()[chosen].astype(np.float64), 128)
    y64, bound = reference.bound(x.get().astype(np.float64), weights, "float16")
    return float(np.max(np.abs(y.get().astype(np.float64)[:, chosen] - y64) / bound))


def main() -> None:
    from t5_ternary.gpu_kernels import T5_MMA

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        todo = variants()
        two = [gpu_tune.Variant(2, rows, k, symmetric=2) for rows in (1, 4, 8) for k in (5120, 17408)]
        ours = [pool.submit(build, v, Path(folder), f"t{i}") for i, v in enumerate(todo)]
        theirs = [pool.submit(gpu_tune.build, v, Path(folder), f"m{i}") for i, v in enumerate(two)]
        bench = gpu_tune.Bench()
        cp, weights, jobs, kept = bench.cp, Weights(bench.cp), [], []
        for variant, made in zip([*todo, *two], [f.result() for f in [*ours, *theirs]], strict=True):
            function, is_t5 = bench.function(made), isinstance(variant, Variant)
            for n in [n for n, k in gpu_tune.SHAPES if k == variant.k]:
                x = cp.asarray(np.random.default_rng(1).standard_normal((variant.rows, variant.k)).astype(np.float16))
                y = cp.zeros((variant.rows, n), np.float16)
                sets = weights.of(n, variant.k) if is_t5 else bench.weights(2, n, variant.k)
                sizes = [np.int32(v) for v in (variant.rows, n, variant.k)]
                arguments = [(x, *s, y, *sizes) for s in sets]
                if is_t5:
                    launch = T5_MMA.launch(**variant.facts(n))
                    grid = tuple(g // t for g, t in zip(launch.grid, launch.threadgroup, strict=True))
                else:
                    grid = gpu_tune.grid_of(variant, n)
                bench.once(function, grid, arguments[0])
                error = wrong(*sets[0], x, y) if is_t5 else gpu_tune.wrong(bench, variant, n, x, y)
                kept.append(arguments)  # graphs know addresses, not arrays
                jobs.append((variant, n, made, error, bench.graph(function, grid, arguments), []))
        empty_cu = Path(folder) / "empty.cu"
        empty_cu.write_text('extern "C" __global__ void tuned(float* y) {}\n')
        subprocess.run(["nvcc", "-arch=sm_90a", "-cubin", "-o", f"{folder}/empty.cubin", str(empty_cu)], check=True)
        empty = bench.function(gpu_tune.Built(Path(folder) / "empty.cubin", 0, 0, 0, 320, 0))
        nothing = bench.graph(empty, (132,), [(cp.zeros(1, np.float32),)])
        bench.heat(jobs[0][4], 0.5)
        pause = statistics.median(bench.microseconds(nothing) for _ in range(3))
        for _ in range(3):
            for *_, graph, samples in jobs:
                samples.append(bench.microseconds(graph))
        print("| rows | shape | kernel | registers (spilled) | us | error |\n|---|---|---|---|---|---|")
        for variant, n, made, error, _, samples in sorted(jobs, key=lambda j: (j[0].rows, j[1], j[0].k, min(j[5]))):
            what = "2-bit symmetric"
            if isinstance(variant, Variant):
                what = f"t5, {variant.simd_groups} SIMD groups" if variant.simd_groups else "t5 as offered"
            print(f"| {variant.rows} | {n}x{variant.k} | {what} | {made.registers} ({made.spilled}) "
                  f"| {statistics.median(samples) - pause:.2f} | {error:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
