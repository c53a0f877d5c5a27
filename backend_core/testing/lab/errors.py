"""What the lab raises."""

from __future__ import annotations


class LabError(Exception):
    """A kernel did not compile, a launch was refused, or :meth:`Result.check` found faults; the message says which."""


class CompilerMissing(LabError):
    """There is no C++ compiler; the message names the package to install."""
