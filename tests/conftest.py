"""What holds for every test: no installed plugins (and, as everywhere, a cache of its own)."""

from __future__ import annotations

import importlib.metadata
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
    """No installed plugin. Subprocesses do not inherit that: give them ``MLX_ACCEL_PLUGINS``."""
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
