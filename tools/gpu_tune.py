"""Kernel times of the matrix kernel under several geometries, without mlx: the section ``tune`` of gpu_check.py.

    PYTHONPATH=. python tools/gpu_tune.py BITS ROWS N K [NAME=VALUE ...]

launches one variant a few times, for a profiler to look at.

Variants are compiled ahead by nvcc, in parallel, and launched through cupy as CUDA graphs, one launch after the other
over weights that do not fit the second-level cache. A time is that of a graph over its launches, so it holds the
device's own pause between two kernels; an empty kernel's, measured alike, is given beside it.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_run import CYCLE, SHAPES

LAUNCHES = 48
#: Registers, threads and bytes of shared memory of a multiprocessor of compute capability 9.0.
REGISTERS, THREADS, SHARED = 65536, 2048, 227 << 10
#: How weights are loaded: what stands in the CUDA prelude, and others to try.
HINT = "ld.global.nc.L1::no_allocate.L2::128B"


@dataclass(frozen=True)
class Variant:
    bits: int
    rows: int
    k: int
    options: tuple[tuple[str, Any], ...] = ()
    hint: str = HINT
    symmetric: int = 0
    kernel: str = "affine_mma"

    @property
    def label(self) -> str:
        words = [self.kernel.removeprefix("affine_")] + [f"{name} {value}" for name, value in self.options]
        words += ["symmetric"] if self.symmetric else []
        words += [self.hint.removeprefix("ld.global.").replace("::", " ")] if self.hint != HINT else []
        return ", ".join(words)


@dataclass(frozen=True)
class Built:
    cubin: Path
    registers: int
    spilled: int
    shared: int
    threads: int
    #: Bytes of `shared` that a launch must ask for.
    given: int

    @property
    def resident(self) -> int:
        """Threadgroups that a multiprocessor holds."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return min(by_registers, THREADS // self.threads, SHARED // (self.shared + 1024))


#: SIMD groups of a threadgroup, and threadgroups on a multiprocessor, by K.
GEOMETRIES = {
    5120: ((10, 1), (10, 2), (10, 3), (5, 4), (5, 6)),
    17408: ((12, 1), (12, 2), (9, 2), (9, 3), (7, 3), (7, 4), (5, 5)),
}


def variants() -> list[Variant]:
    """Every geometry for 1 to 8 rows; for one of them other loads, and biases unread."""
    found = []
    for bits, rows, (k, geometries) in itertools.product((2, 1), (1, 2, 4, 8), GEOMETRIES.items()):
        for simd_groups, resident in geometries:
            options = (("simd_groups", simd_groups), ("per_multiprocessor", resident))
            found.append(Variant(bits, rows, k, options))
        found.append(Variant(bits, rows, k))
    for bits in (2, 1):
        options = (("simd_groups", 10), ("per_multiprocessor", 2))
        for hint in ("ld.global.nc", "ld.global.nc.L1::no_allocate", "ld.global.nc.L1::no_allocate.L2::256B"):
            found.append(Variant(bits, 1, 5120, options, hint))
        found.append(Variant(bits, 1, 5120, options, HINT, bits))
    for rows, k, (simd_groups, resident) in itertools.product((1, 2, 4, 8), GEOMETRIES, ((16, 1), (8, 2), (12, 1))):
        options = (("simd_groups", simd_groups), ("per_multiprocessor", resident))
        found += [Variant(1, rows, k, options, HINT, symmetric, "affine_bits") for symmetric in (0, 1)]
    return found


def facts(variant: Variant, n: int) -> dict[str, Any]:
    return {"rows": variant.rows, "n": n, "k": variant.k, "bits": variant.bits, "group_size": 128,
            "x_dtype": "float16", "scales_dtype": "float16", "out_dtype": "float16", "symmetric": variant.symmetric,
            "device": "cuda", **dict(variant.options)}  # fmt: skip


def kernel_of(variant: Variant) -> Any:
    from bonsai_qmv.gpu_bits import AFFINE_BITS
    from bonsai_qmv.gpu_kernels import AFFINE_MMA, AFFINE_QMM

    return {kernel.name: kernel for kernel in (AFFINE_MMA, AFFINE_BITS, AFFINE_QMM)}[variant.kernel]


