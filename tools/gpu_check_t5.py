"""Checks and times the CUDA kernels of t5 weights on a GPU host, from a source tree.

    PYTHONPATH=. python tools/gpu_check_t5.py --out DIR check decode prefill

    check      dtypes, groups, numbers of rows and edges against float64; bits of a row alone and among others
    decode     1, 4 and 8 rows next to our 2-bit kernel with symmetric weights: time per call, and of the kernel alone
    prefill    512 rows, and fewer, next to our 2-bit kernel with symmetric weights and, with ``--stock``, next to what
               happens without: 2-bit words made at each call, and mlx's product, whose first call compiles for minutes

Weights are cycled through more than the second-level cache. Kernel times come from CUPTI through torch's profiler where
torch is installed; without it they are left out. ``--seconds`` ends the whole early, and says so. Results go to
DIR/gpu_check_t5.json, and tables to DIR/gpu_check_t5.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/t5/src"), str(ROOT / "plugins/bonsai_qmv/src"), str(ROOT / "tools")]

from gpu_check import as_float64, floats, heat, kernel_time, per_call, weight_sets  # noqa: E402

SECTIONS = ("check", "decode", "prefill")
SHAPES = ((8192, 5120), (17408, 5120), (5120, 17408))
#: More than the second-level cache.
CYCLE = 240 << 20


class Run:
    """What was found so far, written after every step, and when to stop."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.end = out, time.time() + seconds
        self.results: dict[str, Any] = {}
        self.lines: list[str] = []

    def late(self) -> bool:
        if time.time() > self.end:
            self.say("(stopped: out of time)")
            return True
        return False

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        (self.out / "gpu_check_t5.md").write_text("\n".join(self.lines) + "\n")

    def keep(self, section: str, entry: dict[str, Any]) -> None:
        self.results.setdefault(section, []).append(entry)
        (self.out / "gpu_check_t5.json").write_text(json.dumps(self.results, indent=1))


def facts_of(rows: int, n: int, k: int, group: int, x: str, scales: str, bias: bool = False) -> dict[str, Any]:
    out = x if x == scales else "float32"
    return {"rows": rows, "n": n, "k": k, "group_size": group, "x_dtype": x, "scales_dtype": scales,
            "out_dtype": out, "has_bias": bias, "device": "cuda", "ratio": 24}  # fmt: skip


def caller(kernel: Any, facts: dict[str, Any], **over: Any) -> Any:
    """f(x, w, scales[, bias]) -> y for the kernel under this geometry."""
    import mlx.core as mx

    call = kernel.bind("cuda", kernel.launch(**facts, **over))
    dtype = [getattr(mx, facts["out_dtype"])]

    def f(x: Any, w: Any, scales: Any, bias: Any = None) -> Any:
        shape = [(*x.shape[:-1], facts["n"])]
        inputs = [x, w, scales, scales if bias is None else bias]
        return call(inputs=inputs, output_shapes=shape, output_dtypes=dtype)[0]

    return f


