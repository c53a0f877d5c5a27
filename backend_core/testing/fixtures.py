"""pytest fixtures for tests of kernels; a plugin's conftest.py imports the ones that its tests name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..paths import CACHE_ENV
from . import lab


@pytest.fixture(scope="session")
def lab_compiler() -> None:
    """Skips tests that run kernels in the lab where there is no compiler, and says which package is missing."""
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """For every test of a folder whose conftest.py imports this: a cache in a temporary directory, no other
    ``MLX_ACCEL_`` variable. Without it, races against a stand-in for a GPU would be remembered in the user's profile.

    Tests marked ``model`` keep the user's cache, where the conversion of the demo model is stored.
    """
    model = request.node.get_closest_marker("model") is not None
    # Not by the fixture `monkeypatch`: what a test patches is to be undone before what its other fixtures patched.
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("MLX_ACCEL_")]:
            if not (name == CACHE_ENV and model):
                patch.delenv(name)
        if not model:
            patch.setenv(CACHE_ENV, str(tmp_path / "mlx-accel-cache"))
        yield
