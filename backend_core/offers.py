"""Offers: what a plugin answers for a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .sites import Site

#: Exactness classes, strictest first. See docs/how-it-works.md for the bound of ``rounding``.
EXACTNESS = ("bitwise", "rounding", "lossy")


@dataclass(frozen=True)
class Offer:
    """A plugin's answer for one site.

    name
        Short and stable; shown in reports and stored in the profile. Unique within the plugin.
    build
        ``build(module) -> callable``, called once at load time with the live module. The callable takes
        what the site's kind takes (``LinearSite.kind``) and returns a lazy mlx array of stock's shape and
        dtype. It may keep references to the module's arrays: the core stops calling it once the module
        holds other arrays. Raising an exception from `build` is a clear "no" and lands in the report. An attribute
        ``notes`` of the callable, a list of sentences, is shown in the report as it is when the report is printed: what
        is not as it should be and only shows at a call.
    rows
        Smallest and largest number of rows (M) the callable accepts, both included; None is unbounded.
        An offer that is to work inside a shapeless ``mx.compile`` must accept any rows.
    exactness
        ``"bitwise"`` (stock's bits), ``"rounding"`` (the bound of the design) or ``"lossy"`` (opt-in).
    row_invariant
        True if row i of a call with up to 16 rows has the bits of a call with that row alone. Only such an
        offer may take rows 1..16; the core tests the claim.
    bytes_moved
        Bytes one call at rows = 1 must read and write, 0 if unknown.
    preference
        Order under ``deterministic=1``: the largest wins.
    tolerance
        For ``"lossy"``: largest relative error (Frobenius norm over the sample) against float64.
    copies
        Bytes of side data (repacked weights) the callable will hold.
    note
        One line for the report.
    """

    name: str
    build: Callable[[Any], Callable[..., Any]]
    rows: tuple[int, int | None] = (1, None)
    exactness: str = "rounding"
    row_invariant: bool = False
    bytes_moved: int = 0
    preference: int = 0
    tolerance: float = 0.02
    copies: int = 0
    note: str = ""
    # Filled in by the core when it collects the offer.
    plugin: str = field(default="", compare=False)
    # Of the core's own: it does what runs now with fewer operations, in the same bits. It is raced at one row and used
    # unless it is measured to be slower.
    lighter: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise TypeError("Offer.name must be a non-empty string")
        if len(self.name) > 80 or not self.name.isprintable():
            raise ValueError(f"Offer.name must be at most 80 printable characters, not {self.name[:80]!r}")
        for field_name in ("preference", "bytes_moved", "copies"):
            if not isinstance(getattr(self, field_name), int):
                raise TypeError(f"Offer {self.name!r}: {field_name} must be an integer")
        if not callable(self.build):
            raise TypeError(f"Offer {self.name!r}: build must be callable, not {type(self.build).__name__}")
        if self.exactness not in EXACTNESS:
            raise ValueError(f"Offer {self.name!r}: exactness {self.exactness!r} is not one of {EXACTNESS}")
        lo, hi = self.rows
        if lo < 1 or (hi is not None and hi < lo):
            raise ValueError(f"Offer {self.name!r}: rows {self.rows} is not a range of at least one row")

    @property
    def label(self) -> str:
        """``plugin/name``, as reports print it."""
        return f"{self.plugin}/{self.name}" if self.plugin else self.name

    def covers(self, lo: int, hi: int | None) -> bool:
        """True if every number of rows in [lo, hi] is within the offer's range."""
        mine_lo, mine_hi = self.rows
        return mine_lo <= lo and (mine_hi is None or (hi is not None and hi <= mine_hi))


def as_offers(answer: Any, site: Site) -> list[Offer]:
    """What a hook returned, as a list of offers.

    Raises TypeError if it is neither None, an :class:`Offer` nor a sequence of offers.
    """
    if answer is None:
        return []
    if isinstance(answer, Offer):
        return [answer]
    if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)):
        wrong = [a for a in answer if not isinstance(a, Offer)]
        if not wrong:
            return list(answer)
        answer = wrong[0]
    raise TypeError(
        f"{site.hook} must return None, an Offer or a list of offers, not {type(answer).__name__} (site {site.path!r})"
    )
