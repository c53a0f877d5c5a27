"""Tables for people; everything here also exists as JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..report import STOCK, Decision, Report

_STYLE = {"ready": "green", "ok": "green", "note": "yellow", "fault": "red", "failed": "red", "unmet": "yellow",
          "off": "dim"}  # fmt: skip


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # Piped output must not be folded at 80 columns.
    return console if console.is_terminal else Console(stderr=stderr, width=200)


def print_plugins(records: list[dict[str, Any]]) -> None:
    """`mlx-accel plugins`."""
    table = Table()
    for column in ("plugin", "version", "distribution", "hooks", "kernels", "state", "why not"):
        table.add_column(column, overflow="fold")
    for r in records:
        kernels = ", ".join(f"{k['name']} ({k['device']})" for k in r["kernels"]) or "-"
        why = r["reason"] or (r["faults"][-1]["error"] if r["faults"] else "")
        table.add_row(r["name"], r["version"], r["distribution"], ", ".join(r["hooks"]), kernels,
                      f"[{_STYLE.get(r['state'], '')}]{r['state']}[/]", escape(why))  # fmt: skip
    if records:
        _console().print(table)
    else:
        print("no plugins are installed")


def print_checks(checks: list[Any]) -> None:
    """`mlx-accel doctor`."""
    table = Table()
    for column in ("check", "status", "found", "mend"):
        table.add_column(column, overflow="fold")
    for c in checks:
        table.add_row(c.name, f"[{_STYLE.get(c.status, '')}]{c.status}[/]", escape(c.detail), escape(c.mend))
    _console().print(table)
    faults = sum(c.status == "fault" for c in checks)
    print(f"{faults} fault{'s' if faults != 1 else ''}" if faults else "no faults")


def print_report(report: Report, *, every: bool = False, stderr: bool = False) -> None:
    """`mlx-accel explain`, and ``report=full``."""
    table = Table()
    for column in ("sites", "layer", "shape", "rows", "runs", "x stock", "spread", "how", "others, and why not"):
        # Names matter more than alignment on a narrow terminal: fold them, never cut them.
        table.add_column(column, overflow="fold")
    for group in _groups(report.decisions, every):
        d = group[0]
        for i, bucket in enumerate(d.buckets):
            hi = "" if bucket.rows[1] is None else f"..{bucket.rows[1]}"
            rows = f"{bucket.rows[0]}{hi}" if hi else f"{bucket.rows[0]}+"
            ratio = f"{bucket.ratio:.2f}" if bucket.ratio else "-"
            spread = f"{bucket.spread:.0%}" if bucket.ratio else "-"
            runs = bucket.chosen if bucket.chosen == STOCK else f"[green]{bucket.chosen}[/]"
            first = i == 0
            why = escape("\n".join(f"{loser.offer}: {loser.reason}" for loser in d.losers)) if first else ""
            table.add_row(str(len(group)) if first else "", d.site.path if first else "",
                          _shape(d) if first else "", rows, runs, ratio, spread, bucket.how, why)  # fmt: skip
    console = _console(stderr)
    console.print(table)
    for reason, paths in report.unjoined.items():
        console.print(
            f"not joined: {len(paths)} layers ({paths[0]}{', ...' if paths[1:] else ''}): {reason}", markup=False
        )
    console.print(report.line(), markup=False)


def _groups(decisions: list[Decision], every: bool) -> list[list[Decision]]:
    groups: dict[Any, list[Decision]] = {}
    for i, d in enumerate(decisions):
        # Reasons may name the layer; equal ones but for that belong together.
        reasons = tuple((x.offer, x.reason.replace(d.site.path, "")) for x in d.losers)
        key = i if every else (d.site.signature, d.buckets, reasons)
        groups.setdefault(key, []).append(d)
    return list(groups.values())


def _shape(d: Decision) -> str:
    site: Any = d.site
    return site.describe() if hasattr(site, "describe") else getattr(site, "op", "") or d.site.hook


def print_profile(path: Path, data: dict[str, Any]) -> None:
    """`mlx-accel profile show`."""
    print(path)
    for key, environment in data.get("environments", {}).items():
        facts = environment.get("facts", {})
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(environment.get("when", 0)))
        table = Table("site", "offer", "rows: x stock",
                      title=f"{key}  {when}  {facts.get('cpu')}, {facts.get('threads')} threads, mlx "
                      f"{facts.get('mlx')}, "
                            f"activations {facts.get('activations')}")  # fmt: skip
        for signature, offers in environment.get("races", {}).items():
            for label, race in offers.items():
                rows = ", ".join(
                    f"{m}: " + ("-" if "stock fails" in t.get("how", "") else f"{t['stock'] / t['ours']:.2f}")
                    for m, t in race.get("rows", {}).items()
                    if t["ours"]
                )
                table.add_row(str(race.get("site", signature)), label, rows)
        _console().print(table)
    for entry in data.get("quarantine", {}).values():
        print(f"quarantined: {entry.get('offer')}: {entry.get('reason')}")
    if not data.get("environments"):
        print("no races yet")
