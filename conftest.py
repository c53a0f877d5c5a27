"""Kernels that the lab compiles are kept from run to run, for every process of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_core.testing import lab

KEPT_S = 3 * 24 * 3600  # compiled again after that, so that those of texts that are no more go


@pytest.fixture(autouse=True, scope="session")
def compile_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The lab's folder in pytest's cache, which ``--cache-clear`` empties; a name holds a hash of all that it is made
    of, so nothing in it is ever out of date."""
    cache = getattr(request.config, "cache", None)  # None with -p no:cacheprovider
    folder = tmp_path_factory.mktemp("lab") if cache is None else cache.mkdir("lab")
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_mtime < time.time() - KEPT_S:
            path.unlink(missing_ok=True)
    lab.use_cache(folder)
    yield folder
    lab.use_cache(None)
