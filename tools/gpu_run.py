"""What the checks of GPU kernels share: results written after every step, cases against float64, times, the command.

Not run by itself; see gpu_check.py and gpu_check_t5.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / p) for p in ("", "plugins/bonsai_qmv/src", "plugins/t5/src")]

#: Output x input features of Qwen3.6-27B.
SHAPES = ((8192, 5120), (17408, 5120), (5120, 17408))
#: Bytes of weights that calls cycle through: four times the second-level cache of an H200.
CYCLE = 240 << 20


class Run:
    """What was found so far, written to `name`.json and `name`.md after every step, and how much time is left."""

    def __init__(self, name: str, out: Path, seconds: float) -> None:
        self.name, self.out, self.seconds = name, out, seconds
        self.results: dict[str, Any] = {}
        self.lines: list[str] = []
        self.begin()

    def begin(self) -> None:
        """The time that is left is all of it."""
        self.end = time.time() + self.seconds

    def left(self) -> float:
        return self.end - time.time()

    def late(self) -> bool:
        if self.left() > 0:
            return False
        self.say("(stopped: out of time)")
        return True

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        (self.out / f"{self.name}.md").write_text("\n".join(self.lines) + "\n")

    def keep(self, section: str, entry: dict[str, Any]) -> None:
        self.results.setdefault(section, []).append(entry)
        self.write()

    def write(self) -> None:
        (self.out / f"{self.name}.json").write_text(json.dumps(self.results, indent=1))


# Arrays and calls


def floats(a: np.ndarray, dtype: str) -> Any:
    import mlx.core as mx

    return mx.array(a.astype(np.float32)).astype(getattr(mx, dtype))


def as_float64(a: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(a.astype(mx.float32)).astype(np.float64)


def caller(kernel: Any, facts: dict[str, Any], **over: Any) -> Callable[..., Any]:
    """f(x, w, scales, ...) -> y for the kernel under this geometry; scales stand for last inputs that are not given."""
    import mlx.core as mx

    call = kernel.bind("cuda", kernel.launch(**facts, **over))
    dtype = [getattr(mx, facts["out_dtype"])]

    def f(x: Any, w: Any, scales: Any, *rest: Any) -> Any:
        inputs = [x, w, scales, *rest]
        inputs += [scales] * (len(kernel.inputs) - len(inputs))
        return call(inputs=inputs, output_shapes=[(*x.shape[:-1], facts["n"])], output_dtypes=dtype)[0]

    return f


def layers(sets: Sequence[list[Any]], offers: Any, family: Any, facts: dict[str, Any], **over: Any) -> list[list[Any]]:
    """[x, f] for each [x, w, scales, ...]: f is the product that a plugin's offer (module `offers`) builds of a layer,
    for the number of rows of `facts` alone. Scales stand for last inputs that are not given."""
    family = dataclasses.replace(family, steps=(facts["rows"],))
    found = []
    for x, *arrays in sets:
        fixed = (*arrays, *arrays[1:2] * (len(family.kernel.inputs) - 1 - len(arrays)))
        found.append([x, offers.product(family, {"has_bias": False, **facts, **over}, fixed)])
    return found


def call_layer(x: Any, f: Callable[..., Any]) -> Any:
    return f(x)


def off_by_one(a: Any) -> Any:
    """The same values, one element behind a multiple of 16 bytes."""
    import mlx.core as mx

    return mx.concatenate([a.reshape(-1)[:1], a.reshape(-1)])[1:].reshape(a.shape)


# Cases


@dataclass
class Problem:
    """One layer's weights, and rows of x.

    facts
        What the kernel's geometry takes for them, ``rows`` aside.
    arrays
        Inputs behind x.
    expected
        ``expected(x)`` of float64 -> (result in float64, largest error that `rounding` allows).
    columns
        Those that `expected` is of.
    """

    facts: dict[str, Any]
    x: Any
    arrays: Sequence[Any]
    expected: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    columns: Any = field(default_factory=lambda: slice(None))


@dataclass
class Case:
    """A kernel, numbers of rows in ascending order, and how to make the problem, which is the same every time."""

    name: str
    kernel: Any
    rows: tuple[int, ...]
    make: Callable[[], Problem]


def check_case(case: Case) -> dict[str, Any]:
    """All numbers of rows against float64; rows against themselves alone and among all, and arrays at odd addresses."""
    import mlx.core as mx

    p, kernel, last = case.make(), case.kernel, case.rows[-1]
    results = {m: caller(kernel, {**p.facts, "rows": m})(p.x[:m], *p.arrays) for m in case.rows}
    single = caller(kernel, {**p.facts, "rows": 1})
    alone = [single(p.x[i : i + 1], *p.arrays) for i in range(min(last, 16))]
    odd = caller(kernel, {**p.facts, "rows": 2})(off_by_one(p.x)[:2], off_by_one(p.arrays[0]), *p.arrays[1:])
    mx.eval(results, alone, odd)
    want, allowed = p.expected(as_float64(p.x))
    worst, unequal = 0.0, []
    for m, y in results.items():
        excess = np.abs(as_float64(y)[:, p.columns] - want[:m]) / allowed[:m]
        worst = max(worst, float(np.where(np.isnan(excess), np.inf, excess).max()))
        unequal += [f"{m} rows, row {i}" for i in range(min(m, 16)) if not bool(mx.array_equal(y[i], alone[i][0]))]
        unequal += [] if bool(mx.array_equal(y, results[last][:m])) else [f"{m} rows"]
    if not bool(mx.array_equal(odd, results[last][:2])):
        unequal.append("arrays at odd addresses")
    return {"worst": worst, "unequal": unequal[:4]}


def check(run: Run, cases: Iterable[Case]) -> None:
    """Compiles for all cases at once, then runs them."""
    todo = list(cases)
    begin = time.time()
    for line in compile_all(todo):
        run.say(line)
    run.say(f"compiled in {time.time() - begin:.0f} s")
    done, bad, worst = 0, 0, 0.0
    for case in todo:
        if run.late():
            break
        try:
            entry = check_case(case)
        except Exception as error:
            entry = {"worst": math.inf, "unequal": [], "error": f"{type(error).__name__}: {error}"[:1500]}
        entry["case"] = case.name
        run.keep("check", entry)
        done, worst = done + 1, max(worst, entry["worst"])
        if not entry["worst"] <= 1.0 or entry["unequal"]:
            bad += 1
            run.say(f"WRONG {entry}")
    run.say(f"{done} of {len(todo)} cases, {bad} wrong; largest error {worst:.3f} of the bound")


def compile_all(cases: Iterable[Case]) -> list[str]:
    """Compiles for all numbers of rows at once, as far as mlx takes compiled kernels. Returns what went wrong."""
    import mlx.core as mx

    from backend_core.simt import compiled

    if reason := compiled.why_not():
        return [f"mlx compiles each kernel anew, which takes long: {reason}"]

    def one(case: Case) -> str:
        try:
            p = case.make()
            launches = [case.kernel.launch(**{**p.facts, "rows": m}) for m in {1, 2, *case.rows}]
            arrays = [p.x, *p.arrays, *[p.arrays[1]] * (len(case.kernel.inputs) - 1 - len(p.arrays))]
            case.kernel.compile_ahead(launches, arrays, [getattr(mx, p.facts["out_dtype"])])
        except Exception as error:
            return f"{case.name}: {type(error).__name__}: {error}"[:300]
        return ""

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [line for line in pool.map(one, cases) if line]


# Times


def per_call(call: Any, sets: list[list[Any]], calls: int) -> float:
    """Microseconds per call of `calls` calls in one evaluation, over the sets in turn."""
    import mlx.core as mx

    mx.synchronize()
    begin = time.perf_counter()
    mx.eval([call(*sets[i % len(sets)]) for i in range(calls)])
    mx.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def in_turns(calls: dict[str, tuple[Any, list[list[Any]]]], count: int, turns: int = 6) -> dict[str, list[float]]:
    """Microseconds per call, `count` calls in one evaluation."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            samples[name].append(per_call(*calls[name], count))
    return samples


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(s) for name, s in samples.items()}


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


