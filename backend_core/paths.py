"""Where mlx-accel keeps files of its own: converted demo models and the profile of measured races.

Everything below one directory that may be deleted at any time. ``MLX_ACCEL_CACHE`` names another one.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Environment variable that overrides :func:`cache_dir`.
CACHE_ENV = "MLX_ACCEL_CACHE"


def cache_dir() -> Path:
    """The cache root of this user. It need not exist yet."""
    override = os.environ.get(CACHE_ENV, "").strip()
    if override:
        return Path(override).expanduser().absolute()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("mlx-accel", appauthor=False))


def models_dir() -> Path:
    """Parent of the converted models. It need not exist yet."""
    return cache_dir() / "models"


def profile_path() -> Path:
    """The file of measured races. It need not exist yet."""
    return cache_dir() / "profile.json"
