"""From timings to decisions: who runs where, and why the others do not. Nothing is run here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import race
from .candidates import Candidate
from .report import STOCK, Bucket, Decision, Loser
from .sites import Site

Rows = tuple[int, "int | None"]
SMALL, LARGE, ALL = (1, 16), (17, None), (1, None)
#: The number of rows whose ratio stands for a bucket.
TYPICAL_ROWS = {SMALL: 1, LARGE: 64, ALL: 1}
_NAMES = {SMALL: "rows 1..16", LARGE: "rows over 16", ALL: "any rows"}


def ranking(candidates: Iterable[Candidate], rows: Rows, deterministic: bool
            ) -> tuple[list[Candidate], dict[str, str]]:  # fmt: skip
    """(candidates that beat stock in a bucket, best first; why each other one does not).

    Rows 1..16 are one unit: an offer must cover all of them, be row-invariant, not be slower than stock at
    rows 1, and win by the weighted time.
    """
    reasons: dict[str, str] = {}
    scored: list[tuple[float, Candidate]] = []
    for c in sorted(candidates, key=lambda c: (-c.offer.preference, c.label)):
        score, reason = _score(c, rows, deterministic)
        if reason:
            reasons[c.label] = f"{_NAMES[rows]}: {reason}"
        else:
            scored.append((score, c))
    if not deterministic:
        scored.sort(key=lambda s: s[0])
    order = [c for _, c in scored]
    for c in order[1:]:
        better = "is preferred" if deterministic else f"is faster ({c.timings[TYPICAL_ROWS[rows]].ratio:.2f}x)"
        reasons[c.label] = f"{_NAMES[rows]}: {order[0].label} {better}"
    return order, reasons


def _score(c: Candidate, rows: Rows, deterministic: bool) -> tuple[float, str]:
    """(weighted time as a fraction of stock's, why it does not count or "")."""
    if not c.offer.covers(*rows):
        lo, hi = c.offer.rows
        return 0.0, f"covers rows {lo}..{'any' if hi is None else hi} only"
    if rows != LARGE and not c.offer.row_invariant:
        return 0.0, "not row-invariant"
    if deterministic:
        return 0.0, ""
    if c.why_untimed:
        return 0.0, c.why_untimed
    measured = c.timings[TYPICAL_ROWS[rows]]
    if c.offer.lighter:
        score, wins = measured.ours / measured.stock, measured.not_slower
    elif rows == LARGE:
        score, wins = measured.ours / measured.stock, measured.wins
    else:
        score = sum(w * c.timings[m].ours / c.timings[m].stock for m, w in race.WEIGHTS.items())
        # The spread is relative to the ratio, which is the score's inverse.
        wins = measured.not_slower and 1.0 / score > 1.0 + measured.noise
        if rows == ALL:
            wins = wins and c.timings[64].not_slower
    if not wins:
        verdict = "slower" if c.offer.lighter else "no measured win"
        return score, f"{measured.ratio:.2f}x stock's speed (spread {measured.spread:.0%}): {verdict}"
    return score, ""


def decision(i: int, site: Site, buckets: Sequence[Rows], candidates: Sequence[Candidate],
             refusals: Sequence[Loser], deterministic: bool) -> tuple[Decision, list[Candidate | None]]:  # fmt: skip
    """The decision for layer i and the winner of each bucket (None: stock)."""
    reasons: dict[str, list[str]] = {c.label: [] for c in candidates}
    for c in candidates:
        if i in c.failures:
            reasons[c.label].append(c.failures[i])
    winners: list[Candidate | None] = []
    parts = []
    for rows in buckets:
        order, why = ranking((c for c in candidates if i in c.functions), rows, deterministic)
        for label, reason in why.items():
            reasons[label].append(reason)
        winner = order[0] if order else None
        winners.append(winner)
        parts.append(_bucket(rows, winner, deterministic))
    losers = list(refusals)
    for label, texts in reasons.items():
        if texts:
            losers.append(Loser(label, "; ".join(dict.fromkeys(texts))))
    beaten = [f"{_NAMES[b.rows]}: {_why_not_stock(b)}" for b in parts if b.chosen != STOCK]
    if beaten:
        losers.append(Loser(STOCK, "; ".join(beaten)))
    return Decision(site, tuple(parts), tuple(losers), details(i, winners)), winners


def _bucket(rows: Rows, winner: Candidate | None, deterministic: bool) -> Bucket:
    if winner is None:
        return Bucket(rows, STOCK, how="no offer won")
    if deterministic:
        return Bucket(rows, winner.label, how="deterministic")
    t = winner.timings[TYPICAL_ROWS[rows]]
    if t.unrivalled:
        return Bucket(rows, winner.label, how=t.how)
    return Bucket(rows, winner.label, t.ratio, t.spread, winner.how or t.how)


def _why_not_stock(bucket: Bucket) -> str:
    if bucket.how.startswith(race.STOCK_FAILS):
        return bucket.how
    return f"{bucket.ratio:.2f}x slower" if bucket.ratio else "fixed order of preference"


def details(i: int, winners: Sequence[Candidate | None]) -> dict[str, dict[str, object]]:
    """What the chosen offers say about themselves, and their callables of layer i while they run."""
    return {
        c.label: {
            "exactness": c.offer.exactness,
            "bytes_moved": c.offer.bytes_moved,
            "copies": c.offer.copies,
            "note": c.offer.note,
            # The callable's own list: it may have something to say at a later call.
            "notes": said if isinstance(said := getattr(c.functions[i], "notes", None), list) else [],
        }
        for c in winners
        if c is not None
    }
