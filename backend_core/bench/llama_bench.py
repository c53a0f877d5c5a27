"""llama-bench of the peer's build, as a function."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .peer import PeerError, find

#: A run that takes longer than this hangs.
_TIMEOUT_S = 1800


def run(directory: Path, gguf: Path, threads: int, *, prompt: int = 0, tokens: int = 0, depth: int = 0,
        repeats: int = 1, extra: Sequence[str] = ()) -> list[float]:  # fmt: skip
    """Seconds a token of `repeats` runs of a prompt of `prompt` tokens or of `tokens` new ones, behind `depth` others.

    Raises PeerError if llama-bench is missing or fails.
    """
    program = find(directory, "llama-bench")
    command = [str(program), "-m", str(gguf), "-t", str(threads), "-p", str(prompt), "-n", str(tokens),
               "-d", str(depth), "-r", str(repeats), "-o", "json", *extra]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"llama-bench cannot be run: {error}") from error
    if done.returncode != 0:
        # Illegal instructions and the like leave no message.
        reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerError(f"llama-bench ended with {reason}: {last}")
    return parse(done.stdout, prompt or tokens)


def parse(text: str, count: int) -> list[float]:
    """Seconds a token from llama-bench's JSON. Raises PeerError if it is none."""
    try:
        [entry] = json.loads(text)
        return [float(ns) / 1e9 / count for ns in entry["samples_ns"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"llama-bench's output is not understood: {text[:200]!r}") from error
