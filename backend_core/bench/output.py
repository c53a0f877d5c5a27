"""A benchmark's result as data, and as JSON, CSV, Markdown and a table for people.

{"format": 1, "bench": "linear", "date": ..., "command": ..., "machine": {...}, "versions": {...},
 "options": {...}, "limits": {"read_bytes_per_s": ..., "multiply_adds_per_s": ...}, "rows": [Row.as_dict()]}
"""

from __future__ import annotations

import csv
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import machine, native
from ..errors import AccelError
from .measure import Row, Series

FORMAT = 1
#: Columns of the table, in order.
COLUMNS = ("work", "rows", "ours us", "GB/s", "x stock", "peer", "peer us", "x peer", "of floor", "bound by")
#: The same for whole models.
TOKEN_COLUMNS = ("work", "ours tok/s", "x stock", "stock tok/s", "peer", "peer tok/s", "x peer", "GB/s", "of floor")
_LEFT = ("work", "peer", "bound by")
_CSV = ("work", "n", "k", "rows", "bits", "group_size", "dtype", "variant", "detail", "us", "us_min", "us_max", "bytes",
        "gbps", "of_floor", "bound_by", "note")  # fmt: skip


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command as it can be repeated elsewhere: paths without their directories, the peer's as DIR."""
    words, previous = ["mlx-accel"], ""
    for word in sys.argv[1:] if arguments is None else arguments:
        if previous == "--peers":
            words.append("DIR")
        elif word.startswith("--peers="):
            words.append("--peers=DIR")
        else:
            words.append(Path(word).name if word.startswith(("/", "./", "../", "~/")) else shlex.quote(word))
        previous = word
    return " ".join(words)


def result(bench: str, rows: Sequence[Row], options: dict[str, Any], peer: str = "", others: float = 0.0
           ) -> dict[str, Any]:  # fmt: skip
    """Rows with everything a reader needs to judge them.

    peer
        The peer's version.
    others
        CPUs that other processes kept busy meanwhile.
    """
    return {
        "format": FORMAT, "bench": bench, "date": time.strftime("%Y-%m-%d %H:%M"), "command": command_line(),
        "machine": machine_facts(), "versions": versions(peer), "options": options, "cpus_busy_with_others": others,
        "limits": {
            "read_bytes_per_s": _median([v for r in rows for v in r.read]),
            "multiply_adds_per_s": _median([v for r in rows for v in r.fma]),
        },
        "rows": [r.as_dict() for r in rows],
    }  # fmt: skip


def machine_facts() -> dict[str, Any]:
    """The processor and what of it may be used."""
    state = native.status()
    return {
        "cpu": machine.cpu_model(), "cpus": len(machine.affinity()), "threads": threads(),
        "isa": state.isa, "last_level_cache_bytes": last_level_cache(), "system": platform.system(),
        "architecture": platform.machine(), "device": machine.default_device(),
    }  # fmt: skip


def threads() -> int:
    """Threads of CPU kernels now."""
    return int(native.get().threads()) if native.available() else 0


def last_level_cache() -> int:
    """Bytes of the largest cache, 0 if the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
        except (OSError, ValueError):
            continue
    return max(sizes)


def versions(peer: str = "") -> dict[str, str]:
    """Everything a time depends on that has a version."""
    found = {name: machine.version(name) for name in ("mlx-accel", "mlx", "mlx-lm", "numpy")}
    found |= {"python": platform.python_version(), "compiler": str(native.status().build.get("compiler", ""))}
    if peer:
        found["peer"] = peer
    return {name: value for name, value in found.items() if value}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# Cells


def us(series: Series | None) -> str:
    """Median and range in microseconds."""
    if series is None:
        return "-"
    low, high = series.spread
    mark = "*" if series.note else ""
    return f"{_short(series.median)}{mark} ({_short(low)}..{_short(high)})"


def _short(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


def columns(data: dict[str, Any]) -> tuple[str, ...]:
    """Columns of a benchmark's table."""
    return TOKEN_COLUMNS if data["bench"] == "generate" else COLUMNS


def cells(row: Row) -> list[list[str]]:
    """Lines of the table for one row: the first peer beside ours, further ones below."""
    if row.facts.get("unit") == "token":
        return [_token_cells(row)]
    ours, stock, peers = row.ours, row.stock, row.of("peer")
    lead = ours or stock
    _, bound = row.floor(ours.bytes_moved) if ours else (0.0, "")
    first = [
        row.work, str(row.rows), us(ours), f"{ours.gbps:.1f}" if ours else "-",
        _versus(row, stock), "", "", "",
        f"{row.of_floor():.2f}" if bound else "-", bound or "-",
    ]  # fmt: skip
    if ours is None and lead is not None:
        first[2], first[4] = us(lead), "stock runs"
    lines = [first]
    for i, peer in enumerate(peers):
        line = first if i == 0 else [""] * len(COLUMNS)
        line[5:8] = [_peer_name(peer), us(peer), ratio(row.ratio(peer)) if ours else "-"]
        if i:
            lines.append(line)
    return lines


def _versus(row: Row, stock: Series | None) -> str:
    if row.ours is None or stock is None:
        return "-"
    return ratio(row.ratio(stock)) + ("*" if stock.note else "")


def _token_cells(row: Row) -> list[str]:
    ours, stock, peer = row.ours, row.stock, next(iter(row.of("peer")), None)
    assert ours is not None
    bound = row.floor(ours.bytes_moved)[1]
    return [
        row.work, _per_second(ours), ratio(row.ratio(stock)) if stock else "-", _per_second(stock),
        peer.name if peer else "", _per_second(peer), ratio(row.ratio(peer)) if peer else "-",
        f"{ours.gbps:.1f}" if ours.bytes_moved else "-", f"{row.of_floor():.2f}" if bound else "-",
    ]  # fmt: skip


