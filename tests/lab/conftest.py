"""Kernels are compiled once per test run, into a folder of the run's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend_core.testing import lab


@pytest.fixture(autouse=True, scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    lab.use_cache(tmp_path_factory.mktemp("lab"))
    yield
    lab.use_cache(None)


@pytest.fixture(autouse=True, scope="session")
def compiler(compile_cache: None) -> None:
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