def grid_of(variant: Variant, n: int) -> tuple[int, ...]:
    launch = kernel_of(variant).launch(**facts(variant, n))
    return tuple(g // t for g, t in zip(launch.grid, launch.threadgroup, strict=True))


def text(variant: Variant) -> tuple[str, int, int]:
    """(a CUDA file with one function `tuned`, threads of a threadgroup, bytes of shared memory to ask for)."""
    from backend_core.simt.compiled import bounds

    kernel = kernel_of(variant)
    launch = kernel.launch(**facts(variant, 8192))
    threads, given = launch.threadgroup[0], kernel.bytes_at_launch(launch.template)
    whole = (
        f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{kernel.text('cuda').header}"
        f'extern "C" __global__ void {bounds(launch.template)}tuned(const __half* x, const uint* w, '
        "const __half* scales, const __half* biases, __half* y, int m, int n, int k) {\n"
        "const __half* bias = scales;\nconst int x_ndim = 2;\n"
        "const int x_shape[2] = {m, k}, w_shape[1] = {n};\n"
        f"{kernel.cuda_body(launch.template)}\n}}\n"
    )
    return whole.replace(HINT, variant.hint), threads, given


def build(variant: Variant, folder: Path, name: str) -> Built:
    """Raises RuntimeError with the compiler's message."""
    source, threads, given = text(variant)
    path = folder / f"{name}.cu"
    path.write_text(source)
    cubin = path.with_suffix(".cubin")
    command = ["nvcc", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", str(cubin), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    said = done.stdout + done.stderr
    numbers = [re.search(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill loads", r"(\d+) bytes smem")]
    registers, spilled, shared = (int(m.group(1)) if m else 0 for m in numbers)
    return Built(cubin, registers, spilled, shared + given, threads, given)


class Bench:
    """Weights on the device, and graphs of launches over them."""

    def __init__(self) -> None:
        import cupy

        self.cp = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.sets: dict[tuple[int, int, int], list[Any]] = {}

    def weights(self, bits: int, n: int, k: int) -> list[Any]:
        """[(w, scales, biases)] with biases of -scales, which symmetric variants do not read."""
        cp, key = self.cp, (bits, n, k)
        if key not in self.sets:
            rng = np.random.default_rng(n + k + bits)
            words = cp.asarray(rng.integers(0, 1 << 32, (n, k // 32 * bits), dtype=np.uint32))
            scales = cp.asarray(rng.uniform(0.01, 0.03, (n, k // 128)).astype(np.float16))
            count = max(4, -(-CYCLE // words.nbytes))
            self.sets[key] = [(words ^ np.uint32(i), scales.copy(), scales * np.float16(-1)) for i in range(count)]
        return self.sets[key]

    def function(self, made: Built) -> Any:
        """f(grid, arguments), on the stream that is current."""
        function = self.cp.RawModule(path=str(made.cubin)).get_function("tuned")
        if made.given:
            function.max_dynamic_shared_size_bytes = made.given
        return lambda grid, arguments: function(grid, (made.threads,), arguments, shared_mem=made.given)

    def once(self, function: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self.cp.cuda.Device().synchronize()
        with self.stream:
            function(grid, arguments)
        self.stream.synchronize()

    def graph(self, function: Any, grid: tuple[int, ...], arguments: list[tuple[Any, ...]]) -> Any:
        self.cp.cuda.Device().synchronize()
        with self.stream:
            self.stream.begin_capture()
            for i in range(LAUNCHES):
                function(grid, arguments[i % len(arguments)])
            return self.stream.end_capture()

    def microseconds(self, graph: Any, times: int = 4) -> float:
        """Per launch, of `times` launches of the graph."""
        cuda = self.cp.cuda
        begin, end = cuda.Event(), cuda.Event()
        graph.launch(self.stream)
        begin.record(self.stream)
        for _ in range(times):
            graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) * 1e3 / (times * LAUNCHES)

    def heat(self, graph: Any, seconds: float) -> None:
        """Clocks are low after a pause."""
        until = time.time() + seconds
        while time.time() < until:
            for _ in range(20):
                graph.launch(self.stream)
            self.stream.synchronize()

    def copy(self) -> float:
        """GB/s of a copy of 4 GB within the device, bytes read and bytes written counted."""
        cp, size = self.cp, 1 << 32
        to, source = cp.empty(size, np.uint8), cp.zeros(size, np.uint8)
        best = 0.0
        for _ in range(6):
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(self.stream)
            cp.cuda.runtime.memcpyAsync(to.data.ptr, source.data.ptr, size, 3, self.stream.ptr)
            end.record(self.stream)
            end.synchronize()
            best = max(best, 2 * size / (cp.cuda.get_elapsed_time(begin, end) * 1e6))
        return best


def wrong(bench: Bench, variant: Variant, n: int, x: Any, y: Any) -> float:
    """Largest error of some columns over the bound of `rounding`."""
    from bonsai_qmv import reference

    words, scales, biases = bench.weights(variant.bits, n, variant.k)[0]
    chosen = np.r_[0:40, n - 24 : n]
    s, b = (a[chosen].get().astype(np.float64) for a in (scales, biases))
    if variant.symmetric:
        b = s * (-0.5 * variant.symmetric)
    y64, bound = reference.bound(
        x.get().astype(np.float64), reference.dequantize64(words[chosen].get(), s, b, variant.bits), "float16"
    )
    return float(np.max(np.abs(y.get().astype(np.float64)[:, chosen] - y64) / bound))


def clock() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return f"{pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)} MHz"
    except Exception as error:
        return f"unknown ({error})"


def tune(run: Any, todo: list[Variant] | None = None) -> None:
    """Builds, checks and times; `run` is gpu_check's."""
    todo = todo or variants()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        begin = time.time()
        waiting = [pool.submit(build, v, Path(folder), f"v{i}") for i, v in enumerate(todo)]
        empty_cu = Path(folder) / "empty.cu"
        empty_cu.write_text('extern "C" __global__ void tuned(float* y) {}\n')
        subprocess.run(["nvcc", "-arch=sm_90a", "-cubin", "-o", f"{folder}/empty.cubin", str(empty_cu)], check=True)
        bench = Bench()
        cp = bench.cp
        processors = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        built: list[tuple[Variant, Built]] = []
        for variant, future in zip(todo, waiting, strict=True):
            try:
                built.append((variant, future.result()))
            except RuntimeError as error:
                run.say(f"{variant} does not compile: {error}")
        run.say(f"{len(built)} variants compiled in {time.time() - begin:.0f} s")
        empty = bench.function(Built(Path(folder) / "empty.cubin", 0, 0, 0, 320, 0))
        nothing = bench.graph(empty, (processors,), [(cp.zeros(1, np.float32),)])
        jobs = []
        # Graphs know addresses, not arrays.
        kept = []
        for variant, made in built:
            function = bench.function(made)
            for n in [n for n, k in SHAPES if k == variant.k]:
                x = cp.asarray(np.random.default_rng(1).standard_normal((variant.rows, variant.k)).astype(np.float16))
                y = cp.zeros((variant.rows, n), np.float16)
                sizes = [np.int32(v) for v in (variant.rows, n, variant.k)]
                arguments = [(x, *weights, y, *sizes) for weights in bench.weights(variant.bits, n, variant.k)]
                try:
                    bench.once(function, grid_of(variant, n), arguments[0])
                    error = wrong(bench, variant, n, x, y)
                    graph = bench.graph(function, grid_of(variant, n), arguments)
                except Exception as problem:
                    run.say(f"{variant.label} {n}x{variant.k}: {type(problem).__name__}: {str(problem)[:200]}")
                    continue
                jobs.append((variant, made, n, graph, error, []))
                kept.append(arguments)
        if not jobs:
            return
        bench.heat(jobs[0][3], 0.5)
        pauses = []
        for _ in range(3):
            pauses.append(bench.microseconds(nothing))
            for *_, graph, _, samples in jobs:
                samples.append(bench.microseconds(graph))
        pause, copy = statistics.median(pauses), bench.copy()
        run.say(f"an empty kernel {pause:.2f} us, a copy {copy:.0f} GB/s (read and written), clock {clock()}\n")
        run.keep("tuned", {"empty_us": pause, "copy_gbps": copy})
        report(run, jobs, pause, copy)


def report(run: Any, jobs: list[Any], pause: float, copy: float) -> None:
    """A table for each number of bits, rows and shape, fastest first; times without an empty kernel's."""
    for key, group in itertools.groupby(
        sorted(jobs, key=lambda j: (j[0].rows, -j[0].bits, j[2], j[0].k, min(j[5]))),
        lambda j: (j[0].bits, j[0].rows, j[2], j[0].k),
    ):
        bits, rows, n, k = key
        run.say(f"\n{bits}-bit, {n}x{k}, {rows} rows")
        run.say("| variant | fit | registers (spilled) | us | GB/s | of copy | error |")
        run.say("|---|---|---|---|---|---|---|")
        for place, (variant, made, _, _, error, samples) in enumerate(group):
            us = statistics.median(samples) - pause
            moved = n * k * bits // 8 + n * k // 128 * (2 if variant.symmetric else 4)
            entry = {"bits": bits, "rows": rows, "n": n, "k": k, "variant": variant.label, "us": us,
                     "samples": samples, "registers": made.registers, "spilled": made.spilled,
                     "error": error}  # fmt: skip
            run.keep("tune", entry)
            if place < 12 or not error <= 1.0:
                run.say(
                    f"| {variant.label} | {made.resident} | {made.registers} ({made.spilled}) | {us:.2f} "
                    f"| {moved / us / 1e3:.0f} | {moved / us / 1e3 / copy:.2f} | {error:.2f} |"
                )


def main() -> None:
    bits, rows, n, k = map(int, sys.argv[1:5])
    pairs = [word.split("=") for word in sys.argv[5:]]
    variant = Variant(bits, rows, k, tuple((name, int(value)) for name, value in pairs))
    with tempfile.TemporaryDirectory() as folder:
        made, bench = build(variant, Path(folder), "one"), Bench()
        cp, function = bench.cp, bench.function(made)
        x, y = cp.ones((rows, k), np.float16), cp.zeros((rows, n), np.float16)
        for weights in bench.weights(bits, n, k):
            bench.once(function, grid_of(variant, n), (x, *weights, y, np.int32(rows), np.int32(n), np.int32(k)))


if __name__ == "__main__":
    main()
