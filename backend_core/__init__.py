"""mlx-accel: a pluggable acceleration backend for mlx-lm and mlx-vlm.

    from backend_core import accelerate, restore
    report = accelerate(model)
    print(report.line())
    restore(model)

Names are loaded on first use, so that importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "accelerate": "core",
    "accelerated": "core",
    "load": "core",
    "report_of": "core",
    "restore": "core",
    "plugin_host": "core",
    "PluginHost": "plugins",
    "disable": "integrations.activate",
    "enable": "integrations.activate",
    "Policy": "policy",
    "Report": "report",
    "Decision": "report",
    "Offer": "offers",
    "hookimpl": "hookspecs",
    "cpu_kernel": "cpu_kernel",
    "like": "cpu_kernel",
    "AccelError": "errors",
    "PluginError": "errors",
    "PolicyError": "errors",
    "UnknownBackend": "errors",
    "LinearSite": "sites",
    "AttentionSite": "sites",
    "MoeSite": "sites",
    "DraftSite": "sites",
    "OpSite": "sites",
    "CheckpointSite": "sites",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from .core import accelerate, accelerated, load, plugin_host, report_of, restore  # noqa: F401
    from .cpu_kernel import cpu_kernel, like  # noqa: F401
    from .hookspecs import hookimpl  # noqa: F401
    from .integrations.activate import disable, enable  # noqa: F401
    from .offers import Offer  # noqa: F401
    from .plugins import PluginHost  # noqa: F401
    from .policy import Policy  # noqa: F401
    from .report import Decision, Report  # noqa: F401


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        if name == "__version__":
            from .machine import version

            return version("mlx-accel")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
