"""tools/step.py: a step's bar, its output on failure, its exit code."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "tools" / "step.py"


def load():
    spec = importlib.util.spec_from_file_location("step", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("elapsed", "full"), [(0, 0), (10, 27), (20, 29), (1e6, 29)])
def test_the_bar_fills_and_is_never_full_before_the_end(elapsed, full) -> None:
    assert load().bar(elapsed, 10).count("#") == full


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PATH), "a step", "1", *command], capture_output=True, text=True, timeout=60
    )


def test_success_is_quiet_and_failure_shows_what_the_command_said() -> None:
    good = run(sys.executable, "-c", "print('noise')")
    assert good.returncode == 0 and good.stderr == "a step\n" and good.stdout == ""
    bad = run(sys.executable, "-c", "import sys; print('the cause'); sys.exit(3)")
    assert bad.returncode == 3 and "the cause" in bad.stderr and "failed with exit code 3" in bad.stderr
