"""Loading a model for inspection, stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ModelError


def load_stock(name: str) -> Any:
    """The model in directory (or repository) `name` as stock mlx-lm or mlx-vlm loads it.

    Raises ModelError if the directory does not exist or is damaged, UnknownQuantization for a format that
    stock does not know.
    """
    import importlib
    import json

    from ..checkpoints import check_quantization
    from ..integrations.loading import raise_if_damaged

    path = Path(name).expanduser()
    if not path.exists():
        if name.startswith(("/", ".", "~")) or name.count("/") != 1:
            raise ModelError(f"model directory {name} does not exist")
        path = Path(importlib.import_module("mlx_lm.utils")._download(name))
    if path.is_file():
        raise ModelError(f"{name} is a file; a model is a directory with config.json and *.safetensors")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} has no config.json; it is not a model directory") from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}/config.json cannot be read: {error}") from error
    check_quantization(config, path)
    load = importlib.import_module("mlx_lm.utils").load_model
    try:
        return getattr(load, "_accel_original", load)(path)[0]
    except ValueError as error:
        if "not supported" not in str(error) or importlib.util.find_spec("mlx_vlm") is None:
            raise_if_damaged(path, error)
            raise
        load = importlib.import_module("mlx_vlm.utils").load_model
        return getattr(load, "_accel_original", load)(path)
    except Exception as error:
        raise_if_damaged(path, error)
        raise
