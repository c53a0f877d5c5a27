"""The folders of mlx's kernels, in the installed mlx and in the wheel for Macs."""

from __future__ import annotations

from pathlib import Path

import pytest
from upstream_kernels import headers

from backend_core.paths import cache_dir


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
def upstream(lab_compiler: None, user_cache: Path) -> Path:
    """The folder that the includes of mlx's kernels are relative to."""
    try:
        return headers.include_dir(user_cache)
    except headers.Unavailable as e:
        pytest.skip(str(e))
