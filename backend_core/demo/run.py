"""The demo: mlx-lm's own command line, stock and accelerated, side by side.

Every figure in the table is one that ``mlx_lm generate`` printed in a process of its own; nothing is measured
here.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .model import DemoModelError, demo_model_dir

PROMPT = "Why is the sky blue?"
MAX_TOKENS = 32
#: 128 tokens with the model's chat template.
LONG_PROMPT = (
    "A lighthouse stands on a rock two miles from the shore. Its keeper counts the ships that pass: on "
    "Monday nine ships, on Tuesday fourteen, on Wednesday none at all because of the fog, and on Thursday "
    "twenty. The keeper writes the numbers in a book, together with the wind, the height of the waves and "
    "the colour of the evening sky. On Friday a storm takes the book into the sea. Tell me what the "
    "keeper should do now, and give one good reason why."
)
LONG_NEW_TOKENS = 8
#: Stock computes half precision in software on a CPU, about 0.2 tokens a second: it gets this much to do.
SHORT_PROMPT, SHORT_NEW_TOKENS = "The sky is blue", 4

GENERATE: tuple[str, ...] = (sys.executable, "-m", "mlx_lm", "generate")

_OUTPUT = re.compile(
    r"^={10}\n(?P<text>.*)\n={10}\n"
    r"Prompt: (?P<prompt_tokens>\d+) tokens, (?P<prompt_tps>\S+) tokens-per-sec\n"
    r"Generation: (?P<new_tokens>\d+) tokens, (?P<new_tps>\S+) tokens-per-sec$",
    re.DOTALL | re.MULTILINE,
)


class RunFailed(RuntimeError):
    """A child process failed; the message holds its command, exit code and error output."""


@dataclass(frozen=True)
class Figures:
    """What one run of ``mlx_lm generate`` printed; rates are tokens per second, `report` is mlx-accel's line."""

    text: str
    prompt_tokens: int
    prompt_tps: float
    new_tokens: int
    new_tps: float
    report: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table; `same` is True if both runs wrote the same text."""

    what: str
    stock: float
    accel: float
    same: bool


def command(model: Path, prompt: str, max_tokens: int, *, backend: str = "", template: bool = True) -> list[str]:
    """The command line of one greedy run. `template` False hands the prompt over as it is."""
    words = [
        *GENERATE,
        "--model",
        str(model),
        "--prompt",
        prompt,
        "--max-tokens",
        str(max_tokens),
        "--temp",
        "0",
    ]
    if not template:
        words.append("--ignore-chat-template")
    if backend:
        words += ["--backend", backend]
    return words


def parse(output: str) -> Figures:
    """The figures in what ``mlx_lm generate`` printed. Raises ValueError if there are none."""
    found = _OUTPUT.search(output.replace("\r\n", "\n"))
    if found is None:
        raise ValueError("the output has no 'Prompt: N tokens, X tokens-per-sec' lines")
    return Figures(
        text=found["text"],
        prompt_tokens=int(found["prompt_tokens"]),
        prompt_tps=float(found["prompt_tps"]),
        new_tokens=int(found["new_tokens"]),
        new_tps=float(found["new_tps"]),
    )


def child_environment(backend: str) -> dict[str, str]:
    """The environment of a child: stock is stock whatever the caller's environment asks for."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    environment.pop("MLX_ACCEL_BACKEND", None)
    if not backend:
        environment["MLX_ACCEL_NO_HOOK"] = "1"
    return environment


def run_child(words: Sequence[str], *, backend: str = "", on_output: Callable[[], None] | None = None) -> Figures:
    """Run one command to its end and read its figures.

    on_output
        Called for each piece of output as it arrives, about once a token.

    Raises :class:`RunFailed`. The child is ended if this process is interrupted.
    """
    with tempfile.TemporaryFile() as errors:  # a file, not a pipe: nobody would empty the pipe
        try:
            child = subprocess.Popen(list(words), stdout=subprocess.PIPE, stderr=errors, env=child_environment(backend))
        except OSError as error:
            raise RunFailed(f"{words[0]} cannot be started: {error}") from error
        pieces = []
        assert child.stdout is not None
        try:
            while piece := os.read(child.stdout.fileno(), 65536):
                pieces.append(piece)
                if on_output is not None:
                    on_output()
            status = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            child.stdout.close()
        errors.seek(0)
        stderr = errors.read().decode("utf-8", "replace").strip()
    output = b"".join(pieces).decode("utf-8", "replace")
    said = stderr or output.strip() or "(no output)"
    if status != 0:
        how = f"exit code {status}" if status > 0 else f"signal {-status}"
        raise RunFailed(f"{' '.join(words)}\nfailed with {how} and said:\n{said}")
    try:
        figures = parse(output)
    except ValueError as error:
        raise RunFailed(f"{' '.join(words)}\nprinted no figures ({error}); it said:\n{said}") from error
    report = [line for line in stderr.splitlines() if line.startswith("[accel] ")]
    return dataclasses.replace(figures, report=report[-1] if report else "")


