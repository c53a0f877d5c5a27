"""Which of two sides is faster, on a machine that is not quiet.

Both are timed in turns (ABBA), so that what disturbs one disturbs the other; each pair of neighbours gives a ratio, and
the median of the ratios counts. It goes on until the result is clear of the line or time is up.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Pairs of samples: at least, and at most where the lead is close to what decides.
FEWEST, MOST = 6, 30
#: Seconds of a sample, at least.
SECONDS = 0.02
#: Standard errors that the lead must be away from the line.
CLEAR = 3.0


@dataclass(frozen=True)
class Contest:
    """lead: by how much the second side is faster, weighted; times: rows -> median seconds of both; pairs: how many."""

    lead: float
    times: dict[int, tuple[float, float]]
    pairs: int


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one `work()`, from as many as fill :data:`SECONDS`."""
    calls, begin = 0, clock()
    while True:
        work()
        calls += 1
        if (spent := clock() - begin) >= SECONDS:
            return spent / calls


def contest(first: Callable[[int], float], second: Callable[[int], float], weights: Mapping[int, float],
            line: float) -> Contest:  # fmt: skip
    """Time both sides at each number of rows in `weights`.

    first, second
        rows -> seconds, one sample.
    line
        The lead that decides something.
    """
    samples: dict[int, list[tuple[float, float]]] = {rows: [] for rows in weights}
    while True:
        pairs = len(samples[next(iter(weights))])
        if pairs >= FEWEST:
            lead, error = _lead(samples, weights)
            if pairs >= MOST or abs(lead - math.log(line)) > CLEAR * error:
                break
        for rows, taken in samples.items():
            if pairs % 2:
                b, a = second(rows), first(rows)
            else:
                a, b = first(rows), second(rows)
            taken.append((a, b))
    times = {
        rows: (statistics.median(a for a, _ in taken), statistics.median(b for _, b in taken))
        for rows, taken in samples.items()
    }
    return Contest(math.exp(lead), times, pairs)


def _lead(samples: Mapping[int, list[tuple[float, float]]], weights: Mapping[int, float]) -> tuple[float, float]:
    """(logarithm of the weighted lead, its standard error), by medians."""
    lead = variance = 0.0
    for rows, weight in weights.items():
        ratios = [math.log(a / b) for a, b in samples[rows]]
        middle = statistics.median(ratios)
        # The median's standard error, with the spread from absolute deviations: outliers do not count.
        spread = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
        lead += weight * middle
        variance += (weight * 1.2533 * spread) ** 2 / len(ratios)
    return lead, math.sqrt(variance)
