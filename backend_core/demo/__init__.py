"""The demo: a small real model and the side-by-side run of ``make demo``."""

from __future__ import annotations

from .model import DemoModelError, demo_model_dir

__all__ = ["DemoModelError", "demo_model_dir"]
