"""Start-up hook of mlx-accel: waits for mlx_lm or mlx_vlm to be imported, and does nothing else.

Run by mlx_accel.pth (or, from Python 3.15 on, mlx_accel.start) at interpreter start. Standard library only,
no input or output. ``MLX_ACCEL_NO_HOOK=1`` switches it off.
"""

import sys

HOSTS = ("mlx_lm", "mlx_vlm")


class HostFinder:
    """A meta-path finder that finds nothing itself: it wraps the loader of the two host packages."""

    _mlx_accel = True

    def find_spec(self, name, path=None, target=None):
        if name not in HOSTS or path is not None:
            return None
        import importlib.util

        # Step aside, so that the spec comes from whoever would have found the package.
        at = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(at, self)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            _call("before_import", name)
            execute(module)
            _call("after_import", name)

        spec.loader.exec_module = exec_module
        return spec


def _call(step, host):
    try:
        from backend_core.integrations import startup
    except Exception as error:  # a broken installation must not break mlx-lm
        sys.stderr.write(f"[accel] start-up hook is inactive: {type(error).__name__}: {error}\n")
        return
    getattr(startup, step)(host)


def active():
    """True if the finder is in place."""
    return any(getattr(finder, "_mlx_accel", False) for finder in sys.meta_path)


def install():
    """Put the finder in place once. Never raises."""
    import os

    if os.environ.get("MLX_ACCEL_NO_HOOK", "0") in ("", "0") and not active():
        sys.meta_path.insert(0, HostFinder())
