"""One site, decided by the core as it decides for a model: offers collected, verified, raced."""

from __future__ import annotations

from typing import Any

from .. import core, machine
from ..offers import Offer
from ..policy import Policy
from ..profile import Profile
from ..report import Decision, Report
from ..select import Session
from ..walk import Found


def decide(found: Found, policy: Policy, report: Report) -> tuple[Decision, Any, dict[str, Offer]]:
    """(decision, what is to be installed or None for stock, all offers by label).

    Raises PluginError as accelerate() does.
    """
    host = core.plugin_host(policy)
    versions = {r.name: f"{r.version} {r.content_hash}" for r in host.all_records() if r.state == "ready"}
    profile = Profile(machine.environment_facts("model", versions))
    session = Session(policy, host, profile, report, machine.default_device())
    [(_, decision, slot)] = session.modules([found])
    profile.save()
    return decision, slot, {offer.label: offer for offer in host.collect(found.site)[0]}


def chosen(decision: Decision, rows: int) -> str:
    """Label of what runs at a number of rows."""
    return next(b.chosen for b in decision.buckets if b.rows[0] <= rows and (b.rows[1] is None or rows <= b.rows[1]))


def why_stock(decision: Decision) -> str:
    """Why no offer runs, as one sentence."""
    return "; ".join(f"{loser.offer}: {loser.reason}" for loser in decision.losers) or "no plugin made an offer"
