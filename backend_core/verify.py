"""Verification: an offer's results on the real layers, compared with float64 before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import native, race
from .candidates import Candidate
from .errors import PluginError, VerificationError
from .offers import Offer
from .plugins import describe
from .probe_base import Probe
from .walk import Found

#: How the reason of an offer begins that raised an exception.
RAISED = "raised "
#: Most characters of an exception's message in the report: compilers write pages.
MOST_TEXT = 1500
#: Groups of this many layers share the lengths of their verification calls once the offer was verified in full, on one
#: of them or by the process whose race the profile holds.
BRIEF_FROM = 8


def verify(
    candidate: Candidate, found: Sequence[Found], probe: Probe, indices: Sequence[int], marker: Any, strict: bool
) -> None:
    """Run the offer on the layers `indices` and compare; those where it is wrong are failed.

    marker
        Context manager factory that is entered around the offer's code (the in-flight marker).
    strict
        Raise PluginError at the first fault.
    """
    waiting = [i for i in indices if i in candidate.functions and i not in candidate.verified]
    # As many layers in one evaluation as memory allows.
    per_layer = sum(probe.result_bytes(rows) for rows, _ in probe.cases(candidate.offer, 0))
    at_once = max(1, race.SCRATCH_BYTES // max(per_layer, 1))
    for begin in range(0, len(waiting), at_once):
        _verify_some(candidate, found, probe, waiting[begin : begin + at_once], marker, strict)


def build(offer: Offer, module: Any) -> Any:
    """The offer's callable for a layer, which must be left as it was.

    Raises whatever the offer raises, and VerificationError if it changed the layer; then the layer is as before.
    """
    if module is None:
        return offer.build(None)
    before, cls, attributes = native.snapshot(module), type(module), dict(module.__dict__)
    keys = set(module)
    changed = True
    try:
        function = offer.build(module)
        changed = not before.holds(module) or type(module) is not cls or module.__dict__ != attributes
    finally:
        if changed:
            for key in set(module) - keys:
                del module[key]
            before.put_back(module)
            if type(module) is not cls:
                module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
    if changed:
        raise VerificationError("build changed the layer's arrays, class or attributes; it was put back as it was")
    return function


def _verify_some(
    candidate: Candidate, found: Sequence[Found], probe: Probe, indices: Sequence[int], marker: Any, strict: bool
) -> None:
    import mlx.core as mx

    # Layers are still each looked at: their weights are others, the code is the same.
    probe.thorough = not candidate.verified and candidate.how != "profile"
    cases = probe.cases if probe.thorough or len(found) < BRIEF_FROM else probe.brief_cases
    results: dict[int, list[tuple[int, Any]]] = {}
    faults: dict[int, BaseException] = {}
    with marker():
        for i in indices:
            try:
                results[i] = [(rows, candidate.functions[i](*a)) for rows, a in cases(candidate.offer, i)]
            except (Exception, SystemExit) as error:
                faults[i] = error
        try:
            mx.eval([y for r in results.values() for _, y in r if y is not NotImplemented])
        except Exception:
            # One layer's exception hides the others' results.
            for i, r in results.items():
                try:
                    mx.eval([y for _, y in r if y is not NotImplemented])
                except Exception as error:
                    faults[i] = error
    kernel_errors = native.take_errors()
    for i in indices:
        try:
            if i in faults:
                raise faults[i]
            if kernel_errors:
                raise VerificationError("; ".join(dict.fromkeys(kernel_errors)))
            probe.check(candidate.offer, found[i].module, results[i])
            candidate.verified.add(i)
        except (Exception, SystemExit) as error:
            text = str(error) if isinstance(error, VerificationError) else f"{RAISED}{describe(error)}"[:MOST_TEXT]
            candidate.fail(i, text)
            if strict:
                raise PluginError(f"{candidate.label} at {found[i].site.path}: {text}") from error
