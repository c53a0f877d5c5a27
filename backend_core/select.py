"""Selection: collect offers, verify them on the real layers, race them, decide.

Everything here works on groups of layers with one site signature. Nothing is installed in this module; it
returns decisions and callables, so that an interrupt or an error at any point leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from . import native, race
from .errors import PluginError, VerificationError
from .install import Slot
from .offers import Offer
from .plugins import PluginHost
from .policy import Policy
from .probes import LinearProbe, probe_for
from .profile import Profile
from .race import Timing
from .report import STOCK, Bucket, Decision, Loser, Report
from .sites import LinearSite, Site
from .walk import Found

SMALL, LARGE = (1, 16), (17, None)


@dataclasses.dataclass
class Candidate:
    """One offer at the sites of one signature: its callables by site index, and the sites where it failed."""

    offer: Offer
    functions: dict[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)
    timings: dict[int, Timing] = dataclasses.field(default_factory=dict)
    why_untimed: str = ""
    how: str = ""


class Session:
    """One selection run: policy, plugins, profile and the report it writes."""

    def __init__(self, policy: Policy, host: PluginHost, profile: Profile, report: Report, device: str) -> None:
        self.policy, self.host, self.profile, self.report, self.device = policy, host, profile, report, device
        self.verified: set[str] = set()  # plugins with at least one offer that works

    def linears(self, found: Sequence[Found]) -> list[tuple[Found, Decision, Slot | None]]:
        """Decide for linear sites; one (found, decision, slot or None for stock) per site, in order."""
        groups: dict[str, list[int]] = {}
        for i, f in enumerate(found):
            groups.setdefault(f.site.signature, []).append(i)
        result: dict[int, tuple[Found, Decision, Slot | None]] = {}
        for indices in groups.values():
            for i, (decision, slot) in zip(indices, self._group([found[i] for i in indices]), strict=True):
                result[i] = (found[i], decision, slot)
        return [result[i] for i in range(len(found))]

    def others(self, found: Sequence[Found]) -> list[Decision]:
        """Ask for sites of the other hooks; offers are recorded, none is installed by this version."""
        decisions = []
        for f in found:
            offers, refusals = self.host.collect(f.site)
            losers = [Loser(o.label, f"{f.site.hook} offers are collected, not yet installed") for o in offers]
            losers += [Loser(name, reason) for name, reason in refusals]
            decisions.append(Decision(f.site, (Bucket((1, None), STOCK, how="not raced"),), tuple(losers)))
        return decisions

    def late(self, module: Any, site: LinearSite, x_dtype: str) -> Slot | None:
        """Decide for activations of a dtype that was not foreseen at load time."""
        from .walk import linear_facts

        facts = linear_facts(module, site.kind, x_dtype)
        if facts is None:
            return None
        found = Found(dataclasses.replace(site, **facts), module)
        [(decision, slot)] = self._group([found])
        self.report.note(f"{site.path}: also called with {x_dtype} activations; {decision.chosen} runs for them")
        self.profile.save()
        return slot

    def check_named(self) -> None:
        """Raise PluginError if a plugin that the user named serves no site of this model."""
        for name in self.policy.named_plugins:
            if name in self.verified or not self.report.decisions:
                continue
            reasons = [loser.reason for d in self.report.decisions for loser in d.losers
                       if loser.offer == name or loser.offer.startswith(name + "/")]  # fmt: skip
            cause = next((r for r in reasons if r != "made no offer"), "it made no offer for any site")
            raise PluginError(f"plugin {name!r} was asked for and cannot serve this model: {cause}")

    # One signature

    def _group(self, found: list[Found]) -> list[tuple[Decision, Slot | None]]:
        site: LinearSite = found[0].site
        probe = probe_for(site)
        candidates: dict[str, Candidate] = {}
        losers: list[list[Loser]] = [[] for _ in found]
        for i, f in enumerate(found):
            offers, refusals = self.host.collect(f.site)
            losers[i] += [Loser(name, reason) for name, reason in refusals]
            for offer in offers:
                reason = self._refusal(offer)
                if reason:
                    losers[i].append(Loser(offer.label, reason))
                    continue
                candidate = candidates.setdefault(offer.label, Candidate(offer))
                try:
                    candidate.functions[i] = offer.build(f.module)
                except Exception as error:
                    if self.policy.strict:
                        raise PluginError(f"{offer.label} at {f.site.path}: build: {error}") from error
                    candidate.failures[i] = f"build: {type(error).__name__}: {error}"
        for candidate in candidates.values():
            self._verify(candidate, found, probe)
            if candidate.functions:
                self.verified.add(candidate.offer.plugin)
            self._time(candidate, found, probe)
        return [self._decide(i, found[i], candidates, losers[i]) for i in range(len(found))]

    def _refusal(self, offer: Offer) -> str:
        if offer.exactness == "lossy" and not self.policy.allow_lossy:
            return "lossy; allow=lossy admits it"
        if reason := self.profile.quarantine_reason(self.offer_key(offer)):
            return f"quarantined: {reason}"
        return ""

    def offer_key(self, offer: Offer) -> str:
        """Identity of an offer's code: plugin, version, kernel contents, mlx."""
        record = self.host.records[offer.plugin]
        parts = (offer.label, record.version, record.content_hash, str(self.profile.facts.get("mlx")))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    # Verification

    def _verify(self, candidate: Candidate, found: list[Found], probe: LinearProbe) -> None:
        """Run the offer on every layer and compare with float64; wrong ones leave the race."""
        offer = candidate.offer
        cases = probe.cases(offer)
        waiting = list(candidate.functions)
        while waiting:
            # As many layers in one evaluation as memory allows.
            per_layer = sum(probe.result_bytes(rows) for rows, _ in cases)
            count = max(1, race.SCRATCH_BYTES // max(per_layer, 1))
            self._verify_some(candidate, found, probe, cases, waiting[:count])
            waiting = waiting[count:]
        for i in candidate.failures:
            candidate.functions.pop(i, None)

    def _verify_some(self, candidate: Candidate, found: list[Found], probe: LinearProbe,
                     cases: list[tuple[int, tuple[Any, ...]]], indices: list[int]) -> None:  # fmt: skip
        import mlx.core as mx

        offer = candidate.offer
        results: dict[int, list[tuple[int, Any]]] = {}
        with self.profile.in_flight(self.offer_key(offer), offer.label):
            for i in indices:
                try:
                    results[i] = [(rows, candidate.functions[i](*args)) for rows, args in cases]
                except Exception as error:
                    self._fault(candidate, found[i].site, i, f"raised {type(error).__name__}: {error}", error)
            try:
                mx.eval([y for r in results.values() for _, y in r])
            except Exception:
                self._evaluate_one_by_one(candidate, found, results)
        kernel_errors = native.take_errors()
        for i, r in results.items():
            if i in candidate.failures:
                continue
            try:
                if kernel_errors:
                    raise VerificationError("; ".join(dict.fromkeys(kernel_errors)))
                probe.check(offer, found[i].module, r)
            except Exception as error:
                self._fault(candidate, found[i].site, i, str(error), error)

    def _evaluate_one_by_one(self, candidate: Candidate, found: list[Found],
                             results: dict[int, list[tuple[int, Any]]]) -> None:  # fmt: skip
        import mlx.core as mx

        for i, r in results.items():
            try:
                mx.eval([y for _, y in r])
            except Exception as error:
                self._fault(candidate, found[i].site, i, f"raised {type(error).__name__}: {error}", error)

    def _fault(self, candidate: Candidate, site: Site, i: int, reason: str, error: Exception) -> None:
        candidate.failures[i] = reason
        if self.policy.strict:
            raise PluginError(f"{candidate.offer.label} at {site.path}: {reason}") from error

    # Timing

    def _time(self, candidate: Candidate, found: list[Found], probe: LinearProbe) -> None:
        offer, site = candidate.offer, found[0].site
        if not candidate.functions or self.policy.deterministic:
            return
        lo, hi = offer.rows
        wanted = [m for m in race.RACE_ROWS if m >= lo and (hi is None or m <= hi)]
        stored = None if self.policy.race == "force" else self.profile.get(site.signature, offer.label)
        if stored is not None and all(str(m) in stored["rows"] for m in wanted):
            try:
                candidate.timings = {m: Timing(**stored["rows"][str(m)]) for m in wanted}
                candidate.how = "profile"
                return
            except TypeError:
                pass  # written by hand or by a bug: race again
        if self.policy.race == "off":
            candidate.why_untimed = "never raced on this machine (race=off)"
            return
        indices = list(candidate.functions)
        modules = [found[i].module for i in indices]
        slots = {
            id(found[i].module): Slot(found[i].module, self.report, site, f, f) for i, f in candidate.functions.items()
        }
        try:
            candidate.timings = race.race(
                probe,
                modules,
                lambda module, *args: slots[id(module)].call(module, *args),
                wanted,
                self.device,
            )
        except Exception as error:
            candidate.why_untimed = f"race: {type(error).__name__}: {error}"
            return
        self.profile.put(site.signature, offer.label, {
            "site": site.describe(), "rows": {str(m): t.as_dict() for m, t in candidate.timings.items()},
        })  # fmt: skip

    # Decision

    def _decide(self, i: int, found: Found, candidates: dict[str, Candidate], losers: list[Loser]
                ) -> tuple[Decision, Slot | None]:  # fmt: skip
        alive = [c for c in candidates.values() if i in c.functions]
        reasons: dict[str, list[str]] = {label: [] for label in candidates}
        for label, c in candidates.items():
            if i in c.failures:
                reasons[label].append(c.failures[i])
        small = self._best(alive, SMALL, reasons)
        large = self._best(alive, LARGE, reasons)
        for c in alive:
            label = c.offer.label
            if c not in (small, large) and not reasons[label]:
                reasons[label].append("another offer is faster")
            if (c is small) != (c is large) and c.offer.label in reasons and not reasons[label]:
                reasons[label].append(f"runs only for rows {'1..16' if c is small else 'over 16'}")
        losers = losers + [
            Loser(label, "; ".join(dict.fromkeys(why)))
            for label, why in reasons.items()
            if why and not (small and large and small.offer.label == label == large.offer.label)
        ]
        losers.append(Loser(STOCK, self._why_not_stock(small, large)))
        if small and large:
            losers = [loser for loser in losers if loser.offer != STOCK or loser.reason]
        decision = Decision(
            found.site,
            (self._bucket(SMALL, small), self._bucket(LARGE, large)),
            tuple(loser for loser in losers if loser.reason),
        )
        if small is None and large is None:
            return decision, None
        slot = Slot(
            found.module, self.report, found.site,
            small.functions[i] if small else None, large.functions[i] if large else None, self.late,
        )  # fmt: skip
        return decision, slot

    def _why_not_stock(self, small: Candidate | None, large: Candidate | None) -> str:
        parts = []
        for name, rows, c in (("rows 1..16", 1, small), ("rows over 16", 64, large)):
            if c is not None:
                t = c.timings.get(rows)
                parts.append(f"{name}: {t.ratio:.2f}x slower" if t else f"{name}: fixed order of preference")
        return "; ".join(parts)

    def _best(self, alive: list[Candidate], bucket: tuple[int, int | None], reasons: dict[str, list[str]]
              ) -> Candidate | None:  # fmt: skip
        """The winner of a bucket, or None for stock; says why the others are not."""
        name = "rows 1..16" if bucket == SMALL else "rows over 16"
        best: tuple[float, Candidate] | None = None
        for c in sorted(alive, key=lambda c: (-c.offer.preference, c.offer.label)):
            note = reasons[c.offer.label].append
            if not c.offer.covers(*bucket):
                lo, hi = c.offer.rows
                note(f"{name}: covers rows {lo}..{'any' if hi is None else hi} only")
                continue
            if bucket == SMALL and not c.offer.row_invariant:
                note(f"{name}: not row-invariant")
                continue
            if self.policy.deterministic:
                if best is None:
                    best = (1.0, c)
                else:
                    note(f"{name}: {best[1].offer.label} is preferred")
                continue
            if c.why_untimed:
                note(f"{name}: {c.why_untimed}")
                continue
            if bucket == SMALL:
                score = sum(w * c.timings[m].ours / c.timings[m].stock for m, w in race.WEIGHTS.items())
                margin = max(c.timings[1].spread, 0.02)
                beats = c.timings[1].not_slower and score < 1.0 - margin
                measured = c.timings[1]
            else:
                measured = c.timings[64]
                score, beats = measured.ours / measured.stock, measured.wins
            if not beats:
                note(f"{name}: {measured.ratio:.2f}x stock's speed (spread {measured.spread:.0%}): no measured win")
                continue
            if best is None or score < best[0]:
                if best is not None:
                    reasons[best[1].offer.label].append(f"{name}: {c.offer.label} is faster")
                best = (score, c)
            else:
                note(f"{name}: {measured.ratio:.2f}x, {best[1].offer.label} is faster")
        return best[1] if best else None

    def _bucket(self, rows: tuple[int, int | None], c: Candidate | None) -> Bucket:
        if c is None:
            return Bucket(rows, STOCK, how="no offer won")
        if self.policy.deterministic:
            return Bucket(rows, c.offer.label, how="deterministic")
        t = c.timings[1 if rows == SMALL else 64]
        return Bucket(rows, c.offer.label, t.ratio, t.spread, "profile" if c.how else t.how)
