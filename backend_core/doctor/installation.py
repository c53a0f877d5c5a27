"""Sections about mlx-accel itself: the native module, the backends and the plugins."""

from __future__ import annotations

from .checks import Check, fault, note, ok


def native_checks() -> list[Check]:
    """The native module, its ABI probe, instruction sets and threads."""
    import os

    from .. import native

    state = native.status()
    built = f"built for mlx {state.build['mlx']}, nanobind {state.build['nanobind']}" if state.build else ""
    if state.available:
        return [
            ok("native.module", f"works ({built}, kernel ABI {state.build.get('kernel_abi')}), probe passed"),
            ok("native.isa", f"{state.isa}: {' '.join(state.isa_names)}"
               + (f" (MLX_ACCEL_ISA={os.environ['MLX_ACCEL_ISA']})" if os.environ.get("MLX_ACCEL_ISA") else "")),
            ok("native.threads", f"{state.threads}"
               + (" (MLX_ACCEL_THREADS)" if os.environ.get("MLX_ACCEL_THREADS") else "")),
        ]  # fmt: skip
    what, _, mend = state.reason.partition("; ")
    chosen = "switched off" in state.reason
    if not state.build and (chosen or "without its native module" in state.reason):
        return [note("native.module", f"absent: {what}; CPU kernels do not run, everything else does", mend)]
    return [fault("native.module", what, mend or "Reinstall mlx-accel for the installed mlx.")]


def backend_checks() -> list[Check]:
    """Every installed backend can be imported."""
    from .. import backends

    checks = []
    for name in backends.names():
        try:
            backends.get(name)
        except Exception as error:
            checks.append(
                fault(f"backends.{name}", str(error), "Reinstall or remove the distribution that provides it.")
            )
    return checks or [ok("backends", ", ".join(backends.names()))]


def quarantine_checks() -> list[Check]:
    """Offers that killed a process are not used any more."""
    import json

    from .. import paths

    try:
        entries = json.loads(paths.profile_path().read_text(encoding="utf-8")).get("quarantine", {}).values()
        names = sorted({f"{e['offer']} ({e['reason']})" for e in entries})
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return []  # the profile has checks of its own
    if not names:
        return [ok("quarantine", "empty")]
    return [note("quarantine", "; ".join(names), "`mlx-accel profile clear` lifts it, once the cause is gone.")]


def plugin_checks() -> list[Check]:
    """State of every installed plugin; a broken one is a fault, one that does not fit here a note."""
    from .. import core
    from ..policy import Policy

    checks = []
    for r in core.plugin_host(Policy()).all_records():
        name = f"plugins.{r.name}"
        where = f"{r.distribution} {r.version}".strip()
        if r.state == "ready":
            missing = [k for k in r.kernels if not k.path.is_file()]
            if missing:
                checks.append(fault(name, f"{where}: {missing[0].path} is gone", f"Reinstall {r.distribution}."))
            else:
                checks.append(ok(name, f"{where}: {', '.join(r.hooks)}; {len(r.kernels)} kernels"))
        elif r.state == "failed":
            checks.append(fault(name, f"{where}: {r.reason}", f"Reinstall or remove {r.distribution or r.name}."))
        else:
            checks.append(note(name, f"{where}: {r.reason}"))
    return checks or [note("plugins", "none installed: every layer stays stock",
                           "Install at least one, e.g. mlx-accel-bonsai-qmv.")]  # fmt: skip
