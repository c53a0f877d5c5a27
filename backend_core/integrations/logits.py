"""logsumexp and argmax over the vocabulary, which hosts compute once per generated token.

The first is a call of ``mx.logsumexp(logits, ...)`` inside the generation loops. Changing the attribute of
``mlx.core``, or the loops' global ``mx``, would reach every model and every other call. So the loops get a twin: their
own code with globals of its own, in which ``mx`` is a stand-in that passes everything on to ``mlx.core`` but this one
function, and all other names are the module's. The twin runs if the loop's model is the accelerated one.

The second is what the hosts' greedy sampler does, and nothing else is taken for it: mlx-lm's ``greedy_sampler`` by
identity, mlx-vlm's by the code that its ``make_sampler`` makes it of.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from ..probes_ops import LogitsProbe
from ..report import Report

#: (module, class or "", function) of the loops, and how their model is found.
_LOOPS: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("mlx_lm.generate", "", "generate_step", lambda prompt=None, model=None, *a, **k: model),
    ("mlx_lm.generate", "", "speculative_generate_step", lambda prompt=None, model=None, *a, **k: model),
    ("mlx_lm.generate", "GenerationBatch", "_step", lambda self, *a, **k: getattr(self, "model", None)),
    ("mlx_vlm.generate.ar", "", "generate_step", lambda input_ids=None, model=None, *a, **k: model),
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
    """mlx.core with another logsumexp; and another greedy sampler."""

    def __init__(self) -> None:
        import mlx.core as mx

        self._mx = mx
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._greedy: dict[Any, Callable[..., Any]] = {}

    def _names(self, module: dict[str, Any]) -> dict[str, Any]:
        """What a twin has in place of a module's own names."""
        names: dict[str, Any] = {"mx": self}
        if module.get("greedy_sampler") is not None:
            names["greedy_sampler"] = self._greedy_sampler
        stock = module.get("_sample_with_positions")
        if stock is not None:

            def sample(sampler: Any, logprobs: Any, **options: Any) -> Any:
                function = self._greedy.get(logprobs.dtype) if _is_greedy(sampler) and logprobs.size else None
                return stock(sampler, logprobs, **options) if function is None else function(logprobs)

            names["_sample_with_positions"] = sample
        return names

    def _greedy_sampler(self, logprobs: Any) -> Any:
        function = self._greedy.get(getattr(logprobs, "dtype", None))
        return self._mx.argmax(logprobs, axis=-1) if function is None or not logprobs.size else function(logprobs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mx, name)

    def logsumexp(self, x: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
        function = self._functions.get(getattr(x, "dtype", None))
        if function is None or not keepdims or options or not x.size:
            return self._mx.logsumexp(x, axis=axis, keepdims=keepdims, **options)
        if axis == -1 or (axis is None and x.size == x.shape[-1]):
            return function(x)
        return self._mx.logsumexp(x, axis=axis, keepdims=keepdims, **options)


def _is_greedy(sampler: Any) -> bool:
    """True for the samplers that the hosts make for a temperature of zero."""
    lm, vlm = (getattr(sys.modules.get(f"{host}.sample_utils"), name, None)
               for host, name in (("mlx_lm", "greedy_sampler"), ("mlx_vlm", "make_sampler")))  # fmt: skip
    if lm is not None and sampler is lm:
        return True
    code, made_by = getattr(sampler, "__code__", None), getattr(vlm, "__code__", None)
    if code is None or made_by is None or sampler.__closure__ or "argmax" not in code.co_names:
        return False
    return any(const is code for const in made_by.co_consts)


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
            owner = id(model_of(*args, **kwargs))
            fast = self.fast.get(owner)
            if fast is None:
                return self.stock(*args, **kwargs)
            # What was given as an argument is no name of the twin.
            if "sampler" in kwargs and kwargs["sampler"] is module.__dict__.get("greedy_sampler", self):
                kwargs["sampler"] = _stand_ins[owner]._greedy_sampler
            return fast(*args, **kwargs)

        def trampoline(*args: Any, **kwargs: Any) -> Any:
            return _route(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

        signature = inspect.signature(function)
        module.__dict__[self.name] = route
        names = tuple(self.name if n == "_route" else n for n in trampoline.__code__.co_names)
        function.__code__ = trampoline.__code__.replace(co_names=names)
        function.__signature__ = signature  # type: ignore[attr-defined]

    def add(self, owner: int) -> None:
        names = self.function.__globals__
        self.fast[owner] = self._twin(_Globals(names, _stand_ins[owner]._names(names)))

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
    return any(route.module.__name__.partition(".")[0] == host for route in _routed) or any(
        function.__module__.partition(".")[0] == host for _, function, _ in _loops()
    )


def install(slot: LogitsSlot, owner: int) -> None:
    """Route the loops of the model with id `owner` to the slot's function."""
    import mlx.core as mx

    if slot.function is None:
        return
    if owner not in _stand_ins:
        _stand_ins[owner] = _StandIn()
    stand_in, dtype = _stand_ins[owner], getattr(mx, slot.probe.site.x_dtype)
    functions = stand_in._greedy if slot.probe.site.variant == "argmax" else stand_in._functions
    functions[dtype] = slot.function
    known = [route.function for route in _routed]
    _routed.extend(_Route(*loop) for loop in _loops() if loop[1] not in known)
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
    count = len(stand_in._functions) + len(stand_in._greedy)
    stand_in._functions.clear()
    stand_in._greedy.clear()
    if not _stand_ins:
        while _routed:
            _routed.pop().undo()
    return count


def _loops() -> list[tuple[Any, types.FunctionType, Callable[..., Any]]]:
    main = sys.modules.get("__main__")
    found = []
    for host, owner, name, model_of in _LOOPS:
        modules = [sys.modules.get(host)]
        # ``python -m mlx_lm.generate`` has copies of its own.
        if getattr(getattr(main, "__spec__", None), "name", "") == host:
            modules.append(main)
        for module in modules:
            holder: Any = getattr(module, owner, None) if owner else module
            function = vars(holder).get(name) if holder is not None else None
            if isinstance(function, types.FunctionType) and not function.__closure__ and _names(function.__code__):
                found.append((module, function, model_of))
    return found


def _names(code: types.CodeType) -> bool:
    return "logsumexp" in code.co_names or any(_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
