"""A word of help on stock's own exception: checkpoints that stock cannot load and an installed plugin can.

Nothing else changes while no backend is active: stock loads what it can and raises what it raises.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MARK = "_accel_hint"


def install(host: str) -> None:
    """Let the host's ``load_model`` add a hint to what it raises. Once; the host must be imported."""
    utils: Any = sys.modules.get(f"{host}.utils")
    function = getattr(utils, "load_model", None)
    if callable(function) and not hasattr(function, _MARK) and not hasattr(function, "_accel_original"):
        utils.load_model = _with_hint(function)


def _with_hint(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def load_model(model_path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(model_path, *args, **kwargs)
        except Exception as error:
            if text := hint(model_path):
                _add(error, text)
            raise

    setattr(load_model, _MARK, True)
    return load_model


def hint(model_path: Any) -> str:
    """What to do about a model directory in the format of an installed plugin, "" for any other one."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        entries = [config.get(key) for key in ("quantization_config", "quantization")]
    except (OSError, ValueError, TypeError, AttributeError):
        return ""
    from ..manifest import installed_formats

    known = installed_formats()
    for entry in entries:
        method = entry.get("quant_method") if isinstance(entry, Mapping) else None
        if isinstance(method, str) and method in known:
            return (
                f"This checkpoint is in the format {method!r}, which mlx-accel's plugin {known[method]} reads: add "
                "--backend accel to the command, or set MLX_ACCEL_BACKEND=accel."
            )
    return ""


def _add(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)
    elif error.args and isinstance(error.args[0], str) and text not in error.args[0]:  # Python 3.10
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
