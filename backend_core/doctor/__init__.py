"""``mlx-accel doctor``: is this installation, and is this model directory, fit to run?

Each section is a function without arguments (the installation) or with a model directory, and returns a list
of :class:`Check`. :data:`SECTIONS` is the list of the former; other parts of the core append theirs to it.
"""

from __future__ import annotations

from .checks import SECTIONS, Check, exit_code, run_doctor, to_json

__all__ = ["SECTIONS", "Check", "exit_code", "run_doctor", "to_json"]
