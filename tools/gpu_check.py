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

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/bonsai_qmv/src"), str(ROOT / "tools")]

from gpu_tune import CYCLE, SHAPES, tune  # noqa: E402

SECTIONS = ("check", "launch", "tune", "decode", "prefill")


class Run:
    """What was found so far, written after every step, and when to stop."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.seconds = out, seconds
        self.results: dict[str, Any] = {}
        self.tables: list[str] = []
        self.end = 0.0
        self.stock_ready = True

    def begin(self, section: str) -> None:
        self.end = time.time() + self.seconds
        self.say(f"\n## {section}\n")

    def late(self) -> bool:
        if time.time() > self.end:
            self.say("(stopped: out of time)")
        return time.time() > self.end

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.tables.append(line)
        (self.out / "gpu_check.md").write_text("\n".join(self.tables) + "\n")

    def keep(self, section: str, entry: dict[str, Any]) -> None:
        self.results.setdefault(section, []).append(entry)
        (self.out / "gpu_check.json").write_text(json.dumps(self.results, indent=1))


# Inputs and calls


def floats(a: np.ndarray, dtype: str) -> Any:
    import mlx.core as mx

    return mx.array(a.astype(np.float32)).astype(getattr(mx, dtype))


def as_float64(a: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(a.astype(mx.float32)).astype(np.float64)


def make(rng: Any, n: int, k: int, bits: int, group: int, dtype: str, symmetric: int) -> list[Any]:
    """[w, scales, biases] with random codes."""
    import mlx.core as mx

    w = mx.array(rng.integers(0, 1 << 32, (n, k // 32 * bits), dtype=np.uint32))
    scales = floats(rng.uniform(0.01, 0.03, (n, k // group)), dtype)
    biases = scales * (-0.5 * symmetric) if symmetric else floats(rng.normal(0, 0.02, (n, k // group)), dtype)
    return [w, scales, biases.astype(scales.dtype)]


def caller(kernel: Any, facts: dict[str, Any], **over: Any) -> Any:
    """f(x, w, scales, biases) -> y for the kernel under this geometry."""
    import mlx.core as mx

    call = kernel.bind("cuda", kernel.launch(**facts, **over))
    dtype = [getattr(mx, facts["out_dtype"])]

    def f(x: Any, w: Any, scales: Any, biases: Any) -> Any:
        shape = [(*x.shape[:-1], facts["n"])]
        return call(inputs=[x, w, scales, biases, scales], output_shapes=shape, output_dtypes=dtype)[0]

    return f


def facts_of(rows: int, n: int, k: int, bits: int, group: int, x: str, s: str, symmetric: int = 0) -> dict[str, Any]:
    out = x if x == s else "float32"
    return {"rows": rows, "n": n, "k": k, "bits": bits, "group_size": group, "x_dtype": x, "scales_dtype": s,
            "out_dtype": out, "symmetric": symmetric, "device": "cuda"}  # fmt: skip


# check


def cases() -> list[tuple[Any, ...]]:
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
    found.append(("affine_qmm", 2, 128, "float16", "float16", 5120, 17408, 2))
    return found


def check_case(case: tuple[Any, ...]) -> dict[str, Any]:
    """One format: rows 1..16 against float64, and every row against itself alone."""
    import mlx.core as mx
    from bonsai_qmv import gpu_kernels as g
    from bonsai_qmv import reference

    name, bits, group, dtype, scales_dtype, n, k, symmetric = case
    kernel = {kernel.name: kernel for kernel in g.KERNELS}[name]
    rng = np.random.default_rng(abs(hash(case[1:3])) % 1000 + n + k)
    w, scales, biases = make(rng, n, k, bits, group, scales_dtype, symmetric)
    facts = facts_of(1, n, k, bits, group, dtype, scales_dtype, symmetric)
    many = name == "affine_qmm"
    x = floats(rng.standard_normal((300 if many else 16, k)), dtype)
    rows = (17, 64, 300) if many else (1, 3, 5, 16) if name == "affine_qmv" else (1, 2, 5, 8, 9, 16)
    begin = time.time()
    results = {m: caller(kernel, {**facts, "rows": m})(x[:m], w, scales, biases) for m in rows}
    single = caller(kernel, facts)
    alone = [single(x[i : i + 1], w, scales, biases) for i in range(16)]
    # A view that begins between multiples of 16 bytes.
    shifted = mx.concatenate([x[:1].reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape)
    odd = caller(kernel, {**facts, "rows": 2})(shifted[:2], w, scales, biases)
    mx.eval(results, alone, odd)
    seconds = time.time() - begin
    chosen = np.arange(n) if n <= 2048 else np.unique(np.r_[np.arange(n - 64, n), rng.integers(0, n, 1000)])
    weights = reference.dequantize64(np.array(w)[chosen], as_float64(scales)[chosen], as_float64(biases)[chosen], bits)
    y64, bound = reference.bound(as_float64(x), weights, facts["out_dtype"])
    worst, unequal = 0.0, []
    for m, y in results.items():
        excess = np.abs(as_float64(y)[:, chosen] - y64[:m]) / bound[:m]
        worst = max(worst, float(np.where(np.isnan(excess), np.inf, excess).max()))
        if many:
            unequal += [] if bool(mx.array_equal(y, results[300][:m])) else [f"{m} rows"]
        else:
            unequal += [f"{m} rows, row {i}" for i in range(m) if not bool(mx.array_equal(y[i], alone[i][0]))]
    if not bool(mx.array_equal(odd, results[rows[-1]][:2])):
        unequal.append("an unaligned x")
    label = f"{name} {bits}-bit g{group} {dtype}/{scales_dtype} {n}x{k} sym {symmetric}"
    return {"case": label, "worst": worst, "unequal": unequal[:4], "seconds": round(seconds, 2)}


def check(run: Run, jobs: int) -> None:
    """Cases in several processes, since most of the time goes into compiling."""
    todo = cases()
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for j in range(jobs):
            out = Path(folder) / f"{j}.json"
            command = [sys.executable, __file__, "--worker", f"{j}/{jobs}", "--out", str(out)]
            pipe = subprocess.PIPE
            workers.append((out, subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)))
        done, bad = 0, 0
        for out, process in workers:
            try:
                text, _ = process.communicate(timeout=max(run.end - time.time(), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
            for entry in json.loads(out.read_text()) if out.is_file() else []:
                run.keep("check", entry)
                wrong = "error" in entry or not entry["worst"] <= 1.0 or entry["unequal"]
                done, bad = done + 1, bad + bool(wrong)
                if wrong:
                    run.say(f"WRONG {entry}")
            if process.returncode:
                run.say(f"worker ended with {process.returncode}: {text[-1500:]}")
    entries = [e for e in run.results.get("check", []) if "worst" in e]
    worst = max((e["worst"] for e in entries), default=float("nan"))
    run.say(f"{done} of {len(todo)} cases, {bad} wrong; largest error {worst:.3f} of the bound")


def worker(part: str, out: Path) -> None:
    j, jobs = map(int, part.split("/"))
    entries = []
    for case in cases()[j::jobs]:
        try:
            entries.append(check_case(case))
        except Exception as error:
            entries.append({"case": str(case), "error": f"{type(error).__name__}: {error}"[:2000]})
        out.write_text(json.dumps(entries))


# Times


def per_call(call: Any, sets: list[list[Any]], calls: int) -> float:
    """Microseconds per call of `calls` calls in one evaluation, over the sets in turn."""
    import mlx.core as mx

    mx.synchronize()
    begin = time.perf_counter()
    mx.eval([call(*sets[i % len(sets)]) for i in range(calls)])
    mx.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def kernel_times(call: Any, sets: list[list[Any]], calls: int) -> dict[str, list[float]]:
    """Microseconds of each kernel by name, from CUPTI; empty without torch."""
    import mlx.core as mx

    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return {}
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            mx.eval([call(*sets[i % len(sets)]) for i in range(calls)])
            mx.synchronize()
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        p.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: dict[str, list[float]] = {}
    for e in events:
        if e.get("cat") == "kernel":
            found.setdefault(e["name"], []).append(float(e["dur"]))
    return found


def kernel_time(call: Any, sets: list[list[Any]], calls: int) -> float:
    """Median microseconds of all kernels of one call together, NaN if unknown."""
    total = 0.0
    for times in kernel_times(call, sets, calls).values():
        if len(times) >= calls // 2:
            total += statistics.median(times) * round(len(times) / calls)
    return total or float("nan")


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


def heat(seconds: float = 0.4) -> None:
    """Clocks are low after a pause."""
    import mlx.core as mx

    a = mx.ones((4096, 4096), mx.float16)
    until = time.time() + seconds
    while time.time() < until:
        mx.eval([a @ a for _ in range(20)])


def launch(run: Run) -> None:
    """What a call takes on the host: kernels on 64 columns and 512 features, whose device time is next to nothing."""
    import mlx.core as mx
    from bonsai_qmv import gpu_kernels as g

    from backend_core.simt import arguments

    source = "if (threadIdx.x == 0) y[0] = x[0];"
    empty = mx.fast.cuda_kernel(name="empty", input_names=["x"], output_names=["y"], source=source)
    keywords: dict[str, Any] = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    keywords.update(grid=(32, 1, 1), threadgroup=(32, 1, 1))
    sets = weight_sets(64, 512, 2, 1, 0)
    facts = facts_of(1, 64, 512, 2, 128, "float16", "float16")
    started = g.AFFINE_MMA.launch(**facts)
    whole, template, shapes = g.AFFINE_MMA.cuda(), arguments(started, mx), [(1, 64)]

    def by_template(x: Any, w: Any, scales: Any, biases: Any) -> Any:
        inputs = [x, w, scales, biases, scales]
        return whole(inputs=inputs, output_shapes=shapes, output_dtypes=[mx.float16], **template)[0]

    calls = {
        "an empty kernel": lambda x, w, scales, biases: empty(inputs=[scales], **keywords)[0],
        "ours, whole text": by_template,
        "ours, bound": caller(g.AFFINE_MMA, facts),
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


def in_turns(calls: dict[str, tuple[Any, list[list[Any]]]], count: int, turns: int) -> dict[str, list[float]]:
    """Microseconds per call, `count` calls in one evaluation."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        order = list(calls.items())
        for name, (call, arrays) in order if turn % 2 == 0 else reversed(order):
            samples[name].append(per_call(call, arrays, count))
    return samples


