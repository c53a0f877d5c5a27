"""Runs one step of an installation with a progress bar: step.py TITLE SECONDS COMMAND...

The bar fills along the SECONDS the step usually takes and never claims to be done before it is. Where there is
no terminal only the title is printed. The command's output is shown if it fails. Standard library only, since
nothing is installed yet.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

WIDTH = 30


def bar(elapsed: float, usual: float) -> str:
    """A bar for `elapsed` seconds of a step that usually takes `usual`: nine tenths full by then, never full."""
    share = 1.0 - 0.1 ** (elapsed / max(usual, 0.1))
    full = min(int(WIDTH * share), WIDTH - 1)
    return f"[{'#' * full}{'.' * (WIDTH - full)}] {elapsed:4.0f} s"


def main(title: str, usual: float, command: list[str]) -> int:
    terminal = sys.stderr.isatty()
    begin = time.monotonic()
    if not terminal:
        print(title, file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while child.poll() is None:
                if terminal:
                    print(f"\r{title:<44} {bar(time.monotonic() - begin, usual)}", end="", file=sys.stderr, flush=True)
                try:
                    child.wait(0.2)
                except subprocess.TimeoutExpired:
                    pass
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            return 130
        if terminal:
            print(f"\r{title:<44} [{'#' * WIDTH}] {time.monotonic() - begin:4.0f} s", file=sys.stderr, flush=True)
        if child.returncode:
            log.seek(0)
            sys.stderr.write(log.read().decode("utf-8", "replace"))
            print(f"\n{title}: failed with exit code {child.returncode}: {' '.join(command)}", file=sys.stderr)
        return child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
