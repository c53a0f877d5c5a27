"""Decisions as data, and the lines that are printed from them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .sites import JoinSite, Site

STOCK = "stock"


@dataclass(frozen=True)
class Loser:
    """An offer (or plugin) that does not run at a site, and why."""

    offer: str
    reason: str


@dataclass(frozen=True)
class Bucket:
    """What runs for a range of rows.

    rows
        Smallest and largest number of rows, None is unbounded.
    chosen
        Label of the offer, or ``"stock"``.
    ratio
        Stock's time over the chosen offer's, measured here; 0 where nothing was measured.
    spread
        Relative noise of that ratio (0.05: five per cent).
    how
        ``"raced"``, ``"profile"``, ``"extrapolated"``, ``"deterministic"``, or why there is no number.
    """

    rows: tuple[int, int | None]
    chosen: str
    ratio: float = 0.0
    spread: float = 0.0
    how: str = ""


@dataclass(frozen=True)
class Decision:
    """The one recorded decision for a site."""

    site: Site
    buckets: tuple[Bucket, ...]
    losers: tuple[Loser, ...] = ()
    #: By label of a chosen offer: exactness, bytes_moved, copies, note, and notes of the callable that runs.
    details: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def chosen(self) -> str:
        """What runs at rows 1."""
        return self.buckets[0].chosen

    @property
    def ratio(self) -> float:
        return self.buckets[0].ratio

    @property
    def accelerated(self) -> bool:
        return any(b.chosen != STOCK for b in self.buckets)

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.site.path,
            "hook": self.site.hook,
            "signature": self.site.signature,
            "site": self.site.facts(),
            "chosen": self.chosen,
            "ratio": round(self.ratio, 3),
            "spread": round(self.buckets[0].spread, 3),
            "buckets": [
                {"rows": list(b.rows), "chosen": b.chosen, "ratio": round(b.ratio, 3),
                 "spread": round(b.spread, 3), "how": b.how}
                for b in self.buckets
            ],
            "offers": {
                label: {**facts, "notes": list(facts.get("notes", ()))} for label, facts in self.details.items()
            },
            "losers": [dict(vars(loser)) for loser in self.losers],
        }  # fmt: skip


@dataclass
class Report:
    """What :func:`backend_core.accelerate` did.

    decisions
        One per site.
    notes
        Sentences about the whole model (activations policy, profile, sites that went stale, ...).
    plugins
        Plugin records as plain dicts.
    seconds
        Wall time of the selection.
    unjoined
        Why decoder layers do not run as one piece -> their paths.
    """

    decisions: list[Decision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plugins: list[dict[str, Any]] = field(default_factory=list)
    policy: dict[str, Any] = field(default_factory=dict)
    activations: str = "model"
    seconds: float = 0.0
    unjoined: dict[str, list[str]] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def sentences(self) -> list[str]:
        """The notes, and those of the callables that run: ``plugin/offer: sentence``, each once."""
        said = [
            f"{label}: {note}"
            for d in self.decisions
            for label, facts in d.details.items()
            for note in facts.get("notes", ())
        ]
        return [*self.notes, *dict.fromkeys(s for s in said if s not in self.notes)]

    def decision(self, path: str, hook: str = "select_linear") -> Decision:
        """The decision for a path. Raises KeyError if there is none."""
        for d in self.decisions:
            if d.site.hook == hook and (d.site.path == path or path in getattr(d.site, "aliases", ())):
                return d
        raise KeyError(f"no {hook} site {path!r}")

    def counts(self) -> Counter[str]:
        """How many sites run what, by what runs at rows 1; a site that is served at more rows only says so.

        Joined blocks are not among them: their parts are.
        """
        return Counter(
            f"{d.buckets[-1].chosen} over 16 rows" if d.accelerated and d.chosen == STOCK else d.chosen
            for d in self.decisions
            if d.site.hook != JoinSite.hook
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "decisions": [d.as_dict() for d in self.decisions],
            "counts": dict(self.counts()),
            "notes": self.sentences(),
            "plugins": list(self.plugins),
            "policy": dict(self.policy),
            "activations": self.activations,
            "unjoined": {reason: list(paths) for reason, paths in self.unjoined.items()},
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def line(self) -> str:
        """The one line that is printed after loading."""
        return f"[accel] {self.summary()} ({self.seconds:.2f} s)"

    def summary(self) -> str:
        """What was selected, in one line."""
        counts = self.counts()
        stock = counts.pop(STOCK, 0)
        total = stock + sum(counts.values())
        runs = ", ".join(f"{n} run {label}" for label, n in counts.most_common()) or "none accelerated"
        parts = [f"{total} sites: {runs}, {stock} stay stock"]
        joined = Counter(d.site.kind for d in self.decisions if isinstance(d.site, JoinSite))
        parts += [f"joined: {', '.join(f'{n} {kind}' for kind, n in joined.items())}"] if joined else []
        # Of what a compiler wrote, the first line.
        parts += [s if s in self.notes else s.partition("\n")[0] for s in self.sentences()]
        return "; ".join(parts)
