"""Errors: one base class, and the built-in class that callers expect."""

from __future__ import annotations

import pytest

import backend_core
from backend_core import errors


@pytest.mark.parametrize(
    "name,also",
    [("PolicyError", ValueError), ("UnknownBackend", LookupError), ("PluginError", Exception),
     ("ModelError", Exception), ("VerificationError", Exception)],
)  # fmt: skip
def test_every_error_is_an_accel_error(name, also):
    cls = getattr(errors, name)
    assert issubclass(cls, errors.AccelError) and issubclass(cls, also)
    assert str(cls("what is wrong")) == "what is wrong"  # LookupErrors may quote; ours must not
    assert (cls.__doc__ or "").strip()


def test_the_public_ones_are_exported():
    for name in ("AccelError", "PluginError", "PolicyError", "UnknownBackend"):
        assert getattr(backend_core, name) is getattr(errors, name)
        assert name in backend_core.__all__ and name in dir(backend_core)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        backend_core.nothing  # noqa: B018
