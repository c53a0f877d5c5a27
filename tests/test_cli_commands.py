"""Commands that plugins add to mlx-accel: listed, run, and harmless when they are broken."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers import ROOT, python

from backend_core.cli import main


def add(root: Path, name: str, commands: Mapping[str, str], source: str = "") -> Path:
    """A distribution in a directory of its own that announces `commands`; `source` is its module <name>_module."""
    folder = root / name
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in commands.items()]
    (info / "entry_points.txt").write_text("[mlx_accel.commands]\n" + "\n".join(lines) + "\n")
    (folder / f"{name}_module.py").write_text(source)
    return folder


GREET = """
import click

@click.command()
@click.argument("who")
@click.option("--fail", is_flag=True)
def greet(who, fail):
    "Say hello to WHO."
    from backend_core.errors import ModelError
    if fail:
        raise ModelError(f"{who} is not there")
    click.echo(f"hello {who}")

no_command = 3
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Call with add()'s arguments: the distribution is importable and announced."""

    def use(name: str, commands: Mapping[str, str], source: str = GREET) -> None:
        monkeypatch.syspath_prepend(str(add(tmp_path, name, commands, source)))

    before = set(sys.modules)
    yield use
    for module in set(sys.modules) - before:
        if module.endswith("_module"):
            del sys.modules[module]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_a_command_is_listed_and_runs(installed):
    installed("alpha", {"greet-x": "alpha_module:greet"})
    listing = call("--help")
    assert listing.exit_code == 0 and "greet-x" in listing.stdout and "Say hello to WHO." in listing.stdout
    assert "plugins" in listing.stdout
    run = call("greet-x", "Ada")
    assert (run.exit_code, run.stdout) == (0, "hello Ada\n")
    assert "Say hello to WHO." in call("greet-x", "--help").stdout


def test_errors_on_purpose_end_like_those_of_the_core(installed):
    installed("alpha", {"greet-x": "alpha_module:greet"})
    run = call("greet-x", "Ada", "--fail")
    assert run.exit_code == 2 and run.stderr == "mlx-accel: error: Ada is not there\n"
    assert call("greet-x").exit_code == 2


def test_the_cores_commands_keep_their_names(installed):
    installed("alpha", {"plugins": "alpha_module:greet"})
    run = call("plugins", "--json")
    assert run.exit_code == 0 and "hello" not in run.stdout


@pytest.mark.parametrize(
    ("entry", "source", "why"),
    [
        ("alpha_module:greet", "raise RuntimeError('no such device')", "RuntimeError: no such device"),
        ("alpha_module:greet", "raise SystemExit(3)", "SystemExit: 3"),
        ("alpha_module:greet", "", "AttributeError"),
        ("missing_module:greet", GREET, "ModuleNotFoundError"),
        ("alpha_module:no_command", GREET, "is no click command but a int"),
    ],
)
def test_a_broken_command_is_named_and_harms_nothing(installed, entry, source, why):
    installed("alpha", {"greet-x": entry}, source)
    listing = call("--help")
    assert listing.exit_code == 0 and "greet-x" in listing.stdout and "unusable" in listing.stdout
    run = call("greet-x", "Ada", "--fail", "--help")
    assert run.exit_code == 2 and run.stdout == ""
    assert run.stderr.startswith("mlx-accel: error: command 'greet-x' cannot be used: ")
    assert "alpha" in run.stderr and why in run.stderr
    assert call("plugins", "--json").exit_code == 0


def test_one_name_announced_twice_is_refused(installed):
    installed("alpha", {"greet-x": "alpha_module:greet"})
    installed("beta", {"greet-x": "beta_module:greet"})
    run = call("greet-x", "Ada")
    assert run.exit_code == 2 and "announced by alpha and beta" in run.stderr


def test_unknown_commands_stay_unknown():
    run = call("greet-x")
    assert run.exit_code == 2 and "No such command 'greet-x'" in run.stderr


def test_nothing_is_imported_for_other_commands(tmp_path):
    folder = add(tmp_path, "alpha", {"greet-x": "alpha_module:greet"}, "print('imported')\n" + GREET)
    code = "from backend_core.cli import main; main(['plugins', '--json'])"
    done = python("-c", code, path=[folder, ROOT])
    assert done.returncode == 0, done.stderr
    assert "imported" not in done.stdout
