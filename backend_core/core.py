"""accelerate, restore, accelerated, load: the Python interface."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import activations, install, joined, joined_stack, machine, native, walk, walk_blocks, walk_calls
from .integrations import cache, calls, scope
from .plugins import PluginHost
from .policy import Policy, strange_variables
from .probe_base import forget_inputs
from .profile import Profile
from .report import Report
from .select import Session

#: Hooks whose offers this version collects and reports.
_OTHER_HOOKS = (
    ("fuse_moe", walk.find_moe),
    ("verify_draft", walk_calls.find_drafts),
)
_LOCK = threading.RLock()
#: id(model) -> (weak reference, report, policy, host given by the caller, fingerprint of the stock layers).
_STATES: dict[int, tuple[weakref.ref[Any], Report, Policy, PluginHost | None, tuple[Any, ...]]] = {}


def plugin_host(policy: Policy | None = None) -> PluginHost:
    """All installed plugins, loaded under a policy on this machine. Raises PluginError."""
    return PluginHost(policy, devices=machine.devices(), isa=machine.isa_names())


def accelerate(model: Any, policy: Policy | None = None, *, host: PluginHost | None = None) -> Report:
    """Accelerate a model in place and say what was done.

    model
        Any ``mlx.nn.Module``; mlx-lm and mlx-vlm models are meant. It keeps its parameters, their names and
        its module types; layers that a plugin serves faster call that plugin from now on.
    policy
        Default: from the environment (``MLX_ACCEL_...``).
    host
        Loaded plugins, to use others than the installed ones.

    Returns a :class:`Report` with one decision per site. A second call with the same policy changes nothing
    and returns the same report, unless weights were replaced in between: those layers are decided anew.

    Raises PluginError if a plugin named in ``policy.plugins`` cannot serve, or on any plugin fault under
    ``strict``. On every exception, KeyboardInterrupt included, the model is left stock.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy, not {policy!r}; write Policy(race='off')")
    if not hasattr(model, "named_modules"):
        raise TypeError(
            f"accelerate() takes a model (mlx.nn.Module), not {type(model).__name__}; "
            f"backend_core.load(path) loads one and accelerates it"
        )
    policy = policy or Policy.from_options()
    with _LOCK, walk.snapshot(model):
        previous = _state(model)
        if previous is not None:
            report, old_policy, old_host, fingerprint = previous
            if old_policy == policy and old_host is host and not _changed(model, fingerprint):
                return report
        # Also for a part of an accelerated model: its layers are decided anew, not left half and half.
        restore(model)
        with _without_collections():
            return _accelerate(model, policy, host)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collections: with a tokenizer in memory each looks at millions of objects, and none is freed here."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _accelerate(model: Any, policy: Policy, host: PluginHost | None) -> Report:
    begin = time.perf_counter()
    loaded = host or plugin_host(policy)
    report = Report(policy=policy.as_dict())
    _select(model, policy, loaded, report)
    report.plugins = [r.as_dict() for r in loaded.all_records()]
    report.seconds = time.perf_counter() - begin
    key = id(model)
    reference = weakref.ref(model, lambda _: _forget(key))
    _STATES[key] = (reference, report, policy, host, _fingerprint(model))
    return report


def _select(model: Any, policy: Policy, host: PluginHost, report: Report) -> None:
    import mlx.core as mx

    report.activations = activations.resolve(policy, model)
    cast = activations.embeddings(model) if report.activations == "float32" else []
    x_dtype = "float32" if cast else walk.activations_dtype(model)
    versions = {r.name: f"{r.version} {r.content_hash}" for r in host.all_records() if r.state == "ready"}
    profile = Profile(machine.environment_facts(report.activations, versions))
    session = Session(policy, host, profile, report, machine.default_device())
    try:
        sites = walk.find_linears(model, x_dtype)
        if host.implements("select_op"):
            sites += walk.find_ops(model, x_dtype) + walk_calls.find_functions(model, x_dtype)
            sites += walk_calls.find_logits(model, x_dtype)
        if host.implements("select_attention"):
            sites += (attention := walk_calls.find_attention(model, x_dtype))
            sites += walk_calls.find_updates(attention) if host.implements("select_op") else []
        chosen = session.modules(sites)
        report.decisions = [decision for _, decision, _ in chosen]
        for hook, find in _OTHER_HOOKS:
            if host.implements(hook):
                report.decisions += session.others(find(model, x_dtype))
        session.check_named()
    finally:
        profile.save()
        # A race must not show in the user's memory figures.
        forget_inputs()
        mx.clear_cache()
        mx.reset_peak_memory()
    report.notes += [*strange_variables(), *host.notes]
    state = native.status()
    if session.device == "cpu" and not state.available:
        report.note(f"no CPU kernels: {state.reason}")
    for record in host.all_records():
        if record.state == "failed":
            report.note(f"plugin {record.name} failed: {record.reason}")
        elif record.faults:
            report.note(f"plugin {record.name}: {record.faults[-1].where}: {record.faults[-1].error}")
    report.notes += [n for n in profile.notes if n not in report.notes]
    if walk.host_of(model) == "mlx_vlm":
        from .integrations import vlm

        vlm.install()
    try:
        for found, _, slot in chosen:
            if slot is None:
                continue
            if found.module is None:
                calls.install(slot, found.callers, id(model))
            else:
                install.install(found.module, slot)
        for module in cast:
            slot = install.slot_of(module)
            if slot is None:
                install.install(module, install.Slot(module, report, cast=True))
            else:
                slot.cast = True
        _join(model, session, profile)
    except BaseException:
        for module in _modules(model):
            install.uninstall(module)
            scope.uninstall(module)
        calls.uninstall(id(model))
        raise
    for label, count in session.wrong.items():
        report.note(f"{label} failed verification at {count} site{'s' if count > 1 else ''} and does not run there")
    if cast:
        report.note(activations.kv_note(model, cache.dtype_of(id(model))))


