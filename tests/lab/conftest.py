"""Tests of the lab need a C++ compiler."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def compiler(lab_compiler) -> None:
    pass
