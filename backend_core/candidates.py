"""One offer at the sites of one signature, on its way from collection to decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .offers import Offer
from .race import RACE_ROWS, Timing


@dataclass(eq=False)
class Candidate:
    """functions, failures and verified are keyed by the index of the site in its group.

    functions
        What the offer built for each layer.
    failures
        Why it cannot be used at a layer; a failed layer has no function.
    verified
        Layers at which its result was compared with float64.
    timings
        By rows. Empty where it was not raced; ``why_untimed`` says why.
    how
        ``"profile"`` if the timings were remembered.
    """

    offer: Offer
    functions: dict[int, Callable[..., Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    verified: set[int] = field(default_factory=set)
    timings: dict[int, Timing] = field(default_factory=dict)
    why_untimed: str = ""
    how: str = ""

    @property
    def label(self) -> str:
        return self.offer.label

    def raced_rows(self) -> list[int]:
        """The rows at which it is raced."""
        lo, hi = self.offer.rows
        rows = [m for m in RACE_ROWS if m >= lo and (hi is None or m <= hi)]
        return rows[:1] if self.offer.lighter else rows

    def fail(self, i: int, reason: str) -> None:
        """The offer is out at layer i."""
        self.failures[i] = reason
        self.functions.pop(i, None)
