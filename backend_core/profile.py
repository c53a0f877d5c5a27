"""The profile: measured races of this machine, and the quarantine, in one JSON file.

    {"format": 1,
     "environments": {KEY: {"facts": {...}, "races": {SIGNATURE: {OFFER: {...}}}}},
     "quarantine": {OFFER_KEY: {"offer": ..., "reason": ..., "when": ...}},
     "strikes": {OFFER_KEY: how many processes ended while it was tried}}

KEY hashes everything a time depends on (machine.environment_facts); another mlx, another thread count or a
rebuilt kernel is another environment. The file is read whole and replaced whole: a reader sees the old or the
new one, never half of one. Two writers take a lock and merge. A file that cannot be read is noted and
replaced by the next one written, one that cannot be written is noted; neither stops anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import paths

FORMAT = 1
#: Environments kept, newest first: a profile must not grow with every upgrade.
MAX_ENVIRONMENTS = 16


class Profile:
    """One environment's view of the profile file.

    notes
        What was odd about the file, as sentences for the report.
    """

    def __init__(self, facts: dict[str, Any], path: Path | None = None) -> None:
        self.path = path or paths.profile_path()
        self.facts = facts
        self.key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self.notes: list[str] = []
        self._races: dict[str, dict[str, Any]] = {}
        self._new: dict[str, dict[str, Any]] = {}
        data = self._read()
        self._races = data["environments"].get(self.key, {}).get("races", {})
        self.quarantined: dict[str, dict[str, Any]] = data["quarantine"]
        strikes = data.get("strikes")
        self._strikes = {k: v for k, v in strikes.items() if isinstance(v, int)} if isinstance(strikes, dict) else {}
        dead = self._dead_markers()
        # A marker goes only once the quarantine it stands for is in the file.
        if dead and self._update(self._merge_dead):
            for marker in dead:
                with contextlib.suppress(OSError):
                    marker.unlink(missing_ok=True)

    def _merge_dead(self, data: dict[str, Any]) -> None:
        data["quarantine"].update(self.quarantined)
        data["strikes"] = self._strikes

    # Races

    def get(self, signature: str, offer: str) -> dict[str, Any] | None:
        """The stored race of an offer at a site signature."""
        entry = self._races.get(signature, {}).get(offer)
        return entry if isinstance(entry, dict) and isinstance(entry.get("rows"), dict) else None

    def put(self, signature: str, offer: str, race: dict[str, Any]) -> None:
        """Remember a race; written by :meth:`save`."""
        self._races.setdefault(signature, {})[offer] = race
        self._new.setdefault(signature, {})[offer] = race

    def save(self) -> None:
        """Merge new races into the file."""
        if not self._new:
            return

        def merge(data: dict[str, Any]) -> None:
            environment = data["environments"].pop(self.key, {"facts": self.facts, "races": {}})
            for signature, offers in self._new.items():
                environment["races"].setdefault(signature, {}).update(offers)
            environment["when"] = time.time()
            data["environments"][self.key] = environment
            newest = sorted(data["environments"].items(), key=lambda e: -e[1].get("when", 0))
            data["environments"] = dict(newest[:MAX_ENVIRONMENTS])

        if self._update(merge):
            self._new = {}

    # Quarantine

    def quarantine_reason(self, offer_key: str) -> str:
        """Why an offer is quarantined, "" if it is not."""
        return str(self.quarantined.get(offer_key, {}).get("reason", ""))

    def quarantine(self, offer_key: str, offer: str, reason: str) -> None:
        """Never run this offer again (until its plugin or mlx changes, or the profile is cleared)."""
        entry = {"offer": offer, "reason": reason, "when": time.time()}
        self.quarantined[offer_key] = entry
        self._update(lambda data: data["quarantine"].update({offer_key: entry}))

    @contextlib.contextmanager
    def in_flight(self, offer_key: str, offer: str) -> Iterator[None]:
        """Leaves a marker while an offer's code runs for the first time.

        A crash of the process leaves the marker behind, with the crash noted beside it; the next process finds
        both and quarantines the offer. A process that was merely ended (a signal from outside, a power cut) leaves
        no such note, and its offer is tried once more. An exception or an interrupt removes the marker.
        """
        marker = self.path.parent / "inflight" / f"{offer_key}.{os.getpid()}.json"
        crash = marker.with_suffix(".crash")
        watched = faulthandler.is_enabled()
        file = None
        try:
            try:
                marker.parent.mkdir(parents=True, exist_ok=True)
                facts = {"offer": offer, "offer_key": offer_key, "pid": os.getpid(), "boot": _boot_id(),
                         "start": _start_time(os.getpid()), "when": time.time()}  # fmt: skip
                marker.write_text(json.dumps(facts), encoding="utf-8")
                file = open(crash, "wb")  # noqa: SIM115  (the handler keeps it until the block ends)
                faulthandler.enable(file, all_threads=False)
            except OSError as error:
                self._note_unwritable(error)
            yield
        finally:
            if file is not None:
                faulthandler.disable()
                file.close()
                if watched and sys.__stderr__ is not None:
                    with contextlib.suppress(OSError, ValueError):
                        faulthandler.enable(sys.__stderr__)
            for left in (marker, crash):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)

    def _dead_markers(self) -> list[Path]:
        """Quarantine the offers of markers whose writer is dead, and return those markers."""
        dead = []
        try:
            markers = sorted((self.path.parent / "inflight").glob("*.json"))
        except OSError:
            return []
        for marker in markers:
            try:
                data = json.loads(marker.read_text(encoding="utf-8"))
                pid, start = int(data["pid"]), data.get("start")
                offer_key, offer = str(data["offer_key"]), str(data["offer"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                # Being written right now, or cut off by the crash itself.
                if _age(marker) > 60:
                    with contextlib.suppress(OSError):
                        marker.unlink(missing_ok=True)
                continue
            if data.get("boot") == _boot_id() and start is not None and _start_time(pid) == start:
                continue  # its writer lives
            dead += [marker, marker.with_suffix(".crash")]
            self._strikes[offer_key] = self._strikes.get(offer_key, 0) + 1
            if not _crashed(marker.with_suffix(".crash")) and self._strikes[offer_key] < 2:
                self.notes.append(f"an earlier process ended while {offer} was tried; it is tried once more")
                continue
            self.quarantined[offer_key] = {
                "offer": offer,
                "reason": "the process died while this offer ran for the first time",
                "when": data.get("when"),
            }
            self.notes.append(f"{offer} is quarantined: an earlier process died while it ran")
        return dead

    # The file

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"format": FORMAT, "environments": {}, "quarantine": {}}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return empty
        except OSError as error:
            self.notes.append(f"profile {self.path} cannot be read ({error.strerror}); racing without it")
            return empty
        except (ValueError, RecursionError):
            self.notes.append(f"profile {self.path} is corrupt and was ignored")
            return empty
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            self.notes.append(f"profile {self.path} has another format and was ignored")
            return empty
        if not _well_formed(data):
            self.notes.append(f"profile {self.path} is corrupt and was ignored")
            return empty
        if self.key not in data["environments"] and (changed := self._changed(data["environments"])):
            self.notes.append(f"earlier races do not count: {', '.join(changed)} changed")
        return data

    def _changed(self, environments: dict[str, Any]) -> list[str]:
        """Which facts differ from the newest environment of the same kind; [] if there is none."""
        same = ("machine", "cpu", "device", "activations")
        alike = [
            e
            for e in environments.values()
            if isinstance(e.get("facts"), dict)
            and all(e["facts"].get(k) == self.facts.get(k) for k in same)
            and _names(e["facts"].get("plugins")) == _names(self.facts.get("plugins"))
        ]
        if not alike:
            return []
        newest = max(alike, key=lambda e: float(e.get("when") or 0))["facts"]
        return sorted(k for k in self.facts if newest.get(k) != self.facts[k])

    def _update(self, change: Any) -> bool:
        """Read, change and replace the file under its lock. False if that was not possible."""
        import filelock

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(str(self.path) + ".lock", timeout=5):
                notes, self.notes = self.notes, []
                data = self._read()
                self.notes = notes
                change(data)
                handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".profile-")
                try:
                    with os.fdopen(handle, "w", encoding="utf-8") as f:
                        json.dump(data, f)
                    os.replace(name, self.path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(name)
                    raise
            return True
        # filelock raises NotImplementedError where the file system has no locks.
        except (OSError, NotImplementedError) as error:
            self._note_unwritable(error)
            return False

    def _note_unwritable(self, error: BaseException) -> None:
        why = getattr(error, "strerror", None) or type(error).__name__
        text = f"profile {self.path} cannot be written ({why}); races are not remembered"
        if text not in self.notes:
            self.notes.append(text)


def _well_formed(data: dict[str, Any]) -> bool:
    """True if everything down to the races themselves has the form described above."""

    def tables(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())

    return (
        tables(data.get("environments"))
        and tables(data.get("quarantine"))
        and all(
            tables(e.get("races")) and isinstance(e.get("when", 0), (int, float)) for e in data["environments"].values()
        )
    )


def _names(plugins: Any) -> list[str]:
    return sorted(plugins) if isinstance(plugins, dict) else []


def _crashed(path: Path) -> bool:
    """True if the crash of a process was noted in this file."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Something that differs between two processes which had the same pid; None if `pid` is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie is dead too; without an init process (containers) nobody may ever collect it.
        return None if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        return "alive"
    return "alive"
