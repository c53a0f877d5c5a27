"""Tests of the lab need a C++ compiler."""

from __future__ import annotations

import pytest

from backend_core.testing import lab


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
