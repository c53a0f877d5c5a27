"""``mlx-accel``: what is installed, what would run and why, what it brings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import AccelError
from ..policy import Policy
from . import extra

OPTION_HELP = "Policy option KEY=VALUE, repeatable (as --backend-option of mlx_lm.generate)."


class _Group(click.Group):
    """One message and exit code 2 for every error raised on purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        from ..checkpoints import UnknownQuantization

        try:
            return super().invoke(ctx)
        except (AccelError, UnknownQuantization) as error:
            click.echo(f"mlx-accel: error: {error}", err=True)
            ctx.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *extra.names()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return super().get_command(ctx, name) or extra.get(name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-accel")
def main() -> None:
    """Pluggable acceleration for mlx-lm and mlx-vlm."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help=OPTION_HELP)
def plugins(as_json: bool, options: tuple[str, ...]) -> None:
    """List plugins: version, hooks, state, and why one does not serve."""
    from .. import core
    from . import tables

    records = [r.as_dict() for r in core.plugin_host(Policy.from_options(options)).all_records()]
    if as_json:
        click.echo(json.dumps(records, indent=1))
    else:
        tables.print_plugins(records)


@main.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--all", "every", is_flag=True, help="One line per site instead of one per group of equal sites.")
@click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help=OPTION_HELP)
def explain(model: str, as_json: bool, every: bool, options: tuple[str, ...]) -> None:
    """Print the decision for every site of MODEL, with ratios and reasons."""
    from .. import core
    from . import models, tables

    policy = Policy.from_options(options)
    loaded = models.load_stock(model, policy)
    report = core.accelerate(loaded, policy)
    for note in loaded.__dict__.pop("_accel_notes", ()):
        report.note(note)
    if as_json:
        click.echo(report.to_json())
    else:
        tables.print_report(report, every=every)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--model", "option", type=click.Path(path_type=Path), help="Also check a model directory.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
def doctor(as_json: bool, option: Path | None, model: Path | None) -> None:
    """Check the installation (and MODEL, a directory). Exit code 1 on a fault; each fault comes with its mend."""
    from ..doctor import run_doctor, to_json
    from . import tables

    checks = run_doctor(option or model)
    if as_json:
        click.echo(to_json(checks))
    else:
        tables.print_checks(checks)
    sys.exit(1 if any(c.status == "fault" for c in checks) else 0)


@main.group(invoke_without_command=True)
@click.pass_context
def profile(ctx: click.Context) -> None:
    """The file of measured races: show or clear it."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(show)


@profile.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def show(as_json: bool) -> None:
    """Print what was measured on this machine."""
    from .. import paths
    from . import tables

    path = paths.profile_path()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        data = {}
    except (OSError, ValueError) as error:
        raise AccelError(f"profile {path} cannot be read: {error}. `mlx-accel profile clear` removes it") from error
    if as_json:
        click.echo(json.dumps({"path": str(path), **data}, indent=1))
    else:
        tables.print_profile(path, data)


@profile.command()
def clear() -> None:
    """Forget all races and lift every quarantine."""
    import shutil

    from .. import paths

    path = paths.profile_path()
    existed = path.exists()
    try:
        path.unlink(missing_ok=True)
        shutil.rmtree(path.parent / "inflight", ignore_errors=True)
    except OSError as error:
        raise AccelError(f"profile {path} cannot be removed: {error.strerror}") from error
    click.echo(f"removed {path}" if existed else f"nothing to remove ({path} does not exist)")


@main.command()
@click.option("--prompt", help="Prompt of the decode comparison.")
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True)
@click.option("--scales", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True,
              help="dtype of the converted model's scales; fp16 is what hubs ship.")  # fmt: skip
@click.option("--print-model", is_flag=True, help="Only print the converted model's directory.")
def demo(prompt: str | None, max_tokens: int, scales: str, print_model: bool) -> None:
    """Run a real model (SmolLM2-135M-Instruct) stock and accelerated, side by side."""
    from rich.console import Console

    from ..demo.model import demo_model_dir

    if print_model:
        click.echo(str(demo_model_dir(scales)))
        return
    from ..demo.run import run_demo

    kwargs: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
    sys.exit(run_demo(Console(), max_tokens=max_tokens, scales=scales, **kwargs))


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("module")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(module: str, arguments: tuple[str, ...]) -> None:
    """Run a host command with --backend accel where the start-up hook is not active.

    mlx-accel run mlx_lm.generate --model M --prompt P
    """
    import importlib.util

    from ..integrations import activate
    from ..integrations import arguments as parser_hook

    if module.partition(".")[0] not in parser_hook.HOSTS:
        raise click.UsageError(f"{module} is not a command of {' or '.join(parser_hook.HOSTS)}")
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        host = module.partition(".")[0]
        if importlib.util.find_spec(host) is None:
            raise click.UsageError(f"there is no module {module}: {host} is not installed")
        raise click.UsageError(f"there is no module {module}{_meant(module)}")
    parser_hook.install()
    activate._watch_imports()
    # Given first, so that a --backend of the user's own still wins.
    sys.argv = [module, "--backend", "accel", *arguments]
    command = getattr(importlib.import_module(module), "main", None)
    if command is None:
        raise click.UsageError(f"{module} has no main() and is no command")
    sys.exit(command())


def _meant(module: str) -> str:
    """Commands of the host with a similar name, as a question."""
    import difflib
    import importlib.metadata

    scripts = {e.name for e in importlib.metadata.entry_points(group="console_scripts")}
    close = difflib.get_close_matches(module, sorted(s for s in scripts if s.startswith(module[:6])), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


from .bench import bench  # noqa: E402

main.add_command(bench)
