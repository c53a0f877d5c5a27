"""Finding, loading and asking plugins, such that a broken one is a record and never a crash.

pluggy holds the hook specifications and the registered implementations. Loading and calling are done here,
one plugin at a time, because pluggy's own `load_setuptools_entrypoints` and hook calls stop at the first
exception and would lose the answers of every other plugin.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pluggy

from . import hookspecs, manifest
from .errors import PluginError
from .hookspecs import ENTRY_POINT_GROUP, PROJECT
from .kernels_registry import KernelInfo, Registry
from .offers import Offer, as_offers
from .policy import Policy
from .sites import SITE_TYPES, Site

HOOKS = ("register_kernels", *SITE_TYPES)
#: What a plugin's code may raise without consequence: sys.exit() in a plugin must not end the program.
_FAULTS = (Exception, SystemExit)

#: Context around a plugin's code.
Watch = Callable[["PluginRecord"], Any]


@dataclass
class Fault:
    """One exception of a plugin: where it happened and the traceback."""

    where: str
    error: str
    traceback: str = ""


@dataclass
class PluginRecord:
    """What is known about one plugin.

    state
        ``"ready"``; ``"off"`` (by policy); ``"unmet"`` (this machine or these versions do not fit);
        ``"failed"`` (could not be loaded).
    """

    name: str
    version: str = ""
    distribution: str = ""
    entry: str = ""
    state: str = "ready"
    reason: str = ""
    hooks: tuple[str, ...] = ()
    kernels: tuple[KernelInfo, ...] = ()
    content_hash: str = ""
    faults: list[Fault] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "distribution": self.distribution,
            "entry": self.entry,
            "state": self.state,
            "reason": self.reason,
            "hooks": list(self.hooks),
            "kernels": [{"name": k.name, "device": k.device, "exactness": k.exactness, "file": str(k.path)}
                        for k in self.kernels],
            "faults": [vars(f) for f in self.faults],
        }  # fmt: skip

    def why_not(self) -> str:
        """One sentence on why this plugin does not serve, "" if it does."""
        if self.state != "ready":
            return self.reason
        return self.faults[-1].error if self.faults else ""


class PluginHost:
    """All plugins of one policy on one machine."""

    def __init__(self, policy: Policy | None = None, *, devices: tuple[str, ...], isa: tuple[str, ...] = (),
                 entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:  # fmt: skip
        """Load every plugin that the policy admits and that fits `devices` and `isa`.

        Raises PluginError if a plugin that the user named cannot be loaded, or under ``strict`` if any
        cannot.
        """
        self.policy = policy or Policy()
        self.records: dict[str, PluginRecord] = {}
        self._duplicates: list[PluginRecord] = []
        self._devices, self._isa = devices, isa
        self._pm = pluggy.PluginManager(PROJECT)
        self._pm.add_hookspecs(hookspecs)
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        for entry in sorted(entry_points, key=lambda e: e.name):
            self._load(entry)
        self._check_named()
        self.notes = [
            f"plugins=-{name} turns nothing off: there is no such plugin"
            for name in self.policy.excluded_plugins
            if name not in self.records
        ]

    # Loading

    def _load(self, entry: importlib.metadata.EntryPoint) -> None:
        name = entry.name.replace("-", "_")
        record = PluginRecord(name, entry=entry.value)
        if entry.dist is not None:
            record.distribution, record.version = entry.dist.name, entry.dist.version
        if name in self.records:
            record.state = "failed"
            record.reason = (
                f"the name {name!r} is already taken by {self.records[name].distribution or 'another plugin'}"
            )
            self._duplicates.append(record)
            return
        self.records[name] = record
        try:
            path = manifest.find(entry.module)
            facts = manifest.read(path) if path else manifest.Manifest()
            record.hooks = facts.hooks
            if not self.policy.admits_plugin(name):
                record.state, record.reason = "off", "turned off by the plugins option"
                return
            if unmet := facts.unmet(self._devices, self._isa):
                record.state, record.reason = "unmet", unmet
                return
            with contextlib.redirect_stdout(sys.stderr):
                plugin = entry.load()
            if plugin is None:
                raise TypeError(f"{entry.value} is None, not a plugin")
        except _FAULTS as error:
            self._fail(record, "loading", error)
            return
        self._register(record, plugin)

    def register(self, plugin: object, name: str) -> PluginRecord:
        """Add a plugin object directly, as tests and notebooks do."""
        name = name.replace("-", "_")
        if name in self.records:
            raise PluginError(f"a plugin named {name!r} is already registered")
        record = self.records[name] = PluginRecord(name, entry=repr(plugin))
        if not self.policy.admits_plugin(name):
            record.state, record.reason = "off", "turned off by the plugins option"
        else:
            self._register(record, plugin)
        return record

    def _register(self, record: PluginRecord, plugin: object) -> None:
        try:
            self._refuse_wrappers(plugin)
            self._pm.register(plugin, record.name)
            # A hook that no specification knows (a typo) is only found here.
            self._pm.check_pending()
        except _FAULTS as error:
            # Some releases of pluggy keep the hooks that came before the faulty one.
            if self._pm.get_plugin(record.name) is not None:
                self._pm.unregister(name=record.name)
            self._fail(record, "registering", error)
            return
        callers = self._pm.get_hookcallers(plugin) or []
        record.hooks = tuple(h for h in HOOKS if h in {c.name for c in callers})
        if not record.hooks:
            self._pm.unregister(plugin)
            missing = "no hooks found: is @hookimpl missing?"
            self._fail(record, "registering", ValueError(missing))
            return
        if "register_kernels" in record.hooks:
            registry = Registry(record.name)
            for impl in self._pm.hook.register_kernels.get_hookimpls():
                if impl.plugin is plugin:
                    try:
                        _call(impl, {"registry": registry})
                        record.kernels = tuple(registry.kernels)
                        record.content_hash = registry.content_hash()
                    except _FAULTS as error:
                        self._pm.unregister(plugin)
                        self._fail(record, "register_kernels", error)

    def _refuse_wrappers(self, plugin: object) -> None:
        for attribute in dir(plugin):
            options = self._pm.parse_hookimpl_opts(plugin, attribute)
            if options and (options.get("wrapper") or options.get("hookwrapper")):
                raise TypeError(f"{attribute} is a hook wrapper; a plugin answers for itself and must not wrap others")

    def _fail(self, record: PluginRecord, where: str, error: BaseException) -> None:
        record.state = "failed"
        record.reason = f"{where}: {describe(error)}"
        self._note(record, where, error)

    def _note(self, record: PluginRecord, where: str, error: BaseException) -> None:
        text = describe(error)
        try:
            trace = "".join(traceback.format_exception(error))
        except Exception:  # an exception that cannot even be printed
            trace = text
        record.faults.append(Fault(where, text, trace))
        if self.policy.strict:
            raise PluginError(f"plugin {record.name!r}: {where}: {text}") from error

    def _check_named(self) -> None:
        for name in self.policy.named_plugins:
            record = self.records.get(name)
            if record is None:
                have = ", ".join(sorted(self.records)) or "none"
                raise PluginError(f"plugin {name!r} is not installed (installed: {have})")
            if record.state != "ready":
                raise PluginError(f"plugin {name!r} was asked for and cannot serve: {record.reason}")

    # Asking

    def all_records(self) -> list[PluginRecord]:
        return [*self.records.values(), *self._duplicates]

    def implements(self, hook: str) -> bool:
        """True if any ready plugin implements `hook`."""
        return bool(getattr(self._pm.hook, hook).get_hookimpls())

    def ask(self, site: Site, watch: Watch | None = None) -> Iterator[tuple[PluginRecord, list[Offer], str]]:
        """For each plugin that implements the site's hook: its record, its offers, and what went wrong.

        The third item is "" if the plugin answered properly. watch(record) is entered around its code.
        """
        for impl in getattr(self._pm.hook, site.hook).get_hookimpls():
            record = self.records[impl.plugin_name]
            try:
                with watch(record) if watch is not None else contextlib.nullcontext():
                    offers = as_offers(_call(impl, {"site": site, "policy": self.policy}), site)
                names = [o.name for o in offers]
                if len(set(names)) != len(names):
                    raise ValueError(f"two offers with one name: {names}")
            except _FAULTS as error:
                self._note(record, f"{site.hook}({site.path})", error)
                yield record, [], describe(error)
                continue
            for offer in offers:
                object.__setattr__(offer, "plugin", record.name)
            yield record, offers, ""

    def collect(self, site: Site, watch: Watch | None = None) -> tuple[list[Offer], list[tuple[str, str]]]:
        """All offers for a site, and (plugin, reason) for each plugin that made none."""
        offers: list[Offer] = []
        refusals: list[tuple[str, str]] = []
        for record, answer, wrong in self.ask(site, watch):
            offers += answer
            if wrong:
                refusals.append((record.name, wrong))
            elif not answer:
                refusals.append((record.name, "made no offer"))
        for record in self.all_records():
            if record.state != "ready" and (site.hook in record.hooks or record.state == "failed"):
                refusals.append((record.name, record.reason))
        return offers, refusals

    def retire(self, name: str, reason: str) -> None:
        """Ask a plugin nothing more; `reason` stands in every report."""
        record = self.records[name]
        plugin = self._pm.get_plugin(name)
        if plugin is not None:
            self._pm.unregister(plugin)
        record.state, record.reason = "failed", reason


def describe(error: BaseException) -> str:
    """Type and message, also of exceptions whose message cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its message cannot be shown)"


def _call(impl: Any, arguments: dict[str, Any]) -> Any:
    # What a plugin prints must not get between the lines of the user's output.
    with contextlib.redirect_stdout(sys.stderr):
        return _call_plainly(impl, arguments)


def _call_plainly(impl: Any, arguments: dict[str, Any]) -> Any:
    # A plugin may take fewer arguments than the specification has.
    return impl.function(*[arguments[name] for name in impl.argnames])
