"""Selection: collect offers, verify them on the real layers, race them, decide.

Everything works on groups of layers with one site signature. Nothing is installed here: it returns decisions
and slots, so that an interrupt or an error at any point leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from . import decide, race
from .candidates import Candidate
from .errors import PluginError
from .install import Slot
from .integrations.attention import AttentionSlot
from .integrations.functions import FunctionSlot
from .integrations.logits import LogitsSlot
from .offers import Offer
from .plugins import PluginHost, PluginRecord, describe
from .policy import Policy
from .probe_base import Probe
from .probes_attention import AttentionProbe
from .probes_cache import UpdateProbe, UpdateSlot
from .probes_join import JoinProbe, JoinSlot
from .probes_ops import FunctionProbe, LogitsProbe
from .probes_registry import probe_for
from .profile import Profile
from .race import Timing
from .report import STOCK, Bucket, Decision, Loser, Report
from .sites import AttentionSite
from .verify import RAISED, build, verify
from .walk import Found

#: What an offer may cost in all without winning anywhere.
SPEND_S = 10.0

Outcome = tuple[Found, Decision, Any]


class Session:
    """One selection run: policy, plugins, profile and the report it writes."""

    def __init__(self, policy: Policy, host: PluginHost, profile: Profile, report: Report, device: str) -> None:
        self.policy, self.host, self.profile, self.report, self.device = policy, host, profile, report, device
        self.verified: set[str] = set()  # plugins with at least one offer that works
        self.wrong: Counter[str] = Counter()  # sites at which an offer failed verification
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds, by label
        self.winners: set[str] = set()
        self.asked: set[str] = set()  # hooks
        for record in host.all_records():
            if record.state == "ready" and (reason := profile.quarantine_reason(self._plugin_key(record))):
                report.note(f"{record.name} is quarantined ({reason}); mlx-accel profile clear lifts this")
                host.retire(record.name, f"quarantined: {reason}")

    def modules(self, found: Sequence[Found]) -> list[Outcome]:
        """Decide for sites that are modules; one outcome per site, in order. No slot means stock."""
        groups: dict[str, list[int]] = {}
        for i, f in enumerate(found):
            groups.setdefault(f.site.signature, []).append(i)
        result: dict[int, Outcome] = {}
        for indices in groups.values():
            for i, outcome in zip(indices, self._group([found[i] for i in indices]), strict=True):
                result[i] = outcome
        _give_memory_back()
        return [result[i] for i in range(len(found))]

    def others(self, found: Sequence[Found]) -> list[Decision]:
        """Ask for sites whose offers are collected and reported, but not installed by this version."""
        decisions = []
        for f in found:
            offers, refusals = self.host.collect(f.site)
            losers = [Loser(o.label, f"{f.site.hook} offers are collected, not yet installed") for o in offers]
            losers += [Loser(name, reason) for name, reason in refusals]
            decisions.append(Decision(f.site, (Bucket((1, None), STOCK, how="not raced"),), tuple(losers)))
        return decisions

    def late(self, module: Any, probe: Probe, x_dtype: str) -> Slot | None:
        """Decide for activations of a dtype that was not foreseen at load time."""
        site = probe.variant(module, x_dtype)
        if site is None:
            return None
        [(_, decision, slot)] = self._group([Found(site, module)])
        self.report.note(f"{site.path}: also called with {x_dtype} activations; {decision.chosen} runs for them")
        self.profile.save()
        return slot

    def late_attention(self, site: AttentionSite) -> AttentionSlot | None:
        """Decide for a cache that was quantized on the way, at its first call."""
        [(_, decision, slot)] = self._group([Found(site, None)])
        self.report.decisions.append(decision)
        self.report.note(f"{site.path}: {site.kv_bits}-bit g{site.kv_group_size}; {decision.chosen} runs for it")
        self.profile.save()
        return slot

    def check_named(self) -> None:
        """Raise PluginError if a plugin that the user named serves no site of this model."""
        for name in self.policy.named_plugins:
            if name in self.verified or not self.report.decisions:
                continue
            reasons = [
                loser.reason
                for d in self.report.decisions
                for loser in d.losers
                if loser.offer == name or loser.offer.startswith(name + "/")
            ]
            cause = next((r for r in reasons if r != "made no offer"), "it made no offer for any site")
            raise PluginError(f"plugin {name!r} was asked for and cannot serve this model: {cause}")

    # One signature

    def _group(self, found: list[Found]) -> list[Outcome]:
        probe = probe_for(found[0].site)
        refusals: list[list[Loser]] = [[] for _ in found]
        candidates = self._candidates(found, refusals)
        for c in candidates:
            begin = time.perf_counter()
            self._remember(c, found)
            if c.how == "profile":
                # It worked when it was raced. What loses is not run again, since that may compile it; what wins is
                # verified before it is used.
                self.verified.add(c.offer.plugin)
            else:
                self._verify_one(c, found, probe)
                self._time(c, found, probe)
            self.spent[c.label] += time.perf_counter() - begin
        decisions = self._settle(found, probe, candidates, refusals)
        self.winners.update(w.label for _, winners in decisions for w in winners if w is not None)
        outcomes: list[Outcome] = []
        for i, (f, (decision, winners)) in enumerate(zip(found, decisions, strict=True)):
            slot = None
            if any(winners):
                small, large = (w.functions[i] if w else None for w in (winners[0], winners[-1]))
                slot = self._slot(f.module, probe, small, large)
            outcomes.append((f, decision, slot))
        return outcomes

    def _slot(self, module: Any, probe: Probe, small: Any, large: Any) -> Any:
        if isinstance(probe, AttentionProbe):
            return AttentionSlot(self.report, probe, small, large, self.late_attention)
        if isinstance(probe, LogitsProbe):
            return LogitsSlot(self.report, probe, small)
        if isinstance(probe, FunctionProbe):
            return FunctionSlot(self.report, probe, small)
        if isinstance(probe, UpdateProbe):
            return UpdateSlot(self.report, probe, small)
        if isinstance(probe, JoinProbe):
            return JoinSlot(self.report, probe, small, large)
        return Slot(module, self.report, probe, small, large, self.late)

    def _settle(self, found: list[Found], probe: Probe, candidates: list[Candidate], refusals: list[list[Loser]]
                ) -> list[tuple[Decision, list[Candidate | None]]]:  # fmt: skip
        """Decide, verify the winners on every layer, and decide again where one of them is wrong."""
        while True:
            # Layers with the same offers, failures and refusals share one decision but for their site.
            made: dict[Any, tuple[Decision, list[Candidate | None]]] = {}
            decisions = []
            for i, f in enumerate(found):
                same = (
                    tuple(refusals[i]),
                    *((c.label, c.failures.get(i)) for c in candidates if i in c.functions or i in c.failures),
                )
                if same not in made:
                    made[same] = decide.decision(
                        i, f.site, probe.buckets, candidates, refusals[i], self.policy.deterministic
                    )
                decision, winners = made[same]
                own = dataclasses.replace(decision, site=f.site, details=decide.details(i, winners))
                decisions.append((own, winners))
            todo: dict[int, tuple[Candidate, list[int]]] = {}
            for i, (_, winners) in enumerate(decisions):
                for w in winners:
                    if w is not None and i not in w.verified:
                        indices = todo.setdefault(id(w), (w, []))[1]
                        if i not in indices[-1:]:
                            indices.append(i)
            if not todo:
                return decisions
            for w, indices in todo.values():
                if not w.verified:
                    self._verify_one(w, found, probe)
                self._verify(w, found, probe, indices)

    def _candidates(self, found: list[Found], refusals: list[list[Loser]]) -> list[Candidate]:
        candidates: dict[str, Candidate] = {}
        for i, f in enumerate(found):
            # Hooks run for the first time at the first site of each kind.
            watched = None if f.site.hook in self.asked else self._plugin_marker
            self.asked.add(f.site.hook)
            offers, declined = self.host.collect(f.site, watched) if f.offer is None else ([f.offer], [])
            refusals[i] += [Loser(name, reason) for name, reason in declined]
            for offer in offers:
                if reason := self._refusal(offer):
                    refusals[i].append(Loser(offer.label, reason))
                    continue
                candidate = candidates.setdefault(offer.label, Candidate(offer))
                try:
                    # The first build of a group may be the first time this code runs at all.
                    watch = self._marker(candidate) if i == 0 else contextlib.nullcontext
                    with watch(), contextlib.redirect_stdout(sys.stderr):
                        candidate.functions[i] = build(offer, f.module)
                except (Exception, SystemExit) as error:
                    text = f"build: {describe(error)}"
                    candidate.fail(i, text)
                    if self.policy.strict:
                        raise PluginError(f"{offer.label} at {f.site.path}: {text}") from error
        return list(candidates.values())

    def _refusal(self, offer: Offer) -> str:
        if offer.exactness == "lossy" and not self.policy.allow_lossy:
            return "lossy; allow=lossy admits it"
        if reason := self.profile.quarantine_reason(self.offer_key(offer)):
            self.report.note(f"{offer.label} is quarantined ({reason}); mlx-accel profile clear lifts this")
            return f"quarantined: {reason}"
        if self.spent[offer.label] > SPEND_S and offer.label not in self.winners:
            return f"not tried: it took {self.spent[offer.label]:.0f} s at other sites without a win"
        return ""

    def _plugin_key(self, record: PluginRecord) -> str:
        """Identity of a plugin's hooks."""
        parts = ("hooks", record.name, record.version, record.content_hash, str(self.profile.facts.get("mlx")))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _plugin_marker(self, record: PluginRecord) -> Any:
        return self.profile.in_flight(self._plugin_key(record), record.name)

    def offer_key(self, offer: Offer) -> str:
        """Identity of an offer's code: plugin, version, kernel contents, mlx."""
        record = self.host.records.get(offer.plugin)
        code = (record.version, record.content_hash) if record else (str(self.profile.facts.get("native")), "")
        parts = (offer.label, *code, str(self.profile.facts.get("mlx")))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _marker(self, c: Candidate) -> Callable[[], Any]:
        # What an earlier process has raced has run before.
        if c.how == "profile":
            return contextlib.nullcontext
        return functools.partial(self.profile.in_flight, self.offer_key(c.offer), c.label)

    def _verify(self, c: Candidate, found: list[Found], probe: Probe, indices: Sequence[int]) -> None:
        if probe.weightless and c.verified:
            c.verified.update(indices)
        before = len(c.failures)
        verify(c, found, probe, indices, self._marker(c), self.policy.strict)
        if len(c.failures) > before:
            self.wrong[c.label] += len(c.failures) - before
        if c.verified:
            self.verified.add(c.offer.plugin)

    def _verify_one(self, c: Candidate, found: list[Found], probe: Probe) -> None:
        """One layer first: an offer that loses the race, or fails everywhere, costs no more than that."""
        for i in list(c.functions):
            self._verify(c, found, probe, [i])
            if i in c.verified or self._fails_alike(c):
                break

    def _fails_alike(self, c: Candidate) -> bool:
        """True if two layers raised the same; then all others are failed too, since each may cost a compilation."""
        raised = [text for text in c.failures.values() if text.startswith(RAISED)]
        if len(raised) < 2 or raised[-1] != raised[-2]:
            return False
        for i in list(c.functions):
            c.fail(i, raised[-1])
            self.wrong[c.label] += 1
        return True

    def _remember(self, c: Candidate, found: list[Found]) -> None:
        """Timings from the profile, if it has all that are needed."""
        stored = self.profile.get(found[0].site.signature, c.label)
        if self.policy.deterministic or self.policy.race == "force" or stored is None:
            return
        try:
            timings = {m: Timing(**stored["rows"][str(m)]) for m in c.raced_rows()}
        except (KeyError, TypeError):
            return  # of another version, or written by hand
        if all(t.sane for t in timings.values()):
            c.timings, c.how = timings, "profile"

    def _time(self, c: Candidate, found: list[Found], probe: Probe) -> None:
        """Timings from a race, where the profile had none."""
        if not c.functions or self.policy.deterministic or c.how == "profile":
            return
        signature, wanted = found[0].site.signature, c.raced_rows()
        if self.policy.race == "off":
            c.why_untimed = "never raced on this machine (race=off)"
            return
        modules = [found[i].module for i in c.functions]
        slots = {id(found[i].module): self._slot(found[i].module, probe, f, f) for i, f in c.functions.items()}

        def ours(module: Any, *args: Any) -> Any:
            return slots[id(module)].call(module, *args)

        try:
            c.timings = race.race(probe, modules, ours, wanted, self.device, watch=self._marker(c))
        except (Exception, SystemExit) as error:
            c.why_untimed = f"race: {describe(error)}"
            return
        if any(t.unclear for t in c.timings.values()):
            self.report.note("the machine was busy: some races were too noisy to be remembered")
            return
        self.profile.put(signature, c.label, {
            "site": found[0].site.describe(), "rows": {str(m): t.as_dict() for m, t in c.timings.items()},
        })  # fmt: skip


def _give_memory_back() -> None:
    """Verification makes and frees gigabytes, and glibc keeps tens of megabytes of them for later."""
    import mlx.core as mx

    mx.clear_cache()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))
