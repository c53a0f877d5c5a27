"""Loading a model for inspection, stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..policy import Policy


def load_stock(name: str, policy: Policy | None = None) -> Any:
    """The model in directory (or repository) `name` as mlx-lm or mlx-vlm loads it, layers as they come.

    Formats of plugins are read by them, under `policy`. Raises ModelError if the directory does not exist or is
    damaged, UnknownQuantization for a format that neither stock nor a plugin knows.
    """
    import importlib
    import json

    from .. import core
    from ..integrations import loading

    path = Path(name).expanduser()
    if not path.exists():
        if name.startswith(("/", ".", "~")) or name.count("/") != 1:
            raise ModelError(f"model directory {name} does not exist")
        path = Path(importlib.import_module("mlx_lm.utils")._download(name))
    if path.is_file():
        raise ModelError(f"{name} is a file; a model is a directory with config.json and *.safetensors")
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} has no config.json; it is not a model directory") from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}/config.json cannot be read: {error}") from error
    plugins = core.plugin_host(policy)

    def load(host: str) -> Any:
        function = importlib.import_module(f"{host}.utils").load_model
        original = getattr(function, "_accel_original", function)
        arguments, adapted = loading.adapt(plugins, host, path, original, {"model_path": path})
        try:
            return loading.call(host, original, arguments)
        except Exception as error:
            lacks = host == "mlx_lm" and isinstance(error, ValueError) and "not supported" in str(error)
            if not lacks or importlib.util.find_spec("mlx_vlm") is None:
                loading.raise_if_damaged(path, error, ignore_format=bool(adapted))
                raise
        return load("mlx_vlm")

    result = load("mlx_lm")
    return result[0] if isinstance(result, tuple) else result
