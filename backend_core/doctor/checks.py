"""The record of one check, and running all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

STATUSES = ("ok", "note", "fault")


@dataclass(frozen=True)
class Check:
    """One finding.

    name
        ``section.what``, stable: scripts may look for it.
    status
        ``"ok"``, ``"note"`` (works, with a drawback one should know) or ``"fault"`` (does not work).
    detail
        What was found.
    mend
        One sentence that says what to do. Every fault has one.
    """

    name: str
    status: str
    detail: str
    mend: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"Check {self.name!r}: status {self.status!r} is not one of {STATUSES}")
        if self.status == "fault" and not self.mend:
            raise ValueError(f"Check {self.name!r}: a fault needs a mend")


def ok(name: str, detail: str) -> Check:
    """A check that found nothing amiss."""
    return Check(name, "ok", detail)


def note(name: str, detail: str, mend: str = "") -> Check:
    """A check that found a drawback."""
    return Check(name, "note", detail, mend)


def fault(name: str, detail: str, mend: str) -> Check:
    """A check that found something broken."""
    return Check(name, "fault", detail, mend)


Section = Callable[[], list[Check]]


def _environment() -> list[Check]:
    from . import environment

    return [check for section in environment.SECTIONS for check in guarded(section.__name__, section)]


def _installation() -> list[Check]:
    from . import installation as i

    sections = (i.native_checks, i.backend_checks, i.plugin_checks, i.quarantine_checks)
    return [check for section in sections for check in guarded(section.__name__, section)]


#: Sections about the installation, in the order of printing.
SECTIONS: list[Section] = [_environment, _installation]


def guarded(name: str, section: Section) -> list[Check]:
    """The section's checks; an exception in it is a fault of its own and stops nothing."""
    try:
        return section()
    except Exception as error:
        return [
            fault(
                f"doctor.{name.strip('_')}",
                f"this section could not be run: {type(error).__name__}: {error}",
                "Please report this as a bug of mlx-accel, with this message.",
            )
        ]


def run_doctor(model: str | Path | None = None) -> list[Check]:
    """All checks of the installation and, if a directory is given, of that model. Never raises."""
    checks = [check for section in SECTIONS for check in guarded(section.__name__, section)]
    if model is not None:
        directory = Path(model)

        def section() -> list[Check]:
            from ..manifest import installed_formats
            from .model import check_model

            return check_model(directory, installed_formats())

        checks += guarded("model", section)
    return checks


def exit_code(checks: Iterable[Check]) -> int:
    """1 if there is a fault, else 0."""
    return int(any(check.status == "fault" for check in checks))


def to_json(checks: Iterable[Check]) -> str:
    """JSON text: ``{"status": the worst one, "checks": [{name, status, detail, mend}, ...]}``."""
    found = list(checks)
    worst = max((check.status for check in found), key=STATUSES.index, default="ok")
    return json.dumps({"status": worst, "checks": [dataclasses.asdict(check) for check in found]}, indent=2)
