"""pytest fixtures for tests of kernels; a plugin's conftest.py imports the ones that its tests name."""

from __future__ import annotations

import pytest

from . import lab


@pytest.fixture(scope="session")
def lab_compiler() -> None:
    """Skips tests that run kernels in the lab where there is no compiler, and says which package is missing."""
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
