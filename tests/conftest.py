"""What holds for every test: an own cache, a clean environment and no installed plugins."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from pathlib import Path

import pytest

# A shell starts jobs in the background with SIGINT ignored, and Python leaves it so; tests that interrupt need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PLUGIN_GROUP = "mlx_accel.plugins"


@pytest.fixture
def installed_plugins() -> None:
    """Ask for this to see the plugins that are installed; without it only those under tmp_path exist."""


@pytest.fixture(autouse=True)
def isolation(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX_ACCEL_CACHE in a temporary directory, no other MLX_ACCEL_ variable, no installed plugin.

    Subprocesses inherit the environment, but not the last: give them ``MLX_ACCEL_PLUGINS``. Tests of the
    demo model keep the user's cache, where its conversion is stored.
    """
    for name in [n for n in os.environ if n.startswith("MLX_ACCEL_")]:
        if not (name == "MLX_ACCEL_CACHE" and request.node.get_closest_marker("model")):
            monkeypatch.delenv(name)
    if not request.node.get_closest_marker("model"):
        monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path / "mlx-accel-cache"))
    if "installed_plugins" in request.fixturenames:
        return
    real, here = importlib.metadata.entry_points, tmp_path.resolve()

    def entry_points(**params: str) -> importlib.metadata.EntryPoints:
        found = real(**params)
        if params.get("group") != PLUGIN_GROUP:
            return found
        kept = [e for e in found if e.dist is not None and here in Path(str(e.dist.locate_file(""))).resolve().parents]
        return importlib.metadata.EntryPoints(kept)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
