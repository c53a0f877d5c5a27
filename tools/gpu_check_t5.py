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

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import gpu_check
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

SECTIONS = ("check", "decode", "prefill")
#: Weights of zero in a group of 128 of a layer, in one of its rows at least.
ZEROS = (64, 80, 96)


def facts_of(rows: int, n: int, k: int, group: int, x: str, scales: str, bias: bool = False) -> dict[str, Any]:
    out = x if x == scales else "float32"
    return {"rows": rows, "n": n, "k": k, "group_size": group, "x_dtype": x, "scales_dtype": scales,
            "out_dtype": out, "has_bias": bias, "device": "cuda"}  # fmt: skip


def of_weights(w: Any, scales: Any, group: int) -> dict[str, Any]:
    """What the matrix kernel may take for granted about these weights, as an offer looks at it.

    Raises ValueError where it is not exact enough for them.
    """
    from t5_ternary.gpu_offers import ratio_of, zeros_of

    return {"ratio": ratio_of(scales), "zeros": zeros_of(w, group)}


def packed(rng: Any, n: int, k: int, group: int, zeros: int = 0) -> np.ndarray:
    """Random trits as bytes (n, columns).

    The first row has `zeros` weights of zero in every 128, at random places, or no others if `zeros` is 0. Half of the
    last row are ones.
    """
    from t5_ternary import reference

    trits = rng.choice(3, (n, k), p=(0.4, 0.2, 0.4))
    trits[0] = 1
    if zeros:
        kept = np.tile(np.arange(group) >= group * zeros // 128, (k // group, 1))
        trits[0][rng.permuted(kept, axis=1).ravel()] = 0
    trits[-1, : k // 2] = 2
    return reference.pack(trits, group)


# check


def formats() -> list[tuple[Any, ...]]:
    """(kernel, group, x dtype, scales dtype, n, k, bias, zeros)."""
    found: list[tuple[Any, ...]] = []
    for (group, dtype), zeros in zip(
        itertools.product((64, 128), ("float16", "bfloat16")), itertools.cycle(ZEROS), strict=False
    ):
        found.append(("t5_mma", group, dtype, dtype, 200, group * 9, False, zeros))
        found.append(("t5_mma", group, dtype, dtype, 72, 2048, True, ZEROS[-1]))
    found.append(("t5_mma", 128, "float16", "float16", 7, 128, False, 80))
    found.append(("t5_mma", 64, "bfloat16", "bfloat16", 24, 64, False, 64))
    found += [("t5_mma", 128, "float16", "float16", n, k, False, z) for n, k, z in ((1024, 5120, 80), (512, 17408, 64))]
    for group, dtype in itertools.product((64, 128), ("float32", "float16", "bfloat16")):
        found.append(("t5_qmv", group, dtype, dtype, 23, group * 9, group == 64, 0))
    for group, dtype in itertools.product((64, 128), ("float16", "bfloat16")):
        found.append(("t5_qmm", group, dtype, dtype, 200, group * 9, True, 0))
        found.append(("t5_qmm", group, dtype, dtype, 7, group, False, 0))
    found += [("t5_qmm", 128, "float16", "float16", n, k, False, 0) for n, k in ((1024, 5120), (512, 17408))]
    found.append(("t5_qmv", 128, "float16", "float32", 72, 1152, False, 0))
    found.append(("t5_qmv", 128, "float32", "float16", 512, 5120, True, 0))
    return found


def cases() -> Iterator[Case]:
    from t5_ternary import gpu_kernels

    kernels = {kernel.name: kernel for kernel in gpu_kernels.KERNELS}
    for form in formats():
        rows = (17, 64, 129, 300) if form[0] == "t5_qmm" else (1, 2, 5, 8, 9, 16)
        make = functools.partial(problem, form, rows[-1])
        yield Case(" ".join(map(str, form)), kernels[form[0]], rows, make)


def problem(form: tuple[Any, ...], rows: int) -> Problem:
    """The same for the same format."""
    import mlx.core as mx
    from t5_ternary import reference

    name, group, dtype, scales_dtype, n, k, with_bias, zeros = form
    rng = np.random.default_rng([n, k, group])
    w = packed(rng, n, k, group, zeros)
    arrays = [mx.array(w), floats(rng.uniform(0.02, 0.03, (n, k // group)), scales_dtype)]
    arrays += [floats(rng.standard_normal(n), scales_dtype)] if with_bias else []
    facts = facts_of(rows, n, k, group, dtype, scales_dtype, with_bias)
    if name == "t5_mma":
        facts |= of_weights(arrays[0], arrays[1], group)

    def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = reference.dequantize64(w, as_float64(arrays[1]), group)
        return reference.bound(x, weights, facts["out_dtype"], as_float64(arrays[2]) if with_bias else None)

    return Problem(facts, floats(rng.standard_normal((rows, k)), dtype), arrays, expected)


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
    """t5 and 2-bit symmetric in turns, as layers that a plugin built."""
    from bonsai_qmv import gpu_offers as affine
    from t5_ternary import gpu_offers

    run.say("us; calls are 400 in one evaluation, the median of six\n")
    run.say("| shape | rows | t5 per call | 2-bit sym | ratio | t5 kernel | 2-bit sym | ratio | t5 GB/s |")
    run.say("|---|---|---|---|---|---|---|---|---|")
    for (n, k), m in itertools.product(SHAPES, (1, 4, 8)):
        if run.late():
            return
        two = gpu_check.facts_of(m, n, k, 2, 128, "float16", "float16", 2)
        sets = t5_sets(n, k, m)
        ours = facts_of(m, n, k, 128, "float16", "float16") | of_weights(*sets[0][1:], 128)
        calls = {
            "t5": (call_layer, layers(sets, gpu_offers, gpu_offers.MMA, ours)),
            "sym": (call_layer, layers(gpu_check.weight_sets(n, k, 2, m, 2), affine, affine.FAMILIES[0], two)),
        }
        for call, arrays in calls.values():
            per_call(call, arrays, 20)
        heat(0.2)
        samples = in_turns(calls, 400)
        us = gpu_run.medians(samples)
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
        two = gpu_check.facts_of(m, n, k, 2, 128, "float16", "float16", 2)
        sets = t5_sets(n, k, m)[:8]
        calls = {
            "t5": (caller(T5_QMM, facts_of(m, n, k, 128, "float16", "float16")), sets),
            "sym": (caller(AFFINE_QMM, two), gpu_check.weight_sets(n, k, 2, m, 2)[:8]),
        }
        if stock:
            calls["stock"] = (without, sets)
        for call, arrays in calls.values():
            per_call(call, arrays, 4)
        heat(0.2)
        samples = in_turns(calls, 20)
        us = gpu_run.medians(samples)
        run.keep("prefill", {"n": n, "k": k, "rows": m, "us": us, "samples": samples})
        theirs = us.get("stock", math.nan)
        run.say(
            f"| {n}x{k} | {m} | {us['t5']:.0f} | {us['sym']:.0f} | {us['sym'] / us['t5']:.2f} | {theirs:.0f} "
            f"| {theirs / us['t5']:.2f} | {2e-6 * m * n * k / us['t5']:.0f} |"
        )


def main() -> int:
    parser = gpu_run.parser_of(__doc__ or "", SECTIONS, 95, "the whole")
    parser.add_argument("--stock", action="store_true", help="mlx's product too in the section prefill")
    options = gpu_run.parsed(parser, SECTIONS)
    run = gpu_run.start("gpu_check_t5", options)
    steps = {"check": lambda: gpu_run.check(run, cases()), "decode": lambda: decode(run),
             "prefill": lambda: prefill(run, options.stock)}  # fmt: skip
    gpu_run.run_sections(run, steps, options.sections, each=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
