"""The helper modules beside the tests, importable under every import mode; races are remembered by nobody."""

import os
import sys
from pathlib import Path

import pytest

from backend_core.testing.fixtures import lab_compiler

__all__ = ["lab_compiler"]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def isolation(tmp_path_factory, monkeypatch):
    """No MLX_ACCEL_ variable but a cache in a temporary directory."""
    for name in [n for n in os.environ if n.startswith("MLX_ACCEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path_factory.getbasetemp() / "mlx-accel-cache"))
