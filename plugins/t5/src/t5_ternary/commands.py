"""``mlx-accel repack-t5``."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["t5", "affine"]), default="t5", show_default=True,
              help="affine: back to the 2-bit weights of mlx, bit for bit.")  # fmt: skip
@click.option("--verify", is_flag=True, help="Read the result back and compare every tensor with the source.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
def repack_t5(source: Path, destination: Path, to: str, verify: bool, dry_run: bool) -> None:
    """Rewrite a 2-bit ternary checkpoint at 1.75 bits a weight (t5), a fifth smaller.

    SRC is a model directory of mlx with 2-bit weights, DST the directory to be made. Only what is ternary is rewritten;
    everything else is copied, and the output says what and why. The source is not touched.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from . import repack

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<14}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _ending_tidily(), Progress(*columns, console=console, transient=True) as bar:

        def advance(task: object) -> repack.Progress:
            return lambda count, _: bar.advance(task, count)  # type: ignore[arg-type]

        looking = bar.add_task("looking", total=None)
        plan = repack.plan(source, to, advance(looking))
        bar.remove_task(looking)
        repack.check_destination(plan, destination)
        notes: list[str] = []
        if not dry_run:
            task = bar.add_task("writing", total=plan.after * (2 if verify else 1))
            notes = repack.write(plan, destination, verify, advance(task))
    _print(plan, destination, verify, dry_run, notes)


@contextlib.contextmanager
def _ending_tidily() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process as an interrupt does: what is half written is removed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {n: signal.signal(n, end) for n in signals if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(plan: object, destination: Path, verify: bool, dry_run: bool, notes: list[str]) -> None:
    from .repack import Plan

    assert isinstance(plan, Plan)
    what = {"t5": "t5", "affine": "2-bit words"}[plan.to]
    parts = sum(sum(t.nbytes for t in layer.parts) for layer in plan.layers.values())
    click.echo(f"{len(plan.layers)} tensors ({_mb(parts)}) {'would become' if dry_run else 'became'} {what}")
    reasons: dict[str, list[str]] = defaultdict(list)
    for path, reason in plan.copied.items():
        reasons[reason].append(path)
    for reason, paths in sorted(reasons.items()):
        more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
        click.echo(f"copied, {reason}: {', '.join(paths[:4])}{more}")
    for note in notes:
        click.echo(note)
    saved = 1 - plan.after / plan.before
    size = f"{_mb(plan.before)} -> {_mb(plan.after)} ({-saved:+.1%})"
    click.echo(f"{destination}: {size}" + (", nothing written" if dry_run else ", verified" if verify else ""))


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