def heat(seconds: float = 0.4) -> None:
    """Clocks are low after a pause."""
    import mlx.core as mx

    a = mx.ones((4096, 4096), mx.float16)
    until = time.time() + seconds
    while time.time() < until:
        mx.eval([a @ a for _ in range(20)])


# The command


def parser_of(text: str, sections: Sequence[str], seconds: float, limit: str) -> argparse.ArgumentParser:
    """Of a command with sections; limit: what `seconds` are the limit of."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(sections), help=f"of {', '.join(sections)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="directory of the results")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"limit of {limit}")
    return parser


def parsed(parser: argparse.ArgumentParser, sections: Sequence[str]) -> argparse.Namespace:
    """The options, on a machine that can run the checks; ends with 2 where it cannot."""
    options = parser.parse_args()
    unknown = [s for s in options.sections if s not in sections]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(sections)}")
    try:
        import mlx.core as mx
    except ImportError as error:
        parser.exit(2, f"mlx cannot be imported ({error}): put it on PYTHONPATH and CUDA's libraries on "
                    f"LD_LIBRARY_PATH\n")  # fmt: skip
    if not mx.cuda.is_available():
        parser.exit(2, "this mlx has no CUDA, or there is no NVIDIA GPU; install mlx[cuda13]\n")
    mx.set_default_device(mx.gpu)
    return options


def start(name: str, options: argparse.Namespace) -> Run:
    """The run, with the machine in its results."""
    import mlx.core as mx

    options.out.mkdir(parents=True, exist_ok=True)
    run, info = Run(name, options.out, options.seconds), mx.device_info()
    run.say(f"# {name}: {info.get('device_name')}, {info.get('architecture')}, mlx {mx.__version__}")
    run.results["machine"] = {k: str(v) for k, v in info.items()}
    return run


def run_sections(run: Run, steps: dict[str, Callable[[], None]], sections: Iterable[str], each: bool) -> None:
    """Runs the sections, whatever one of them does; each: every one has the whole time."""
    for section in sections:
        if each:
            run.begin()
        run.say(f"\n## {section}\n")
        begin = time.time()
        try:
            steps[section]()
        except Exception as error:
            run.say(f"section {section} failed: {type(error).__name__}: {error}")
        run.say(f"\n({time.time() - begin:.0f} s)")
