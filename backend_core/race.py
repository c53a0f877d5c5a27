"""Races: an offer against stock on this machine, without side effects.

Timed is ``layer(x)`` with its Python, many calls in one evaluation, rotating over all layers of one
signature so that weights come from memory as they do between tokens. Ours goes first; stock is slow on some
devices, so it runs at few rows or on a slice of the matrix and is extrapolated, which is exact where its time
is proportional to the work and said in the result (`how`).
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .probe_base import Probe

#: Rows raced at load time: decode, a short verification, the largest verification, a prompt.
RACE_ROWS = (1, 4, 16, 64)
#: How much each of the rows 1, 4, 16 weighs in the decision for rows 1..16.
WEIGHTS = {1: 0.7, 4: 0.2, 16: 0.1}
#: Rows up to this number are decided as one unit, which must not be slower at rows 1.
SMALL_ROWS = 16
#: A lead of this factor needs no further repetition.
CLEAR_LEAD = 3.0
#: With a lead of this factor a few calls say enough.
OBVIOUS_LEAD = 8.0
#: Stock never runs at more rows than this on the CPU.
STOCK_MAX_ROWS = 4
_MIN_CALLS = 20
#: Calls in one evaluation on a GPU, where waiting for the end takes as long as several calls.
_GPU_CALLS = 100
#: How timings begin their `how` where stock has no code for the layer on this device.
STOCK_FAILS = "stock fails"
#: Seconds that stand for a stock that fails.
_NEVER = 1e5
#: Results that may be held at once.
SCRATCH_BYTES = 64 << 20
_MAX_ROUNDS = 5
_STOCK_BUDGET_S = 0.012
_OURS_BUDGET_S = 0.1
_HOPELESS_S = 0.02
#: Seconds a call that a busy machine alone does not explain.
_STOLEN_S = 0.1
#: Seconds of a sample that a busy machine does not make eight times as long.
_LONG_S = 0.03
#: A spread that says that others had the processors meanwhile, and one that may hide nothing; between them what is
#: decided stays. Beyond that pairs of samples of an eighth of the calls decide: so many, in about so many seconds.
_BUSY, _STILL, _SHORT_PAIRS, _SHORT_BUDGET_S = 0.2, 0.02, 48, 0.8


@dataclass(frozen=True)
class Timing:
    """Seconds of one call at one number of rows, ours and stock's, with the relative spread of the ratio."""

    ours: float
    stock: float
    spread: float
    how: str = "raced"

    @property
    def unrivalled(self) -> bool:
        """True if stock cannot run here."""
        return self.how.startswith(STOCK_FAILS)

    @property
    def ratio(self) -> float:
        return self.stock / self.ours if self.ours > 0 else 0.0

    @property
    def sane(self) -> bool:
        """False for values that no race gives: the profile is a file that anybody may write."""
        return all(isinstance(v, (int, float)) and 0 < v < 1e6 for v in (self.ours, self.stock)) and (
            isinstance(self.spread, (int, float)) and 0 <= self.spread < 1e6
        )

    @property
    def unclear(self) -> bool:
        """True if the noise decided, and would decide otherwise on another day."""
        return 1 / CLEAR_LEAD < self.ratio < CLEAR_LEAD and self.spread > (0.5 if self.decided else 0.1)

    @property
    def noise(self) -> float:
        """By how much a ratio must exceed 1: the spread, at least 2 %; not more than a clear lead needs."""
        return min(max(self.spread, 0.02), CLEAR_LEAD - 1.0)

    @property
    def wins(self) -> bool:
        """True if ours is faster beyond the noise."""
        return self.ratio > 1.0 + self.noise

    @property
    def not_slower(self) -> bool:
        """True unless ours is slower beyond the noise."""
        return self.ratio > 1.0 - self.noise

    @property
    def decided(self) -> bool:
        """True if one of the two is faster beyond the noise."""
        return self.wins or not self.not_slower

    def as_dict(self) -> dict[str, Any]:
        return {"ours": self.ours, "stock": self.stock, "spread": self.spread, "how": self.how}


