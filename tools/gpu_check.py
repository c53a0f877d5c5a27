"""Checks and times the CUDA kernels on a GPU host, from a source tree.

    PYTHONPATH=. python tools/gpu_check.py --out DIR check tune decode

Sections, each within five minutes (``--seconds`` ends one early, and says so):

    check     every format, dtype, number of rows and edge against float64; bits of a row alone and among others
    launch    an empty kernel, what a call takes on the host, and the bandwidth of a copy
    tune      kernel time of the matrix kernel under several geometries (gpu_tune.py; needs nvcc and cupy)
    decode    1, 2 and 4 rows next to stock mlx: time per call, and time of the kernel alone. What stock compiles is
              compiled in processes of its own from the beginning; put this section behind others
    prefill   512 rows next to stock

Weights are cycled through more than the second-level cache. Kernel times come from CUPTI through torch's profiler where
torch is installed; without it they are left out. Results go to DIR/gpu_check.json, and tables to DIR/gpu_check.md.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import gpu_run
import numpy as np
from gpu_run import (
    CYCLE,
    SHAPES,
    Case,
    Problem,
    Run,
    as_float64,
    call_layer,
    caller,
    floats,
    heat,
    in_turns,
    kernel_time,
    layers,
    per_call,
)
from gpu_tune import tune

SECTIONS = ("check", "launch", "tune", "decode", "prefill")


def make(rng: Any, n: int, k: int, bits: int, group: int, dtype: str, symmetric: int) -> list[Any]:
    """[w, scales, biases] with random codes."""
    import mlx.core as mx

    w = mx.array(rng.integers(0, 1 << 32, (n, k // 32 * bits), dtype=np.uint32))
    scales = floats(rng.uniform(0.01, 0.03, (n, k // group)), dtype)
    biases = scales * (-0.5 * symmetric) if symmetric else floats(rng.normal(0, 0.02, (n, k // group)), dtype)
    return [w, scales, biases.astype(scales.dtype)]


def facts_of(rows: int, n: int, k: int, bits: int, group: int, x: str, s: str, symmetric: int = 0) -> dict[str, Any]:
    out = x if x == s else "float32"
    return {"rows": rows, "n": n, "k": k, "bits": bits, "group_size": group, "x_dtype": x, "scales_dtype": s,
            "out_dtype": out, "symmetric": symmetric, "device": "cuda"}  # fmt: skip


def formats() -> list[tuple[Any, ...]]:
    """(kernel, bits, group, x dtype, scales dtype, n, k, symmetric)."""
    from bonsai_qmv import gpu_kernels as g

    found: list[tuple[Any, ...]] = []
    for bits, group, dtype in itertools.product((1, 2, 4, 8), (32, 64, 128), ("float16", "bfloat16")):
        if not g.AFFINE_MMA.eligible(bits=bits, group_size=group, x_dtype=dtype, scales_dtype=dtype, k=group):
            found.append(("affine_mma", bits, group, dtype, dtype, 200, group * 9, 0))
    for bits, dtype in itertools.product((1, 2), ("float16", "bfloat16")):
        found.append(("affine_mma", bits, 128, dtype, dtype, 7, 128, 0))
        found.append(("affine_mma", bits, 128, dtype, dtype, 24, 2176, 1 if bits == 1 else 2))
        found.append(("affine_mma", bits, 128, dtype, "float32", 72, 640, 0))
    for dtype, scales, symmetric in itertools.product(("float16", "bfloat16"), ("float16", "float32"), (0, 1)):
        if scales != "float16" or dtype == "float16":
            found.append(("affine_bits", 1, 128, dtype, scales, 200, 128 * 11, symmetric))
    found.append(("affine_bits", 1, 128, "bfloat16", "bfloat16", 7, 4096, 2))
    found += [("affine_bits", 1, 128, "float16", "float16", n, k, 1) for n, k in SHAPES]
    for n, k in SHAPES:
        found.append(("affine_mma", 2, 128, "float16", "float16", n, k, 2))
        found.append(("affine_mma", 1, 128, "float16", "float16", n, k, 0))
    for bits, group in itertools.product((1, 2, 4), (32, 64, 128)):
        found.append(("affine_qmv", bits, group, "float32", "float32", 72, group * 9, 0))
    for bits in (1, 2, 3, 5, 6, 8):
        found.append(("affine_qmv", bits, 64, "float16", "float16", 23, 576, 0))
    found += [("affine_qmv", 2, 128, "bfloat16", "bfloat16", 7, 128, 0), ("affine_qmv", 2, 128, "float32", "float16",
               24, 1152, 2), ("affine_qmv", 1, 128, "float32", "float32", 17408, 5120, 1)]  # fmt: skip
    for bits, group, dtype, symmetric in (
        (2, 128, "float16", 2),
        (2, 128, "float16", 0),
        (1, 128, "float16", 1),
        (2, 64, "bfloat16", 2),
        (1, 32, "bfloat16", 0),
        (4, 64, "float16", 0),
    ):
        found.append(("affine_qmm", bits, group, dtype, dtype, 200, 1152, symmetric))
    for group, dtype in itertools.product((64, 128), ("float16", "bfloat16")):
        found.append(("affine_qmm", 2, group, dtype, dtype, 7, group, 0))
    found.append(("affine_qmm", 2, 128, "float16", "float16", 5120, 17408, 2))
    return found


#: Rows that each kernel is checked with.
ROWS = {"affine_qmm": (17, 64, 300), "affine_qmv": (1, 3, 5, 16)}
FEW = (1, 2, 5, 8, 9, 16)


def cases() -> Iterator[Case]:
    from bonsai_qmv import gpu_kernels as g

    kernels = {kernel.name: kernel for kernel in g.KERNELS}
    for form in formats():
        name, bits, group, dtype, scales, n, k, symmetric = form
        label = f"{name} {bits}-bit g{group} {dtype}/{scales} {n}x{k} sym {symmetric}"
        rows = ROWS.get(name, FEW)
        yield Case(label, kernels[name], rows, functools.partial(problem, form, rows[-1]))


def problem(form: tuple[Any, ...], rows: int) -> Problem:
    """The same for the same format."""
    from bonsai_qmv import reference

    _, bits, group, dtype, scales_dtype, n, k, symmetric = form
    rng = np.random.default_rng([bits, group, n, k])
    w, scales, biases = make(rng, n, k, bits, group, scales_dtype, symmetric)
    chosen = np.arange(n) if n <= 2048 else np.unique(np.r_[np.arange(n - 64, n), rng.integers(0, n, 1000)])
    facts = facts_of(rows, n, k, bits, group, dtype, scales_dtype, symmetric)

    def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s, b = as_float64(scales)[chosen], as_float64(biases)[chosen]
        return reference.bound(x, reference.dequantize64(np.array(w)[chosen], s, b, bits), facts["out_dtype"])

    return Problem(facts, floats(rng.standard_normal((rows, k)), dtype), [w, scales, biases], expected, chosen)


# Times


def weight_sets(n: int, k: int, bits: int, rows: int, symmetric: int, dtype: str = "float16") -> list[list[Any]]:
    """Enough [x, w, scales, biases] to leave the second-level cache behind."""
    import mlx.core as mx

    rng = np.random.default_rng(5)
    count = max(4, -(-CYCLE // (n * k * bits // 8)))
    first = make(rng, n, k, bits, 128, dtype, symmetric)
    x = floats(rng.standard_normal((rows, k)), dtype)
    sets = [[x, first[0] ^ mx.array(i, mx.uint32), first[1] + 0, first[2] + 0] for i in range(count)]
    mx.eval(sets)
    return sets


def bytes_of(n: int, k: int, bits: int, symmetric: int, itemsize: int = 2) -> int:
    return n * k * bits // 8 + n * (k // 128) * itemsize * (1 if symmetric else 2)


def launch(run: Run) -> None:
    """What a call takes on the host: kernels on 64 columns and 512 features, whose device time is next to nothing."""
    import mlx.core as mx
    from bonsai_qmv import gpu_kernels as g
    from bonsai_qmv import gpu_offers as offers

    from backend_core.simt import arguments

    source = "if (threadIdx.x == 0) y[0] = x[0];"
    empty = mx.fast.cuda_kernel(name="empty", input_names=["x"], output_names=["y"], source=source)
    keywords: dict[str, Any] = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    keywords.update(grid=(32, 1, 1), threadgroup=(32, 1, 1))
    sets = weight_sets(64, 512, 2, 1, 0)
    facts = facts_of(1, 64, 512, 2, 128, "float16", "float16")
    started = g.AFFINE_MMA.launch(**facts)
    whole, template, shapes = g.AFFINE_MMA.cuda(), arguments(started, mx), [(1, 64)]

    layer = layers(sets[:1], offers, offers.FAMILIES[0], facts)[0][1]

    def by_template(x: Any, w: Any, scales: Any, biases: Any) -> Any:
        inputs = [x, w, scales, biases, scales]
        return whole(inputs=inputs, output_shapes=shapes, output_dtypes=[mx.float16], **template)[0]

    calls = {
        "an empty kernel": lambda x, w, scales, biases: empty(inputs=[scales], **keywords)[0],
        "ours, whole text": by_template,
        "ours, bound": caller(g.AFFINE_MMA, facts),
        "ours, a layer": lambda x, w, scales, biases: layer(x),
        "an addition": lambda x, w, scales, biases: scales + biases,
    }
    for call in calls.values():
        per_call(call, sets, 20)
    heat()
    run.say("| us per call | made | made and evaluated, 100 at once | 400 at once |\n|---|---|---|---|")
    for name, call in calls.items():
        made = []
        for _ in range(5):
            begin = time.perf_counter()
            held = [call(*sets[i % len(sets)]) for i in range(100)]
            made.append((time.perf_counter() - begin) / 100 * 1e6)
            mx.eval(held)
        few, many = ([per_call(call, sets, n) for _ in range(5)] for n in (100, 400))
        entry = {"call": name, "made": made, "of_100": few, "of_400": many}
        run.keep("launch", entry)
        run.say(f"| {name} | {' | '.join(f'{statistics.median(v):.1f}' for v in (made, few, many))} |")
    big = mx.zeros((1 << 30,), mx.float32) + 1
    mx.eval(big)
    copies = []
    for _ in range(6):
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval(mx.negative(big))
        mx.synchronize()
        copies.append(time.perf_counter() - begin)
    copy = 2 * big.nbytes / min(copies) / 1e9
    run.keep("launch", {"copy_gbps": copy})
    run.say(f"\nmx.negative of 4 GB: {copy:.0f} GB/s, bytes read and bytes written counted, allocation included")


def quantized(x: Any, w: Any, scales: Any, biases: Any) -> Any:
    """Stock's 2-bit product."""
    import mlx.core as mx

    return mx.quantized_matmul(x, w, scales, biases, True, 128, 2)


