"""What holds for a whole run: every test has a cache of its own, kernels compiled by the lab are kept, mlx's own are
tested only when asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from backend_core.testing import lab
from backend_core.testing.fixtures import lab_compiler, own_cache

__all__ = ["lab_compiler", "own_cache"]  # fixtures for everybody

# A run gives the same answer twice: what a property test tries is fixed by the test itself. With
# --hypothesis-profile explore every run tries other examples.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")

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


# Tests of mlx's own kernels compile a lot of other people's text.
UPSTREAM = "upstream_kernels"
_not_run = pytest.StashKey[int]()


def _asked(config: pytest.Config) -> bool:
    named = any(UPSTREAM in argument for argument in config.args)
    return named or UPSTREAM in (config.option.markexpr or "") or os.environ.get("MLX_ACCEL_UPSTREAM") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _asked(config):
        return
    dropped = [i for i in items if i.get_closest_marker(UPSTREAM)]
    config.stash[_not_run] = len(dropped)
    items[:] = [i for i in items if not i.get_closest_marker(UPSTREAM)]
    config.hook.pytest_deselected(items=dropped)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes, which collect the tests each
        session.config.workeroutput[UPSTREAM] = session.config.stash.get(_not_run, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_not_run] = getattr(node, "workeroutput", {}).get(UPSTREAM, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(_not_run, 0):
        terminalreporter.write_line(
            f"{count} tests of mlx's own Metal kernels were not run: they take half a minute and may download 78 MB. "
            f"Ask for them with -m {UPSTREAM} or MLX_ACCEL_UPSTREAM=1."
        )