def _per_second(series: Series | None) -> str:
    if series is None:
        return "-"
    low, high = series.spread
    mark = "*" if series.note else ""
    return f"{_count(1 / series.median)}{mark} ({_count(1 / high)}..{_count(1 / low)})"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _peer_name(peer: Series) -> str:
    layout = peer.detail.rpartition(", ")[2]
    if not layout.endswith(" layout") or layout == "plain layout":
        return peer.name
    return f"{peer.name} ({layout.removesuffix(' layout')})"


def notes(rows: Sequence[Row], data: dict[str, Any]) -> list[str]:
    """Sentences below the table."""
    limits = data["limits"]
    found = []
    if limits["read_bytes_per_s"]:
        found.append(
            f"Limits in the same run: {limits['read_bytes_per_s'] / 1e9:.1f} GB/s read, "
            f"{limits['multiply_adds_per_s'] / 1e9:.0f} G float32 multiply-adds/s; the floor of a call is the "
            f"longer of bytes and multiply-adds over these, 'of floor' is floor over ours."
        )  # fmt: skip
    if data["cpus_busy_with_others"] > 0.1:
        found.append(f"Careful: other processes kept {data['cpus_busy_with_others']:.1f} CPUs busy meanwhile.")
    parts = sorted({s.note for r in rows for s in r.of("stock") if s.note})
    if parts:
        shown = "; ".join(parts if len(parts) < 4 else [*parts[:2], "..."])
        found.append(f"Stock is extrapolated from a part where it is slow (*): {shown}.")
    why = {r.work: r.stock.detail for r in rows if r.ours is None and r.stock is not None}
    found += [f"{work}: stock runs ({reason})" for work, reason in why.items()]
    if data["bench"] == "generate":
        # What was selected: a model whose layers a busy machine kept apart runs at half the speed.
        found += dict.fromkeys(f"ours: {r.ours.detail}" for r in rows if r.ours is not None)
    return found


def print_table(rows: Sequence[Row], data: dict[str, Any]) -> None:
    """For people."""
    from rich.table import Table

    from ..cli.tables import _console

    facts = data["machine"]
    table = Table(title=f"{data['bench']}: {facts['cpu']}, {facts['threads']} threads, {facts['isa']}, {data['date']}")
    for column in columns(data):
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for row in rows:
        for line in cells(row):
            table.add_row(*line)
    console = _console()
    console.print(table)
    for note in notes(rows, data):
        console.print(note, markup=False, highlight=False)


# Files


def write(data: dict[str, Any], rows: Sequence[Row], json_file: Path | None = None, csv_file: Path | None = None,
          markdown_file: Path | None = None, plot_file: Path | None = None) -> None:  # fmt: skip
    """Write the files that were asked for, and a plot beside the JSON where matplotlib is installed."""
    if json_file:
        _written(json_file, lambda: json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8"))
    if csv_file:
        _written(csv_file, lambda: write_csv(rows, csv_file))
    if markdown_file:
        _written(markdown_file, lambda: markdown_file.write_text(markdown(rows, data), encoding="utf-8"))
    from . import plot

    if plot_file:
        _written(plot_file, lambda: plot.draw(data, plot_file))
    elif json_file and plot.available():
        beside = json_file.with_suffix(".png")
        _written(beside, lambda: plot.draw(data, beside))
    elif json_file:
        print(plot.MISSING, file=sys.stderr)


def _written(path: Path, write_it: Callable[[], Any]) -> None:
    try:
        write_it()
    except OSError as error:
        raise AccelError(f"{path} cannot be written: {error.strerror or error}") from error


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line for each series of each row."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(_CSV)
        for row in rows:
            for s in row.series:
                if not s.samples:
                    continue
                low, high = s.spread
                seconds, bound = row.floor(s.bytes_moved)
                out.writerow([
                    row.facts.get("layer", row.work), *(row.facts.get(key, "") for key in ("n", "k")), row.rows,
                    *(row.facts.get(key, "") for key in ("bits", "group_size", "dtype")), s.name, s.detail,
                    f"{s.median * 1e6:.2f}", f"{low * 1e6:.2f}", f"{high * 1e6:.2f}", s.bytes_moved, f"{s.gbps:.3f}",
                    f"{seconds / s.median:.4f}", bound, s.note,
                ])  # fmt: skip


def markdown(rows: Sequence[Row], data: dict[str, Any]) -> str:
    """The table with command, machine, versions and date."""
    names = columns(data)
    lines = ["| " + " | ".join(names) + " |", "|" + "|".join(":---" if c in _LEFT else "---:" for c in names) + "|"]
    lines += ["| " + " | ".join(line) + " |" for row in rows for line in cells(row)]
    return "\n".join([*lines, "", *(f"{n}\n" for n in notes(rows, data)), *footer(data)]) + "\n"


def footer(data: dict[str, Any]) -> list[str]:
    """Date, machine, versions and command as a Markdown list."""
    facts = data["machine"]
    cache = facts["last_level_cache_bytes"]
    return [
        f"- date: {data['date']}",
        f"- machine: {facts['cpu']}, {facts['cpus']} CPUs, {facts['threads']} threads, kernels up to {facts['isa']}, "
        f"last-level cache {cache / 2**20:.0f} MiB, {facts['system']} {facts['architecture']}",
        "- versions: " + ", ".join(f"{name} {value}" for name, value in data["versions"].items()),
        f"- command: `{data['command']}`",
    ]  # fmt: skip