def run_demo(console: Console, prompt: str = PROMPT, max_tokens: int = MAX_TOKENS, scales: str = "fp32") -> int:
    """Run the demo and print its table.

    scales
        ``"fp32"`` or ``"fp16"``, see :func:`backend_core.demo.demo_model_dir`. With fp16 on a CPU, stock is
        timed over 4 prompt and 4 new tokens only, and its text is taken from the fp32 checkpoint, which
        holds the same weights.

    Returns 0, or 1 with a message if a run fails or if accelerated text differs from stock's.
    """
    try:
        rows, texts, note = _measure(console, prompt, max_tokens, scales)
    except (DemoModelError, RunFailed) as error:
        console.print(f"[bold red]The demo failed.[/] {escape(str(error))}", highlight=False)
        console.print("`mlx-accel doctor` checks the installation.", highlight=False)
        return 1
    console.print(_table(rows, scales))
    if note.strip():
        console.print(note.strip(), highlight=False, markup=False, soft_wrap=True)
    wrong = [(stock, accel) for stock, accel in texts if stock != accel]
    for stock, accel in wrong:
        console.print("[bold red]The accelerated text differs from stock's.[/]")
        console.print(f"stock: {stock!r}\naccel: {accel!r}", markup=False, highlight=False)
    return 1 if wrong else 0


def _measure(
    console: Console, prompt: str, max_tokens: int, scales: str
) -> tuple[list[Row], list[tuple[str, str]], str]:
    """Rows, (stock, accel) text pairs and a note, from four to five child processes."""
    model = _model(console, scales)
    slow = scales == "fp16" and _on_cpu()
    reference = _model(console, "fp32") if slow else model

    def run(title: str, where: Path, text: str, tokens: int, backend: str = "", template: bool = True) -> Figures:
        words = command(where, text, tokens, backend=backend, template=template)
        return _step(console, title, words, tokens, backend)

    suffix = ", fp32 scales for the text" if slow else ""
    stock = run(f"stock, short prompt{suffix}", reference, prompt, max_tokens)
    accel = run("accel, short prompt", model, prompt, max_tokens, "accel")
    stock_long = run(f"stock, long prompt{suffix}", reference, LONG_PROMPT, LONG_NEW_TOKENS)
    accel_long = run("accel, long prompt", model, LONG_PROMPT, LONG_NEW_TOKENS, "accel")
    same, same_long = stock.text == accel.text, stock_long.text == accel_long.text
    note = accel_long.report
    timed, timed_long = stock, stock_long
    if slow:
        timed = timed_long = run("stock, fp16 scales, 4 tokens", model, SHORT_PROMPT, SHORT_NEW_TOKENS, template=False)
        note += (
            f"\nStock was timed over {timed.prompt_tokens} prompt and {timed.new_tokens} new tokens; its text "
            "comes from the fp32 checkpoint of the same weights."
        )
    rows = [
        Row(f"prompt tok/s, {accel.prompt_tokens} tokens", timed.prompt_tps, accel.prompt_tps, same),
        Row(f"decode tok/s, {accel.new_tokens} tokens", timed.new_tps, accel.new_tps, same),
        Row(
            f"prompt tok/s, {accel_long.prompt_tokens} tokens",
            timed_long.prompt_tps,
            accel_long.prompt_tps,
            same_long,
        ),
    ]
    return rows, [(stock.text, accel.text), (stock_long.text, accel_long.text)], note


def _on_cpu() -> bool:
    from ..machine import default_device

    return default_device() == "cpu"


def _bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # Into a file or a pipe a bar would only leave blank lines.
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _model(console: Console, scales: str) -> Path:
    """The model directory, with a bar while it is being converted."""
    with _bar(console) as bar:
        task = bar.add_task(f"demo model, {scales} scales", total=1.0)
        return demo_model_dir(
            scales, lambda step, done: bar.update(task, description=f"demo model: {step}", completed=done)
        )


def _step(console: Console, title: str, words: Sequence[str], tokens: int, backend: str) -> Figures:
    """One child behind a bar: pulsing while it loads and reads the prompt, then token by token."""
    start = time.perf_counter()
    with _bar(console) as bar:
        task = bar.add_task(title, total=None)

        def advance() -> None:
            # A piece of output is about a token; the bar need not be exact, only moving.
            bar.update(task, total=tokens, advance=1)

        figures = run_child(words, backend=backend, on_output=advance)
    console.print(f"{title}: {time.perf_counter() - start:.1f} s", style="dim", highlight=False)
    return figures


def _table(rows: Sequence[Row], scales: str) -> Table:
    table = Table(title=f"SmolLM2-135M-Instruct, 4-bit, {scales} scales")
    table.add_column("")
    for name in ("stock", "accel", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("same greedy text")
    for row in rows:
        ratio = f"{row.accel / row.stock:.1f}x" if row.stock > 0 else "-"
        same = "yes" if row.same else "[bold red]no[/]"
        table.add_row(row.what, f"{row.stock:.2f}", f"{row.accel:.2f}", ratio, same)
    return table
