"""Commands that plugins add to ``mlx-accel``.

A distribution announces them in the entry-point group ``mlx_accel.commands``; each is a click command::

    [project.entry-points."mlx_accel.commands"]
    repack-x = "my_plugin.commands:repack_x"

A command is imported when it is called, or for the line it has in ``--help``. The core's own commands keep their names.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import click

from ..errors import PluginError

ENTRY_POINT_GROUP = "mlx_accel.commands"


def names() -> list[str]:
    """Names of all announced commands."""
    return sorted({e.name for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)})


def get(name: str) -> click.Command | None:
    """The command called `name`, None if nobody announces one.

    One that cannot be imported, is no click command, or is announced by two distributions raises PluginError when it is
    called, and says so in listings; ``--help`` and the other commands do not suffer from it.
    """
    found = [e for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == name]
    if not found:
        return None
    owners = sorted({e.dist.name if e.dist else e.value for e in found})
    if len(owners) > 1:
        return _unusable(name, f"announced by {' and '.join(owners)}; uninstall one of them")
    try:
        command: Any = found[0].load()
    except (Exception, SystemExit) as error:
        return _unusable(name, f"{owners[0]} cannot be loaded: {type(error).__name__}: {error}")
    if not isinstance(command, click.Command):
        return _unusable(name, f"what {owners[0]} announces is no click command but a {type(command).__name__}")
    return command


def _unusable(name: str, why: str) -> click.Command:
    def callback() -> None:
        raise PluginError(f"command {name!r} cannot be used: {why}")

    # Whatever its arguments are, the message is this one.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(name, callback=callback, short_help=f"(unusable: {why})", context_settings=settings)
