"""The native module, and whether it can be used.

``backend_core._native`` is compiled against one release of mlx. Everything else in the package works without
it, so nothing imports it directly: :func:`status` says whether CPU kernels are available and, if not, why and
what mends it; :func:`get` returns the module or raises :class:`NativeUnavailable` with the same sentence.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class NativeUnavailable(RuntimeError):
    """CPU kernels cannot run here; the message says why and what mends it."""


@dataclass(frozen=True)
class Status:
    """Whether CPU kernels can run in this process.

    available
        True if the native module was loaded and passed its probe.
    reason
        ``""``, or one sentence that says what is wrong and what mends it.
    build
        What the module was built against: ``mlx``, ``nanobind``, ``kernel_abi``, ``compiler``. Empty if it
        could not be imported.
    isa
        Level of the instruction sets that kernels may use (``"avx512_vnni"``), ``""`` if unavailable.
    isa_names
        All of them by name.
    threads
        Threads a kernel may use, 0 if unavailable.
    content_hash
        Identifies the module's file, ``""`` if unavailable; a profile of another module is not valid.
    """

    available: bool
    reason: str = ""
    build: dict[str, Any] = field(default_factory=dict, hash=False)
    isa: str = ""
    isa_names: tuple[str, ...] = ()
    threads: int = 0
    content_hash: str = ""


_REBUILD = "reinstall it with `pip install --force-reinstall --no-deps mlx-accel`"


def status() -> Status:
    """Whether CPU kernels can run in this process; imports mlx and probes the module on the first call.

    Never raises. Thread count and instruction sets are those of the first call.
    """
    return _load()[1]


def get() -> ModuleType:
    """The module ``backend_core._native``.

    Raises :class:`NativeUnavailable` if :func:`status` says that it is not available.
    """
    module, state = _load()
    if module is None:
        raise NativeUnavailable(state.reason)
    return module


def available() -> bool:
    """``status().available``."""
    return _load()[0] is not None


def in_tracing(array: Any = None) -> bool:
    """True while mlx records a graph on this thread; with an array, True if it is part of what is recorded.

    Without the native module nobody can tell, and the answer is False.
    """
    module = _load()[0]
    return module is not None and bool(module.in_tracing(array))


def in_dynamic_tracing() -> bool:
    """True while mlx records a graph whose shapes may differ at replay; False without the native module."""
    module = _load()[0]
    return module is not None and bool(module.in_dynamic_tracing())


class PlainSnapshot:
    """The arrays of a module at one moment, without the native module.

    Goes by the identity of Python objects: it does not notice ``layer.scales *= 2`` or ``layer.scales[0] = 1``,
    which keep the object and change what is in it.
    """

    def __init__(self, module: Any) -> None:
        self._size = len(module)
        self._arrays = tuple((k, v) for k, v in module.items() if hasattr(v, "dtype"))

    def holds(self, module: Any) -> bool:
        """True if the dict has as many entries and the very same arrays."""
        if len(module) != self._size:
            return False
        get = module.get
        for name, array in self._arrays:  # noqa: SIM110  (asked at every call, and a generator takes twice as long)
            if get(name) is not array:
                return False
        return True

    def put_back(self, module: Any) -> None:
        """Puts the arrays back under their names."""
        for name, array in self._arrays:
            dict.__setitem__(module, name, array)


def snapshot(layer: Any) -> Any:
    """The arrays of a layer now, as an object with ``holds(layer)`` and ``put_back(layer)``."""
    module, _ = _load()
    return PlainSnapshot(layer) if module is None else module.Snapshot(layer)


def take_errors() -> list[str]:
    """Messages of kernels that failed since the last call, oldest first, each as ``"kernel: message"``.

    A kernel that fails at evaluation fills its outputs with NaN (integers: 0) and leaves its message here.
    What nobody has taken is raised as RuntimeError by the next call of any CPU kernel. (Evaluation itself
    cannot raise it: after an exception from a stream's thread, mlx may wait for ever for other arrays of that
    evaluation.)
    """
    module = _load()[0]
    return [] if module is None else list(module.take_errors())


@functools.lru_cache(maxsize=1)
def _load() -> tuple[ModuleType | None, Status]:
    build: dict[str, Any] = {}
    try:
        module = _import()
        build = dict(module.build_info())
        _check_version(build["mlx"])
        _probe(module)
        _bits, level, names = _isa(module)
        threads = module.threads()
    except NativeUnavailable as e:
        return None, Status(False, str(e), build)
    except Exception as e:  # whatever a mismatched binary does must not stop the host
        return None, Status(False, f"the native module does not work ({_describe(e)}); {_REBUILD}", build)
    # These two are asked once per layer call: later callers reach the module's own functions.
    globals().update(in_tracing=module.in_tracing, in_dynamic_tracing=module.in_dynamic_tracing)
    return module, Status(True, "", build, level, tuple(names), threads, _content_hash(module))


def _import() -> ModuleType:
    if os.environ.get("MLX_ACCEL_NATIVE", "") == "0":
        raise NativeUnavailable("CPU kernels are switched off by MLX_ACCEL_NATIVE=0; unset it")
    try:
        import mlx.core  # noqa: F401  (says more clearly than the native module what is wrong with mlx)
    except ImportError as e:
        raise NativeUnavailable(f"mlx cannot be imported ({_describe(e)}); reinstall mlx") from e
    try:
        try:
            from backend_core import _native
        except ImportError as e:
            if not _missing(e):
                raise
            _native = _installed_beside_a_checkout(e)
    except ImportError as e:
        if _missing(e):
            raise NativeUnavailable(
                "mlx-accel was installed without its native module (no C++ compiler, or "
                "MLX_ACCEL_BUILD_NATIVE=0); install a C++20 compiler and reinstall mlx-accel"
            ) from e
        raise NativeUnavailable(
            f"the native module cannot be loaded ({_describe(e)}), most likely because it was built for "
            f"another mlx than {_mlx_version()}; {_REBUILD}"
        ) from e
    return _native


def _missing(error: ImportError) -> bool:
    """There is no such module; other ImportErrors mean that it cannot be loaded."""
    return isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error)


def _installed_beside_a_checkout(error: ImportError) -> ModuleType:
    """The module of the installed package, for Python code that runs from a source tree.

    ``python -m`` puts the current directory first, so that inside a checkout its `backend_core` hides the
    installed one, which has the compiled part. Raises `error` if there is none.
    """
    import importlib.metadata
    import importlib.util
    import sys

    try:
        files = importlib.metadata.distribution("mlx-accel").files or []
    except importlib.metadata.PackageNotFoundError:
        raise error from None
    for file in files:
        if file.name.startswith("_native.") and file.parent.name == "backend_core":
            path = str(file.locate())
            spec = importlib.util.spec_from_file_location("backend_core._native", path)
            if spec is not None and spec.loader is not None and os.path.isfile(path):
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules["backend_core._native"] = module
                return module
    raise error


def _mlx_version() -> str:
    import mlx.core as mx

    return str(getattr(mx, "__version__", "unknown"))


def _check_version(built_against: str) -> None:
    from packaging.version import InvalidVersion, Version

    running = _mlx_version()
    try:
        same = Version(running).release[:3] == Version(built_against).release[:3]
    except InvalidVersion:
        same = running == built_against
    if not same:
        raise NativeUnavailable(
            f"the native module was built for mlx {built_against}, and mlx {running} is installed; run `pip "
            f"install mlx=={built_against}`, or {_REBUILD}"
        )


def _probe(module: ModuleType) -> None:
    """Passes an array through the module and through a tiny kernel of its own."""
    import mlx.core as mx

    x = mx.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=mx.float32)
    try:
        seen = module.abi_probe(x)
    except TypeError as e:
        raise NativeUnavailable(
            f"the native module does not recognise an mx.array: it was built with another nanobind "
            f"({module.build_info()['nanobind']}) than mlx {_mlx_version()}; {_REBUILD}"
        ) from e
    if tuple(seen[:4]) != ((2, 3), 6, 4, 2):
        raise NativeUnavailable(
            f"the native module misreads an mx.array ({seen}): it was built for another mlx than "
            f"{_mlx_version()}; {_REBUILD}"
        )
    call = module.Call(
        module.Kernel(module.__file__, "accel_selftest"),
        "selftest",
        output_shapes=[(("dims", 0, 0, -1), 3)],
        output_dtypes=[(0,)],
        params=[7],
    )
    # Runs on a stream of its own, so that the caller's default stream stays as it is.
    result = call([x], mx.new_stream(mx.cpu))[0].tolist()
    if result != [[9.0, 11.0, 13.0], [15.0, 17.0, 19.0]]:
        raise NativeUnavailable(f"the native module computes wrongly ({result}); {_REBUILD}")


def _isa(module: ModuleType) -> tuple[int, str, tuple[str, ...]]:
    try:
        return module.isa()
    except ValueError as e:
        raise NativeUnavailable(str(e)) from e


def _content_hash(module: ModuleType) -> str:
    import hashlib

    with open(str(module.__file__), "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()[:16]


def _describe(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0]