def race(probe: Probe, modules: Sequence[Any], ours: Callable[..., Any], rows: Sequence[int], device: str = "cpu", *,
         watch: Callable[[], Any] = contextlib.nullcontext) -> dict[int, Timing]:  # fmt: skip
    """Time `ours(module, *args)` against stock at each number of rows.

    modules
        Layers with one signature.
    watch
        Context manager factory that is entered around the first run of ours at each number of rows: a crash must be
        traced to its offer.

    Raises whatever the layers raise.

    What is slower at rows 1 has lost rows 1..16 and is not timed at the others of them; they get the same times.
    """
    result: dict[int, Timing] = {}
    stock_cost: float | None = None  # seconds per row, from the rows timed before
    for m in sorted(rows):
        if 1 < m <= SMALL_ROWS and 1 in result and not result[1].not_slower:
            result[m] = result[1]
            continue
        args = probe.args(m)
        run = functools.partial(_run, ours, args)
        with watch():
            mine = _batch_time(run, modules, 1)
        if mine < _OURS_BUDGET_S or device != "cpu":
            mine = _batch_time(run, modules, 1)
        if device != "cpu":
            # All layers once: weights that the host has read may be on their way back to the GPU.
            mine = min(mine, _batch_time(run, modules, max(_MIN_CALLS, len(modules))))
        calls = max(_MIN_CALLS, min(200, int(0.002 / max(mine, 1e-7)))) if m <= 16 else 3
        if device != "cpu":
            calls = _GPU_CALLS if m <= 16 else _MIN_CALLS
        if mine * calls > _OURS_BUDGET_S:
            calls = max(2, int(_OURS_BUDGET_S / mine))
        if probe.proportional and device == "cpu" and m > STOCK_MAX_ROWS and stock_cost is not None:
            clear = stock_cost * m > OBVIOUS_LEAD * mine
            times = sorted(
                _batch_time(run, modules, min(calls, 3) if clear else calls) for _ in range(2 if clear else 3)
            )
            spread = (times[-1] - times[0]) / times[1]
            result[m] = Timing(statistics.median(times), stock_cost * m, spread, "extrapolated")
            continue
        timing = _duel(probe, modules, ours, args, calls, mine, device)
        result[m] = timing
        if timing.unrivalled:
            continue
        stock_cost = timing.stock / m
        if timing.ratio < 1 / CLEAR_LEAD and timing.ours > _HOPELESS_S:
            # It will not get better, and every further call costs.
            return {r: result.get(r, timing) for r in sorted(rows)}
    return result


def _run(function: Callable[..., Any], args: tuple[Any, ...], module: Any) -> Any:
    return function(module, *args)