def decode(run: Run, rows: tuple[int, ...], stock: list[subprocess.Popen[str]], none: bool) -> None:
    """Ours and stock in turns; ours symmetric and 1-bit too."""
    from bonsai_qmv import gpu_kernels as g

    wait_for(run, stock)
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
            "ours": (caller(g.AFFINE_MMA, facts_of(m, n, k, 2, 128, "float16", "float16")), sets),
            "sym": (caller(g.AFFINE_MMA, facts_of(m, n, k, 2, 128, "float16", "float16", 2)), sets),
            "1-bit": (caller(g.AFFINE_BITS, facts_of(m, n, k, 1, 128, "float16", "float16")), ones),
            "1-bit sym": (caller(g.AFFINE_BITS, facts_of(m, n, k, 1, 128, "float16", "float16", 1)), ones),
        }
        if run.stock_ready and not none:
            calls["stock"] = (quantized, sets)
        begin = time.time()
        for call, arrays in calls.values():
            per_call(call, arrays, 4)
        warm = time.time() - begin
        heat(0.2)
        if not awake:
            # The first seconds of a process are slower, on the host too.
            in_turns(calls, 400, 6)
            awake = True
        samples = in_turns(calls, 400, 6)
        us = {name: statistics.median(s) for name, s in samples.items()}
        alone = {name: kernel_time(*calls[name], 48) for name in ("ours", "sym", "1-bit", "1-bit sym")}
        entry = {"n": n, "k": k, "rows": m, "us": us, "samples": samples, "kernel_us": alone, "warm_s": warm}
        run.keep("decode", entry)
        theirs = us.get("stock", float("nan"))
        cells = [f"{us.get(c, float('nan')):.1f}" for c in ("ours", "sym", "1-bit", "1-bit sym", "stock")]
        cells += [f"{theirs / us['ours']:.2f}", f"{theirs / us['sym']:.2f}"] + [f"{t:.1f}" for t in alone.values()]
        cells += [f"{alone['1-bit'] / alone['ours']:.2f}", f"{alone['1-bit sym'] / alone['sym']:.2f}"]
        run.say(f"| {n}x{k} | {m} | {' | '.join(cells)} | {bytes_of(n, k, 2, 0) / alone['ours'] / 1e3:.0f} |")


