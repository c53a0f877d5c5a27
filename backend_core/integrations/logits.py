"""logsumexp over the vocabulary, which mlx-lm computes once per generated token.

The call is ``mx.logsumexp(logits, ...)`` inside the generation loops of ``mlx_lm.generate``. Changing the attribute of
``mlx.core``, or the loops' global ``mx``, would reach every model and every other call. So the loops get a twin: their
own code with globals of its own, in which ``mx`` is a stand-in that passes everything on to ``mlx.core`` but this one
function, and all other names are the module's. The twin runs if the loop's model is the accelerated one.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from ..probes_ops import LogitsProbe
from ..report import Report

#: (class or "", function) of the loops in mlx_lm.generate, and how their model is found.
_LOOPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("", "generate_step", lambda prompt=None, model=None, *a, **k: model),
    ("", "speculative_generate_step", lambda prompt=None, model=None, *a, **k: model),
    ("GenerationBatch", "_step", lambda self, *a, **k: getattr(self, "model", None)),
)
#: owner -> the stand-in for mlx.core.
_stand_ins: dict[int, _StandIn] = {}
_routed: list[_Route] = []


class LogitsSlot:
    """The chosen callable for one dtype of logits."""

    def __init__(self, report: Report, probe: LogitsProbe, function: Callable[..., Any] | None) -> None:
        self.report, self.probe, self.function = report, probe, function

    def call(self, module: Any, *args: Any) -> Any:
        return self.probe.stock(module, *args) if self.function is None else self.function(*args)


class _StandIn:
    """mlx.core with another logsumexp."""

    def __init__(self) -> None:
        import mlx.core as mx

        self._mx = mx
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mx, name)

    def logsumexp(self, x: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
        function = self._functions.get(getattr(x, "dtype", None))
        if function is None or not keepdims or options or not x.size:
            return self._mx.logsumexp(x, axis=axis, keepdims=keepdims, **options)
        if axis == -1 or (axis is None and x.size == x.shape[-1]):
            return function(x)
        return self._mx.logsumexp(x, axis=axis, keepdims=keepdims, **options)


class _Globals(dict[str, Any]):
    """The globals of a module, but for some names."""

    def __init__(self, module: dict[str, Any], names: dict[str, Any]) -> None:
        super().__init__(names)
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


class _Route:
    """One loop: its own function, and a twin for every accelerated model."""

    def __init__(self, module: Any, function: types.FunctionType, model_of: Callable[..., Any]) -> None:
        self.module, self.function, self.code = module, function, function.__code__
        self.name = f"_accel_{function.__name__}"
        self.stock = self._twin(function.__globals__)
        self.fast: dict[int, Callable[..., Any]] = {}

        def route(*args: Any, **kwargs: Any) -> Any:
            return self.fast.get(id(model_of(*args, **kwargs)), self.stock)(*args, **kwargs)

        def trampoline(*args: Any, **kwargs: Any) -> Any:
            return _route(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

        signature = inspect.signature(function)
        module.__dict__[self.name] = route
        names = tuple(self.name if n == "_route" else n for n in trampoline.__code__.co_names)
        function.__code__ = trampoline.__code__.replace(co_names=names)
        function.__signature__ = signature  # type: ignore[attr-defined]

    def add(self, owner: int) -> None:
        self.fast[owner] = self._twin(_Globals(self.function.__globals__, {"mx": _stand_ins[owner]}))

    def undo(self) -> None:
        self.function.__code__ = self.code
        del self.function.__signature__  # type: ignore[attr-defined]
        self.module.__dict__.pop(self.name, None)

    def _twin(self, names: dict[str, Any]) -> types.FunctionType:
        f = self.function
        twin = types.FunctionType(self.code, names, f.__name__, f.__defaults__)
        twin.__kwdefaults__ = f.__kwdefaults__
        return twin


def available(host: str) -> bool:
    """True if the host has loops that can be routed."""
    return host == "mlx_lm" and bool(_routed or _loops())


def install(slot: LogitsSlot, owner: int) -> None:
    """Route the loops of the model with id `owner` to the slot's function."""
    import mlx.core as mx

    if slot.function is None:
        return
    if owner not in _stand_ins:
        _stand_ins[owner] = _StandIn()
    _stand_ins[owner]._functions[getattr(mx, slot.probe.site.x_dtype)] = slot.function
    if not _routed:
        _routed.extend(_Route(*loop) for loop in _loops())
    for route in _routed:
        route.add(owner)


def uninstall(owner: int) -> int:
    """Remove what was installed for a model; the loops get their code back with the last one."""
    stand_in = _stand_ins.pop(owner, None)
    if stand_in is None:
        return 0
    for route in _routed:
        route.fast.pop(owner, None)
    # A loop that runs on has stock's function from now on.
    count = len(stand_in._functions)
    stand_in._functions.clear()
    if not _stand_ins:
        while _routed:
            _routed.pop().undo()
    return count


def _loops() -> list[tuple[Any, types.FunctionType, Callable[..., Any]]]:
    modules = [sys.modules.get("mlx_lm.generate")]
    main = sys.modules.get("__main__")
    # ``python -m mlx_lm.generate`` has copies of its own.
    if getattr(getattr(main, "__spec__", None), "name", "") == "mlx_lm.generate":
        modules.append(main)
    found = []
    for module in modules:
        for owner, name, model_of in _LOOPS:
            holder: Any = getattr(module, owner, None) if owner else module
            function = vars(holder).get(name) if holder is not None else None
            if isinstance(function, types.FunctionType) and not function.__closure__ and _names(function.__code__):
                found.append((module, function, model_of))
    return found


def _names(code: types.CodeType) -> bool:
    return "logsumexp" in code.co_names or any(_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
