"""These tests compile other people's kernels, which takes half a minute, so they run only when they are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from upstream_kernels import headers

from backend_core.paths import cache_dir
from backend_core.testing import lab

GROUP = "upstream_kernels"
_not_run = pytest.StashKey[int]()


def _asked(config: pytest.Config) -> bool:
    named = any(GROUP in argument for argument in config.args)
    return named or GROUP in (config.option.markexpr or "") or os.environ.get("MLX_ACCEL_UPSTREAM") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _asked(config):
        return
    dropped = [i for i in items if i.get_closest_marker(GROUP)]
    config.stash[_not_run] = len(dropped)
    items[:] = [i for i in items if not i.get_closest_marker(GROUP)]
    config.hook.pytest_deselected(items=dropped)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(_not_run, 0):
        terminalreporter.write_line(
            f"{count} tests of mlx's own Metal kernels were not run: they take half a minute and may download 78 MB. "
            f"Ask for them with -m {GROUP} or MLX_ACCEL_UPSTREAM=1."
        )


@pytest.fixture(scope="session")
def compiled() -> None:
    try:
        lab.find_compiler()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def user_cache() -> Path:
    """The user's own cache: a test's would be gone before the next one, and with it the download."""
    return cache_dir()


@pytest.fixture(scope="session")
def mac_wheel(user_cache: Path) -> Path:
    """The include folder of the mlx-metal wheel of this mlx."""
    try:
        return headers.fetched(user_cache)
    except headers.Unavailable as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def upstream(compiled: None, user_cache: Path) -> Path:
    """The folder that the includes of mlx's kernels are relative to."""
    try:
        return headers.include_dir(user_cache)
    except headers.Unavailable as e:
        pytest.skip(str(e))
