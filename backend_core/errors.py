"""Errors a user may meet. Every message names what is wrong, where, and what to do."""

from __future__ import annotations


class AccelError(Exception):
    """Base class of all errors that mlx-accel raises on purpose."""


class PolicyError(AccelError, ValueError):
    """A policy option is unknown or has a value that does not exist."""


class UnknownBackend(AccelError, LookupError):
    """`--backend NAME` names no installed backend."""


class PluginError(AccelError):
    """A plugin that the user named cannot serve, or any plugin fault under ``strict=1``."""


class ModelError(AccelError):
    """A model directory cannot be used as it is."""


class VerificationError(AccelError):
    """An offer's result differs from the float64 reference by more than its exactness class allows."""
