"""enable and disable: every model that mlx-lm or mlx-vlm loads from now on is (or is no longer) accelerated."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from ..policy import Policy
from . import loading, vlm

HOSTS = ("mlx_lm", "mlx_vlm")
#: Commands that train or rewrite weights: they need the stock layers.
WRITING_COMMANDS = (
    "convert",
    "lora",
    "train",
    "fuse",
    "awq",
    "dwq",
    "gptq",
    "dynamic_quant",
    "quant",
    "share",
    "upload",
)

_current: loading.Context | None = None


def enable(policy: Policy | None = None, *, command: str = "") -> None:
    """Accelerate models loaded from now on by ``mlx_lm.load``, ``mlx_vlm.load`` and their commands.

    Patches one function per host package: ``mlx_lm.utils.load_model`` and ``mlx_vlm.utils.load_model``,
    which every loading path looks up at call time. A host that is imported later is patched then.
    """
    global _current
    writes = command.rpartition(".")[2] in WRITING_COMMANDS or ".quant." in command
    _current = loading.Context(policy or Policy.from_options(), command, stays_stock=writes)
    if writes:
        sys.stderr.write(f"[accel] {command} trains or rewrites weights: it runs stock\n")
    if importlib.util.find_spec("mlx_lm") is not None:
        importlib.import_module("mlx_lm.utils")
    for host in HOSTS:
        patch(host)
    _watch_imports()


def disable() -> None:
    """Give both hosts their own ``load_model`` back. Models loaded before stay accelerated."""
    global _current
    _current = None
    vlm.uninstall()
    for host in HOSTS:
        utils = sys.modules.get(f"{host}.utils")
        original = getattr(getattr(utils, "load_model", None), "_accel_original", None)
        if utils is not None and original is not None:
            utils.load_model = original  # type: ignore[attr-defined]


def enabled() -> bool:
    return _current is not None


def patch(host: str) -> bool:
    """Wrap the host's ``load_model`` if the host is imported. Returns True if it is wrapped now."""
    utils: Any = sys.modules.get(f"{host}.utils")
    function = getattr(utils, "load_model", None)
    if utils is None or function is None:
        return False
    if getattr(function, "_accel_original", None) is None:
        utils.load_model = loading.wrap(host, function, lambda: _current)
    return True


def _watch_imports() -> None:
    """Without the start-up hook (``mlx-accel run``, pip --target) put its finder in place now."""
    try:
        import _mlx_accel_boot
    except ImportError:
        return
    if not _mlx_accel_boot.active():
        sys.meta_path.insert(0, _mlx_accel_boot.HostFinder())
