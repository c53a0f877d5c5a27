"""``--backend`` and ``--backend-option`` for every parser of mlx-lm and mlx-vlm.

Their commands build argparse parsers in many places and all call ``parse_args``, which funnels through
``ArgumentParser.parse_known_args``. That method is wrapped once, before the host package's own code runs.
The wrapper acts only if the code that parses belongs to a host package; other programs in the same process
see plain argparse.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any

from .. import backends
from ..errors import AccelError

HOSTS = ("mlx_lm", "mlx_vlm")
_BACKEND, _OPTION = "_mlx_accel_backend", "_mlx_accel_option"
_inside = threading.local()


def install() -> None:
    """Wrap ``ArgumentParser.parse_known_args`` once."""
    original = argparse.ArgumentParser.parse_known_args
    if getattr(original, "_mlx_accel", False):
        return

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None,
                         **kwargs: Any) -> Any:  # fmt: skip
        command = "" if getattr(_inside, "parsing", False) else host_command(sys._getframe(1))
        # A host that grows its own --backend keeps it; sub-parsers are handled by their parent.
        ours = getattr(self, "_mlx_accel", False)
        if not command or ("--backend" in self._option_string_actions and not ours):
            return original(self, args, namespace, **kwargs)
        if not ours:
            _add_options(self)
            self._mlx_accel = True  # type: ignore[attr-defined]
        _inside.parsing = True
        try:
            parsed, rest = original(self, args, namespace, **kwargs)
        finally:
            _inside.parsing = False
        # Hosts store and compare vars(args): leave no trace in it.
        name = parsed.__dict__.pop(_BACKEND, None)
        options = parsed.__dict__.pop(_OPTION, None) or []
        _apply(self, name, options, command, parsed)
        return parsed, rest

    parse_known_args._mlx_accel = True  # type: ignore[attr-defined]
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def host_command(frame: Any) -> str:
    """Dotted name of the host module whose code parses, "" if the caller is not a host.

    ``python -m mlx_lm.generate`` runs the module as ``__main__``; its spec still knows the name.
    """
    while frame is not None and frame.f_globals.get("__name__") in ("argparse", __name__):
        frame = frame.f_back
    if frame is None:
        return ""
    names = frame.f_globals
    name = names.get("__name__", "")
    if name == "__main__":
        spec = names.get("__spec__")
        name = spec.name if spec is not None else ""
    return name if name.partition(".")[0] in HOSTS else ""


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("acceleration (mlx-accel)")
    group.add_argument(
        "--backend", dest=_BACKEND, metavar="NAME",
        help=f"acceleration backend: {', '.join(backends.names())} (mlx is stock). "
             f"Default: $MLX_ACCEL_BACKEND, else mlx.",
    )  # fmt: skip
    group.add_argument(
        "--backend-option", dest=_OPTION, metavar="KEY=VALUE", action="append",
        help="option of the backend, repeatable: plugins=+name,-name  allow=lossy  race=on|off|force  "
             "deterministic=1  activations=auto|model|float32  strict=1  report=short|full|json|none",
    )  # fmt: skip


def _apply(parser: argparse.ArgumentParser, name: str | None, options: list[str], command: str, parsed: Any
           ) -> None:  # fmt: skip
    given = name is not None
    name = name or os.environ.get("MLX_ACCEL_BACKEND", "").strip() or None
    if name is None:
        if options:
            parser.error("argument --backend-option: needs --backend NAME")
        name = backends.STOCK
    try:
        backends.switch_to(name, options, command)
    except (AccelError, ValueError) as error:
        text = str(error)
        if isinstance(error, LookupError):
            text = f"{'argument --backend' if given else 'environment variable MLX_ACCEL_BACKEND'}: {text}"
        elif not text.startswith("environment variable"):
            text = f"argument --backend-option: {text}"
        parser.error(text)
    if name == backends.STOCK:
        return
    model = getattr(parsed, "model", None)
    # A path that does not exist would be taken for a repository name and looked up on the network.
    if isinstance(model, str) and model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        parser.error(f"argument --model: {model} does not exist")
