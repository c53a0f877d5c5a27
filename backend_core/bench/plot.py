"""A benchmark's result as a picture (PNG). Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

from ..errors import AccelError

MISSING = "no plot: matplotlib is not installed (pip install matplotlib)"
_COLORS = {"ours": "#1b62d1", "stock": "#9aa0a6", "peer": "#e07a1f"}
_SECOND_PEER = "#a8691f"


def available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw the dict that :func:`.output.result` returns (or that a JSON file holds).

    One line per row, log scale: where the machine's floor is known, each contender's time in multiples of it, so
    that 1 is as fast as the machine allows; otherwise each one's tokens a second. Raises AccelError without
    matplotlib.
    """
    if not available():
        raise AccelError(MISSING)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = [r for r in data["rows"] if r["series"]]
    by_floor = data["bench"] != "generate" and all(r.get("floor_s") for r in rows)
    figure = Figure(figsize=(10, 1.9 + 0.3 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    seen: dict[str, Any] = {}
    previous = ""
    for y, row in enumerate(rows):
        points = [(s, _value(s, row, by_floor)) for s in row["series"]]
        near = [v for s, v in points if s["role"] != "stock"]
        if len(near) > 1:
            axes.plot([min(near), max(near)], [y, y], color="#d5d9de", lw=3, zorder=1, solid_capstyle="round")
        peers = 0
        for s, v in points:
            peers += s["role"] == "peer"
            color = _SECOND_PEER if peers > 1 and s["role"] == "peer" else _COLORS[s["role"]]
            low, high = _range(s, row, by_floor)
            axes.plot([low, high], [y, y], color=color, lw=1.2, alpha=0.6, zorder=2)
            marker = {"ours": "o", "stock": "s", "peer": "D"}[s["role"]]
            label = {"ours": "mlx-accel", "stock": "stock mlx", "peer": "llama.cpp"}[s["role"]]
            artist = axes.scatter([v], [y], s=42, color=color, marker=marker, zorder=3)
            seen.setdefault(label, artist)
            if s["role"] == "peer":
                # Above the first one, below the second, which may be close.
                above = peers == 1
                axes.annotate(s["name"], (v, y), (0, 5 if above else -6), textcoords="offset points", ha="center",
                              va="bottom" if above else "top", fontsize=6.5, color=color)  # fmt: skip
        if row["work"] != previous and y:
            axes.axhline(y - 0.5, color="#e8eaed", lw=0.8, zorder=0)
        previous = row["work"]
    if by_floor:
        axes.axvline(1.0, color="#188038", lw=1.2, zorder=0)
        axes.annotate("floor", (1.0, -0.6), xytext=(0, 1), textcoords="offset points", ha="center", va="bottom",
                      fontsize=7, color="#188038")  # fmt: skip
        axes.set_xlabel("time of a call in multiples of the machine's floor in the same run; 1 is the best possible")
    else:
        axes.set_xlabel("tokens a second")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_plain())
    axes.xaxis.set_minor_formatter("")
    axes.grid(axis="x", which="both", color="#eef0f2", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(rows)), [_label(r, by_floor) for r in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    facts = data["machine"]
    title = f"mlx-accel bench {data['bench']}: {facts['cpu']}, {facts['threads']} threads, {data['date']}"
    figure.suptitle(title, fontsize=10)
    figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, format="png")


def _value(series: dict[str, Any], row: dict[str, Any], by_floor: bool) -> float:
    return series["median_s"] / row["floor_s"] if by_floor else 1.0 / series["median_s"]


def _range(series: dict[str, Any], row: dict[str, Any], by_floor: bool) -> tuple[float, float]:
    samples = series["samples_s"] or [statistics.median([series["median_s"]])]
    ends = [{**series, "median_s": v} for v in (min(samples), max(samples))]
    return _value(ends[0], row, by_floor), _value(ends[1], row, by_floor)


def _label(row: dict[str, Any], by_floor: bool) -> str:
    letter = "L" if "depth" in row["facts"] else "M"
    return f"{row['work']}, {letter}={row['rows']}" if by_floor else str(row["work"])


def _plain() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:g}")