def prefill(run: Run, rows: int, stock: list[subprocess.Popen[str]], none: bool) -> None:
    """Ours and stock in turns; ours symmetric, whose weights are values of float16, and 1-bit too."""
    from bonsai_qmv import gpu_kernels as g

    wait_for(run, stock)
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
        if run.stock_ready and not none:
            calls["stock"] = (quantized, sets)
        for call, arrays in calls.values():
            per_call(call, arrays, 4)
        heat(0.2)
        samples = in_turns(calls, 20, 6)
        us = {name: statistics.median(s) for name, s in samples.items()}
        run.keep("prefill", {"n": n, "k": k, "rows": rows, "us": us, "samples": samples})
        cells = [f"{us.get(c, float('nan')):.0f}" for c in ("ours", "sym", "1-bit", "stock")]
        theirs = us.get("stock", float("nan"))
        run.say(
            f"| {n}x{k} | {rows} | {' | '.join(cells)} | {theirs / us['ours']:.2f} | {theirs / us['sym']:.2f} "
            f"| {2e-6 * rows * n * k / us['sym']:.0f} |"
        )


def wait_for(run: Run, stock: list[subprocess.Popen[str]]) -> None:
    """Until stock has compiled, or a third of the section's time is over."""
    if not stock:
        return
    begin = time.time()
    until = begin + run.seconds / 3
    for process in stock:
        try:
            text, _ = process.communicate(timeout=max(until - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            run.say("stock was still compiling when its time was over: left out")
            run.stock_ready = False
            continue
        if process.returncode:
            run.say(f"stock: {text[-500:]}")
    stock.clear()
    run.say(f"(waited {time.time() - begin:.0f} s for stock to compile)\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="directory of the results")
    parser.add_argument("--seconds", type=float, default=290, help="limit of a section")
    parser.add_argument("--jobs", type=int, default=8, help="processes of the section check")
    parser.add_argument("--rows", default="1,2,4", help="rows of the section decode")
    parser.add_argument("--no-stock", action="store_true",
                        help="leave out stock, whose first calls compile for minutes")  # fmt: skip
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--stock", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [s for s in options.sections if s not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    try:
        import mlx.core as mx
    except ImportError as error:
        print(f"mlx cannot be imported ({error}): put it on PYTHONPATH and CUDA's libraries on LD_LIBRARY_PATH")
        return 2
    if not mx.cuda.is_available():
        print("this mlx has no CUDA, or there is no NVIDIA GPU; install mlx[cuda13]")
        return 2
    mx.set_default_device(mx.gpu)
    if options.worker:
        worker(options.worker, options.out)
        return 0
    if options.stock:
        compile_stock(*map(int, options.stock.split(",")))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, options.seconds)
    info = mx.device_info()
    run.say(f"# {info.get('device_name')}, {info.get('architecture')}, mlx {mx.__version__}")
    run.results["machine"] = {k: str(v) for k, v in info.items()}
    rows = tuple(int(m) for m in options.rows.split(","))
    timed = (*(rows if "decode" in options.sections else ()), *((512,) if "prefill" in options.sections else ()))
    stock = [] if options.no_stock else start_stock([(m, n, k) for m in timed for n, k in SHAPES])
    steps = {"check": lambda: check(run, options.jobs), "launch": lambda: launch(run), "tune": lambda: tune(run),
             "decode": lambda: decode(run, rows, stock, options.no_stock),
             "prefill": lambda: prefill(run, 512, stock, options.no_stock)}  # fmt: skip
    for section in options.sections:
        run.begin(section)
        begin = time.time()
        try:
            steps[section]()
        except Exception as error:
            run.say(f"section {section} failed: {type(error).__name__}: {error}")
        run.say(f"({time.time() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