def _duel(probe: Probe, modules: Sequence[Any], ours: Callable[..., Any], args: tuple[Any, ...],
          calls: int, first: float, device: str) -> Timing:  # fmt: skip
    """ABBA until the answer is clear. first: seconds of our first call."""
    try:
        stock, factor, stock_calls, how = _stock_runner(probe, modules, args, calls, first, device)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Timing(first, _NEVER, 0.0, f"{STOCK_FAILS} ({text[:200]})")
    mine: list[float] = []
    theirs: list[float] = []

    def run_ours() -> None:
        mine.append(_batch_time(lambda module: ours(module, *args), modules, calls))

    def run_stock() -> None:
        theirs.append(_batch_time(lambda module: stock(module, *args), modules, stock_calls) * factor)

    def so_far() -> Timing:
        return Timing(statistics.median(mine), statistics.median(theirs), _spread(mine) + _spread(theirs), how)

    run_ours()
    run_stock()
    if theirs[0] > OBVIOUS_LEAD * mine[0] and theirs[0] / factor * stock_calls > _LONG_S:
        run_ours()
        return so_far()
    if max(theirs[0], mine[0]) > CLEAR_LEAD * min(theirs[0], mine[0]):
        # Somebody else may have had the processor, and what is concluded is remembered: not by one sample.
        if mine[0] < _STOLEN_S:
            run_ours()
            run_stock()
        if min(mine) > CLEAR_LEAD * max(theirs) or min(theirs) > CLEAR_LEAD * max(mine):
            return so_far()
    for _ in range(_MAX_ROUNDS):
        run_stock()
        run_ours()
        run_ours()
        run_stock()
        timing = so_far()
        if timing.decided:
            break
    # On a GPU short samples would time the waiting for their end.
    if device != "cpu" or timing.spread <= (_BUSY if timing.decided else _STILL):
        return timing
    sides = ((lambda m: ours(m, *args), max(1, calls // 8)), (lambda m: stock(m, *args), max(1, stock_calls // 8)))
    pairs = min(_SHORT_PAIRS, int(_SHORT_BUDGET_S / (timing.ours * sides[0][1] + timing.stock / factor * sides[1][1])))
    if pairs < _SHORT_PAIRS // 3:
        return timing
    calm = _calm_duel(modules, sides, pairs, factor, how)
    return calm if calm.spread < timing.spread else timing


def _calm_duel(modules: Sequence[Any], sides: Sequence[tuple[Callable[[Any], Any], int]], pairs: int,
               factor: float, how: str) -> Timing:  # fmt: skip
    """Of many short samples of ours and stock the fastest eighth: those that nobody took the processors from, if there
    are any.

    The slowest of those is the time, and how far the fastest lies below it the spread.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        for side in (0, 1) if i % 2 else (1, 0):
            call, calls = sides[side]
            begin = i * calls % len(modules)
            times[side].append(_batch_time(call, [*modules[begin:], *modules[:begin]], calls))
    fastest = [sorted(t)[: pairs // 8] for t in times]
    spread = sum((t[-1] - t[0]) / t[-1] for t in fastest)
    return Timing(fastest[0][-1], fastest[1][-1] * factor, spread, how)


def _stock_runner(probe: Probe, modules: Sequence[Any], args: tuple[Any, ...], calls: int, ours: float,
                  device: str) -> tuple[Callable[..., Any], float, int, str]:  # fmt: skip
    """(callable, factor, calls, how): stock on the whole layer if that is cheap, else on its first columns.

    On a GPU always on the whole: the time of a slice is mostly that of starting a kernel.
    """
    site = probe.site
    if device != "cpu":
        # The first call may compile.
        _batch_time(lambda module: probe.stock(module, *args), modules[:1], 1)
        cost = _batch_time(lambda module: probe.stock(module, *args), modules, 2)
        return probe.stock, 1.0, max(2, min(calls, int(0.25 / max(cost, 1e-7)))), "raced"
    if probe.sliceable and site.n > 128:
        from .probes import sliced

        # A small slice first: one whole call may take seconds and cannot be interrupted.
        part = 64
        slice_of = {id(m): sliced(m, 0, part) for m in modules[:4]}
        first = list(slice_of.values())
        _batch_time(lambda module: probe.stock(module, *args), first, 1)
        cost = _batch_time(lambda module: probe.stock(module, *args), first, 2)
        whole = cost * site.n / part
        if whole > OBVIOUS_LEAD * ours:
            calls = min(calls, 4)
        if whole * calls <= 0.25:
            return probe.stock, 1.0, calls, "raced"
        if whole > _STOCK_BUDGET_S:
            part = max(part, min(site.n, int(site.n * _STOCK_BUDGET_S / whole) // 64 * 64))
        else:
            part = site.n
        if part < site.n:
            slice_of = {id(m): sliced(m, 0, part) for m in modules}
            return (lambda module, *a: probe.stock(slice_of[id(module)], *a), site.n / part, 4,
                    "raced (stock on a slice)")  # fmt: skip
        return probe.stock, 1.0, max(2, int(0.25 / whole)), "raced"
    cost = _batch_time(lambda module: probe.stock(module, *args), modules[:1], 1)
    if cost > OBVIOUS_LEAD * ours:
        calls = min(calls, 4)
    return probe.stock, 1.0, max(1, min(calls, int(0.25 / max(cost, 1e-7)))), "raced"


def _batch_time(call: Callable[[Any], Any], modules: Sequence[Any], calls: int) -> float:
    """Seconds per call of `calls` calls, rotating over `modules`, as many in one evaluation as memory allows."""
    import mlx.core as mx

    begin = time.perf_counter()
    results: list[Any] = []
    at_once = calls
    for i in range(calls):
        results.append(call(modules[i % len(modules)]))
        if i == 0:
            at_once = max(1, SCRATCH_BYTES // max(results[0].nbytes, 1))
        if len(results) >= at_once:
            mx.eval(results)
            results.clear()
    mx.eval(results)
    return (time.perf_counter() - begin) / calls


def _spread(times: list[float]) -> float:
    """Half the distance between the quartiles over the median (range for few samples)."""
    if len(times) < 2:
        return 0.0
    median = statistics.median(times)
    if len(times) < 4:
        return (max(times) - min(times)) / 2 / median
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / median
