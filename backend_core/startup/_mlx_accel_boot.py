"""Start-up hook of mlx-accel: waits for mlx_lm or mlx_vlm to be imported, and does nothing else.

Run by mlx_accel.pth (or, from Python 3.15 on, mlx_accel.start) at interpreter start. Standard library only,
no input or output. ``MLX_ACCEL_NO_HOOK=1`` switches it off.
"""

import sys

HOSTS = ("mlx_lm", "mlx_vlm")
_said = set()  # type: ignore[var-annotated]


class HostFinder:
    """A meta-path finder that finds nothing itself: it wraps the loader of the two host packages."""

    _mlx_accel = True

    def find_spec(self, name, path=None, target=None):
        if name not in HOSTS or path is not None:
            return None
        # The spec comes from whoever would have found the package without this finder.
        for finder in list(sys.meta_path):
            find = None if isinstance(finder, HostFinder) else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                break
        else:
            return None
        execute = getattr(spec.loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module):
            _call("before_import", name)
            execute(module)
            _call("after_import", name)

        try:
            spec.loader.exec_module = exec_module
        except AttributeError:
            pass  # a loader with fixed attributes: the package stays stock
        return spec


def _call(step, host):
    try:
        from backend_core.integrations import startup

        getattr(startup, step)(host)
    except Exception as error:  # a broken installation must not break mlx-lm
        message = f"[accel] start-up hook is inactive: {type(error).__name__}: {error}\n"
        if message not in _said and sys.stderr is not None:
            _said.add(message)
            sys.stderr.write(message)


def active():
    """True if the finder is in place."""
    return any(getattr(finder, "_mlx_accel", False) for finder in sys.meta_path)


def install():
    """Put the finder in place once. Never raises."""
    import os

    if os.environ.get("MLX_ACCEL_NO_HOOK", "0") in ("", "0") and not active():
        sys.meta_path.insert(0, HostFinder())