def packed(rng: Any, n: int, k: int, group: int) -> np.ndarray:
    """Random trits as bytes (n, columns), with whole ranges of zeros and of ones."""
    from t5_ternary import reference

    trits = rng.choice(3, (n, k), p=(0.3, 0.4, 0.3))
    trits[0], trits[-1, : k // 2] = 1, 2
    return reference.pack(trits, group)


# check


def cases() -> list[tuple[Any, ...]]:
    """(kernel, group, x dtype, scales dtype, n, k, bias)."""
    found: list[tuple[Any, ...]] = []
    for group, dtype in itertools.product((64, 128), ("float16", "bfloat16")):
        found.append(("t5_mma", group, dtype, dtype, 200, group * 9, False))
        found.append(("t5_mma", group, dtype, dtype, 72, 2048, True))
    found.append(("t5_mma", 128, "float16", "float16", 7, 128, False))
    found.append(("t5_mma", 64, "bfloat16", "bfloat16", 24, 64, False))
    found += [("t5_mma", 128, "float16", "float16", n, k, False) for n, k in ((1024, 5120), (512, 17408))]
    for group, dtype in itertools.product((64, 128), ("float32", "float16", "bfloat16")):
        found.append(("t5_qmv", group, dtype, dtype, 23, group * 9, group == 64))
    for group, dtype in itertools.product((64, 128), ("float16", "bfloat16")):
        found.append(("t5_qmm", group, dtype, dtype, 200, group * 9, True))
        found.append(("t5_qmm", group, dtype, dtype, 7, group, False))
    found += [("t5_qmm", 128, "float16", "float16", n, k, False) for n, k in ((1024, 5120), (512, 17408))]
    found.append(("t5_qmv", 128, "float16", "float32", 72, 1152, False))
    found.append(("t5_qmv", 128, "float32", "float16", 512, 5120, True))
    return found


ROWS = {False: (1, 2, 5, 8, 9, 16), True: (17, 64, 129, 300)}


def many(name: str) -> bool:
    """Whether the kernel is for more than 16 rows."""
    return name == "t5_qmm"


def check_case(case: tuple[Any, ...]) -> dict[str, Any]:
    """All numbers of rows against float64, and rows against themselves alone."""
    import mlx.core as mx
    from t5_ternary import gpu_kernels, reference

    name, group, dtype, scales_dtype, n, k, with_bias = case
    kernel = {kernel.name: kernel for kernel in gpu_kernels.KERNELS}[name]
    rng = np.random.default_rng(n + k + group)
    w = packed(rng, n, k, group)
    scales = floats(rng.uniform(0.02, 0.03, (n, k // group)), scales_dtype)
    bias = floats(rng.standard_normal(n), scales_dtype) if with_bias else None
    rows = ROWS[many(name)]
    x = floats(rng.standard_normal((rows[-1], k)), dtype)
    facts, arrays = facts_of(1, n, k, group, dtype, scales_dtype, with_bias), [mx.array(w), scales, bias]
    results = {m: caller(kernel, {**facts, "rows": m})(x[:m], *arrays) for m in rows}
    single = caller(kernel, facts)
    alone = [single(x[i : i + 1], *arrays) for i in range(16)]
    # Views that begin between multiples of 16 bytes.
    shifted = mx.concatenate([x[:1].reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape)
    moved = mx.concatenate([arrays[0].reshape(-1)[:2], arrays[0].reshape(-1)])[2:].reshape(w.shape)
    odd = caller(kernel, {**facts, "rows": 2})(shifted[:2], moved, scales, bias)
    mx.eval(results, alone, odd)
    weights = reference.dequantize64(w, as_float64(scales), group)
    y64, bound = reference.bound(as_float64(x), weights, facts["out_dtype"], None if bias is None else as_float64(bias))
    worst, unequal = 0.0, []
    for m, y in results.items():
        excess = np.abs(as_float64(y) - y64[:m]) / bound[:m]
        worst = max(worst, float(np.where(np.isnan(excess), np.inf, excess).max()))
        unequal += [f"{m} rows, row {i}" for i in range(min(m, 16)) if not bool(mx.array_equal(y[i], alone[i][0]))]
        unequal += [] if bool(mx.array_equal(y, results[rows[-1]][:m])) else [f"{m} rows"]
    if not bool(mx.array_equal(odd, results[rows[-1]][:2])):
        unequal.append("unaligned arrays")
    return {"worst": worst, "unequal": unequal[:4]}


def compile_all(todo: list[tuple[Any, Any, dict[str, Any]]]) -> None:
    """Compile for (kernel, dtypes of its inputs, keywords of launch) at once, as far as mlx takes compiled kernels."""
    import mlx.core as mx

    from backend_core.simt import compiled

    if reason := compiled.why_not():
        print(f"mlx compiles each kernel anew, which takes long: {reason}", flush=True)
        return

    def one(job: tuple[Any, Any, dict[str, Any]]) -> None:
        kernel, types, keywords = job
        arrays = [mx.zeros((1,), getattr(mx, t)) for t in types]
        kernel.compile_ahead([kernel.launch(**keywords)], arrays, [getattr(mx, keywords["out_dtype"])])

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for job, error in zip(todo, pool.map(lambda j: _error(one, j), todo), strict=True):
            if error:
                print(f"{job[0].name}: {error}", flush=True)


def _error(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def check(run: Run) -> None:
    from t5_ternary import gpu_kernels

    kernels = {kernel.name: kernel for kernel in gpu_kernels.KERNELS}
    todo = []
    for name, group, x, scales, n, k, bias in cases():
        for m in ROWS[many(name)]:
            facts = facts_of(m, n, k, group, x, scales, bias)
            todo.append((kernels[name], (x, "uint8", scales, scales), facts))
    begin = time.time()
    compile_all(todo)
    run.say(f"compiled in {time.time() - begin:.0f} s")
    done, bad, worst = 0, 0, 0.0
    for case in cases():
        if run.late():
            break
        try:
            entry = check_case(case)
        except Exception as error:
            entry = {"worst": math.inf, "unequal": [], "error": f"{type(error).__name__}: {error}"[:1500]}
        entry["case"] = " ".join(map(str, case))
        run.keep("check", entry)
        done, worst = done + 1, max(worst, entry["worst"])
        if not entry["worst"] <= 1.0 or entry["unequal"]:
            bad += 1
            run.say(f"WRONG {entry}")
    run.say(f"{done} of {len(cases())} cases, {bad} wrong; largest error {worst:.3f} of the bound")


# times


def t5_sets(n: int, k: int, rows: int, group: int = 128) -> list[list[Any]]:
    """Enough [x, w, scales] to leave the second-level cache behind."""
    import mlx.core as mx

    rng = np.random.default_rng(5)
    w = mx.array(rng.integers(0, 243, (n, k // group * (group * 26 // 128)), dtype=np.uint8))
    scales = floats(rng.uniform(0.02, 0.03, (n, k // group)), "float16")
    x = floats(rng.standard_normal((rows, k)), "float16")
    count = max(4, -(-CYCLE // w.nbytes))
    sets = [[x, mx.roll(w, i, 0), scales + 0] for i in range(count)]
    mx.eval(sets)
    return sets


def decode(run: Run) -> None:
    """t5 and 2-bit symmetric in turns."""
    from bonsai_qmv.gpu_kernels import AFFINE_MMA
    from t5_ternary.gpu_kernels import T5_MMA

    run.say("us; calls are 400 in one evaluation, the median of six\n")
    run.say("| shape | rows | t5 per call | 2-bit sym | ratio | t5 kernel | 2-bit sym | ratio | t5 GB/s |")
    run.say("|---|---|---|---|---|---|---|---|---|")
    for (n, k), m in itertools.product(SHAPES, (1, 4, 8)):
        if run.late():
            return
        two = {"rows": m, "n": n, "k": k, "bits": 2, "group_size": 128, "x_dtype": "float16", "scales_dtype": "float16",
               "out_dtype": "float16", "symmetric": 2, "device": "cuda"}  # fmt: skip
        bound_two = caller_of_two(AFFINE_MMA, two)
        calls = {
            "t5": (caller(T5_MMA, facts_of(m, n, k, 128, "float16", "float16")), t5_sets(n, k, m)),
            "sym": (bound_two, weight_sets(n, k, 2, m, 2)),
        }
        for call, sets in calls.values():
            per_call(call, sets, 20)
        heat(0.2)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(6):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                samples[name].append(per_call(*calls[name], 400))
        us = {name: statistics.median(s) for name, s in samples.items()}
        alone = {name: kernel_time(*calls[name], 64) for name in calls}
        run.keep("decode", {"n": n, "k": k, "rows": m, "us": us, "samples": samples, "kernel_us": alone})
        gbps = (n * k // 128 * 28) / alone["t5"] / 1e3
        run.say(
            f"| {n}x{k} | {m} | {us['t5']:.1f} | {us['sym']:.1f} | {us['sym'] / us['t5']:.2f} | {alone['t5']:.2f} "
            f"| {alone['sym']:.2f} | {alone['sym'] / alone['t5']:.2f} | {gbps:.0f} |"
        )


def prefill(run: Run, stock: bool) -> None:
    """t5 and 2-bit symmetric in turns; what happens without the kernel last."""
    import mlx.core as mx
    from bonsai_qmv.gpu_kernels import AFFINE_QMM
    from t5_ternary.gpu_kernels import T5_QMM
    from t5_ternary.words import words

    def without(x: Any, w: Any, scales: Any) -> Any:
        return mx.quantized_matmul(x, words(w, 128), scales, -scales, True, 128, 2)

    run.say("us per call, 20 in one evaluation, the median of six\n")
    run.say("| shape | rows | t5 | 2-bit symmetric | 2-bit / t5 | words and stock | that / t5 | t5 TFLOP/s |")
    run.say("|---|---|---|---|---|---|---|---|")
    for (n, k), m in itertools.product(SHAPES, (32, 128, 512)):
        if run.late():
            return
        two = {"rows": m, "n": n, "k": k, "bits": 2, "group_size": 128, "x_dtype": "float16", "scales_dtype": "float16",
               "out_dtype": "float16", "symmetric": 2, "device": "cuda"}  # fmt: skip
        sets = t5_sets(n, k, m)[:8]
        calls = {
            "t5": (caller(T5_QMM, facts_of(m, n, k, 128, "float16", "float16")), sets),
            "sym": (caller_of_two(AFFINE_QMM, two), weight_sets(n, k, 2, m, 2)[:8]),
        }
        if stock:
            calls["stock"] = (without, sets)
        for call, arrays in calls.values():
            per_call(call, arrays, 4)
        heat(0.2)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(6):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                samples[name].append(per_call(*calls[name], 20))
        us = {name: statistics.median(s) for name, s in samples.items()}
        run.keep("prefill", {"n": n, "k": k, "rows": m, "us": us, "samples": samples})
        theirs = us.get("stock", math.nan)
        run.say(
            f"| {n}x{k} | {m} | {us['t5']:.0f} | {us['sym']:.0f} | {us['sym'] / us['t5']:.2f} | {theirs:.0f} "
            f"| {theirs / us['t5']:.2f} | {2e-6 * m * n * k / us['t5']:.0f} |"
        )


def caller_of_two(kernel: Any, facts: dict[str, Any]) -> Any:
    """f(x, w, scales, biases) -> y of the 2-bit kernel."""
    import mlx.core as mx

    call = kernel.bind("cuda", kernel.launch(**facts))

    def f(x: Any, w: Any, scales: Any, biases: Any) -> Any:
        shape = [(*x.shape[:-1], facts["n"])]
        return call(inputs=[x, w, scales, scales, scales], output_shapes=shape, output_dtypes=[mx.float16])[0]

    return f


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="directory of the results")
    parser.add_argument("--seconds", type=float, default=95, help="limit of the whole")
    parser.add_argument("--stock", action="store_true", help="mlx's product too in the section prefill")
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
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, options.seconds)
    info = mx.device_info()
    run.say(f"# t5 on {info.get('device_name')}, {info.get('architecture')}, mlx {mx.__version__}")
    run.results["machine"] = {k: str(v) for k, v in info.items()}
    steps = {"check": check, "decode": decode, "prefill": lambda run: prefill(run, options.stock)}
    for section in options.sections:
        begin = time.time()
        run.say(f"\n## {section}\n")
        try:
            steps[section](run)
        except Exception as error:
            run.say(f"section {section} failed: {type(error).__name__}: {error}")
        run.say(f"\n({time.time() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