def start_stock(todo: list[tuple[int, int, int]]) -> list[subprocess.Popen[str]]:
    """Processes in which stock compiles, for minutes, what it needs for these (rows, n, k), and keeps it on disk."""
    found = []
    for m, n, k in sorted(set(todo), reverse=True):
        command = [sys.executable, __file__, "--stock", f"{m},{n},{k}"]
        found.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return found


def compile_stock(rows: int, n: int, k: int) -> None:
    import mlx.core as mx

    w, scales = mx.zeros((n, k // 16), mx.uint32), mx.ones((n, k // 128), mx.float16)
    mx.eval(quantized(mx.ones((rows, k), mx.float16), w, scales, scales))


def decode(run: Run, rows: tuple[int, ...], stock: Stock) -> None:
    """Ours, as layers that a plugin built, and stock in turns; ours symmetric and 1-bit too."""
    from bonsai_qmv import gpu_offers as offers

    mma, bits = offers.FAMILIES[0], offers.BITS

    stock.wait(run)
    run.say("us per call, 400 calls in one evaluation; kernels alone by CUPTI. s: symmetric\n")
    run.say("| shape | rows | 2-bit | 2-bit s | 1-bit | 1-bit s | stock 2-bit | stock / ours | stock / s "
            "| kernels: 2-bit | 2-bit s | 1-bit | 1-bit s | 1 / 2 | 1 s / 2 s | 2-bit GB/s |")  # fmt: skip
    run.say("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    awake = False
    for m, (n, k) in itertools.product(rows, SHAPES):
        if run.late():
            return
        sets, ones = weight_sets(n, k, 2, m, 0), weight_sets(n, k, 1, m, 0)
        calls = {
            "ours": (call_layer, layers(sets, offers, mma, facts_of(m, n, k, 2, 128, "float16", "float16"))),
            "sym": (call_layer, layers(sets, offers, mma, facts_of(m, n, k, 2, 128, "float16", "float16", 2))),
            "1-bit": (call_layer, layers(ones, offers, bits, facts_of(m, n, k, 1, 128, "float16", "float16"))),
            "1-bit sym": (call_layer, layers(ones, offers, bits, facts_of(m, n, k, 1, 128, "float16", "float16", 1))),
        }
        if stock.ready:
            calls["stock"] = (quantized, sets)
        begin = time.time()
        for call, arrays in calls.values():
            per_call(call, arrays, 4)
        warm = time.time() - begin
        heat(0.2)
        if not awake:
            # The first seconds of a process are slower, on the host too.
            in_turns(calls, 400)
            awake = True
        samples = in_turns(calls, 400)
        us = gpu_run.medians(samples)
        alone = {name: kernel_time(*calls[name], 48) for name in ("ours", "sym", "1-bit", "1-bit sym")}
        entry = {"n": n, "k": k, "rows": m, "us": us, "samples": samples, "kernel_us": alone, "warm_s": warm}
        run.keep("decode", entry)
        theirs = us.get("stock", float("nan"))
        cells = [f"{us.get(c, float('nan')):.1f}" for c in ("ours", "sym", "1-bit", "1-bit sym", "stock")]
        cells += [f"{theirs / us['ours']:.2f}", f"{theirs / us['sym']:.2f}"] + [f"{t:.1f}" for t in alone.values()]
        cells += [f"{alone['1-bit'] / alone['ours']:.2f}", f"{alone['1-bit sym'] / alone['sym']:.2f}"]
        run.say(f"| {n}x{k} | {m} | {' | '.join(cells)} | {bytes_of(n, k, 2, 0) / alone['ours'] / 1e3:.0f} |")


def prefill(run: Run, rows: int, stock: Stock) -> None:
    """Ours and stock in turns; ours symmetric, whose weights are values of float16, and 1-bit too."""
    from bonsai_qmv import gpu_kernels as g

    stock.wait(run)
    run.say("us per call, 20 calls in one evaluation\n")
    run.say("| shape | rows | 2-bit | 2-bit symmetric | 1-bit symmetric | stock 2-bit | stock / 2-bit | stock / sym. "
            "| sym. TFLOP/s |")  # fmt: skip
    run.say("|---|---|---|---|---|---|---|---|---|")
    for n, k in SHAPES:
        if run.late():
            return
        sets, ones = weight_sets(n, k, 2, rows, 2)[:8], weight_sets(n, k, 1, rows, 1)[:8]
        calls = {
            "ours": (caller(g.AFFINE_QMM, facts_of(rows, n, k, 2, 128, "float16", "float16")), sets),
            "sym": (caller(g.AFFINE_QMM, facts_of(rows, n, k, 2, 128, "float16", "float16", 2)), sets),
            "1-bit": (caller(g.AFFINE_QMM, facts_of(rows, n, k, 1, 128, "float16", "float16", 1)), ones),
        }
        if stock.ready:
            calls["stock"] = (quantized, sets)
        for call, arrays in calls.values():
            per_call(call, arrays, 4)
        heat(0.2)
        samples = in_turns(calls, 20)
        us = gpu_run.medians(samples)
        run.keep("prefill", {"n": n, "k": k, "rows": rows, "us": us, "samples": samples})
        cells = [f"{us.get(c, float('nan')):.0f}" for c in ("ours", "sym", "1-bit", "stock")]
        theirs = us.get("stock", float("nan"))
        run.say(
            f"| {n}x{k} | {rows} | {' | '.join(cells)} | {theirs / us['ours']:.2f} | {theirs / us['sym']:.2f} "
            f"| {2e-6 * rows * n * k / us['sym']:.0f} |"
        )


class Stock:
    """mlx's own product in the tables: whether it is, and the processes in which it compiles."""

    def __init__(self, waiting: list[subprocess.Popen[str]]) -> None:
        self.waiting, self.ready = waiting, bool(waiting)

    def wait(self, run: Run) -> None:
        """Until it has compiled, or a third of the section's time is over."""
        if not self.waiting:
            return
        begin = time.time()
        until = begin + run.seconds / 3
        for process in self.waiting:
            try:
                text, _ = process.communicate(timeout=max(until - time.time(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                run.say("stock was still compiling when its time was over: left out")
                self.ready = False
                continue
            if process.returncode:
                run.say(f"stock: {text[-500:]}")
        self.waiting.clear()
        run.say(f"(waited {time.time() - begin:.0f} s for stock to compile)\n")


def main() -> int:
    parser = gpu_run.parser_of(__doc__ or "", SECTIONS, 290, "a section")
    parser.add_argument("--rows", default="1,2,4", help="rows of the section decode")
    parser.add_argument("--no-stock", action="store_true",
                        help="leave out stock, whose first calls compile for minutes")  # fmt: skip
    parser.add_argument("--stock", help=gpu_run.argparse.SUPPRESS)
    options = gpu_run.parsed(parser, SECTIONS)
    if options.stock:
        compile_stock(*map(int, options.stock.split(",")))
        return 0
    run = gpu_run.start("gpu_check", options)
    rows = tuple(int(m) for m in options.rows.split(","))
    timed = (*(rows if "decode" in options.sections else ()), *((512,) if "prefill" in options.sections else ()))
    stock = Stock([] if options.no_stock else start_stock([(m, n, k) for m in timed for n, k in SHAPES]))
    steps = {"check": lambda: gpu_run.check(run, cases()), "launch": lambda: launch(run), "tune": lambda: tune(run),
             "decode": lambda: decode(run, rows, stock), "prefill": lambda: prefill(run, 512, stock)}  # fmt: skip
    gpu_run.run_sections(run, steps, options.sections, each=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