def _join(model: Any, session: Session, profile: Profile) -> None:
    """Let the accelerated parts of known blocks run as one piece, where that is faster: layers, then what is left."""
    done: set[int] = set()
    for layers in (True, False):
        try:
            chosen = session.modules(joined.find(model, session, layers, done))
        finally:
            profile.save()
            forget_inputs()
        session.report.decisions += [decision for _, decision, slot in chosen if slot is not None]
        for found, _, slot in chosen:
            if slot is not None:
                scope.join(found.module, id(model), slot.plan)
                done |= {id(found.module), *joined.inner(found.module)}
        if layers:
            _say_what_is_not_joined(model, session.report, chosen)
    try:
        chosen = session.modules(joined_stack.find(model, session))
    finally:
        profile.save()
        forget_inputs()
    session.report.decisions += [decision for _, decision, slot in chosen if slot is not None]
    _say_what_did_not_win(session.report, chosen)
    for found, _, slot in chosen:
        if slot is not None:
            scope.join(found.module, id(model), slot.plan)


def _say_what_is_not_joined(model: Any, report: Report, chosen: list[Any]) -> None:
    """Never silent: decoder layers whose code is not known, or whose joined form was wrong or no faster."""
    _say_what_did_not_win(report, chosen)
    if not walk.host_of(model) or not native.available() or machine.default_device() != "cpu":
        return
    layers = {id(layer) for layer in getattr(model, "layers", None) or ()}
    for path, module in walk.sorted_modules(model):
        if id(module) in layers and walk_blocks.form_of(walk.stock_class(module)) is None:
            report.unjoined.setdefault("its code is not known", []).append(path)


def _say_what_did_not_win(report: Report, chosen: list[Any]) -> None:
    for found, decision, slot in chosen:
        if slot is None:
            reason = next((loser.reason for loser in decision.losers if loser.offer == "core/joined"), "it did not win")
            report.unjoined.setdefault(reason, []).append(found.site.path)


def restore(model: Any) -> int:
    """Give every layer of `model` its stock class back. Returns how many were accelerated.

    Works on any model that holds accelerated layers, whoever accelerated them.
    """
    with _LOCK:
        state = _state(model)
        modules = _modules(model)
        for module in modules:
            slot = install.slot_of(module)
            if slot is not None and (state is None or slot.report is not state[0]):
                slot.report.note("a part of this model was restored or decided again afterwards")
        count = calls.uninstall(id(model))
        for module in modules:
            count += install.uninstall(module)
            scope.uninstall(module)
        _STATES.pop(id(model), None)
        return count


@contextlib.contextmanager
def accelerated(model: Any, policy: Policy | None = None) -> Iterator[Report]:
    """``with accelerated(model) as report:`` accelerates inside the block and restores after it.

    A model that was accelerated before is so again after it, under its former policy.
    """
    before = _state(model)
    report = accelerate(model, policy)
    try:
        yield report
    finally:
        if before is None:
            restore(model)
        else:
            accelerate(model, before[1], host=before[2])


def load(path: str | Path, policy: Policy | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """mlx-lm's ``load`` with the checkpoint formats of plugins, accelerated. Returns (model, tokenizer).

    `kwargs` go to ``mlx_lm.load``. Raises ModelError, UnknownQuantization or PluginError.
    """
    from .integrations import loading

    return loading.load(path, policy or Policy.from_options(), **kwargs)


def report_of(model: Any) -> Report | None:
    """The report of an accelerated model, None for a stock one."""
    state = _state(model)
    return state[0] if state else None


def _state(model: Any) -> tuple[Report, Policy, PluginHost | None, tuple[Any, ...]] | None:
    entry = _STATES.get(id(model))
    if entry is None or entry[0]() is not model:
        return None
    return entry[1:]


def _forget(key: int) -> None:
    """A model is gone: so are its report and what was routed for it."""
    _STATES.pop(key, None)
    calls.uninstall(key)


def _fingerprint(model: Any) -> tuple[Any, ...]:
    """Changes when a layer is replaced by another one or holds other arrays."""
    kinds = walk.linear_kinds()
    return tuple(
        (id(module), *(id(v) for v in module.values()))
        for module in _modules(model)
        if walk.stock_class(module) in kinds and install.slot_of(module) is None
    )


def _changed(model: Any, fingerprint: tuple[Any, ...]) -> bool:
    slots = [(m, slot) for m in _modules(model) if (slot := install.slot_of(m)) is not None]
    return any(not slot.fresh(m) for m, slot in slots) or fingerprint != _fingerprint(model)


def _modules(model: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    for _, module in walk.modules_of(model):
        seen.setdefault(id(module), module)
    return list(seen.values())
