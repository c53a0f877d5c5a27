"""Programs: several bound kernels as one primitive of mlx's graph.

A plugin's callable that is a bound kernel (:meth:`backend_core.cpu_kernel.CpuKernel.bind`) can be run together with
others: results that only later kernels need never become arrays of the graph, and a node, its scheduling and its
queueing are paid once. Every kernel is called exactly as it would be on its own, so the bits are the same::

    p = Program("gate_up", 1)
    gate, up = p.call(gate_kernel, p.input(0)), p.call(up_kernel, p.input(0))
    run = p.build(p.call(swiglu_kernel, gate, up))
    y = run(x)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import native


@dataclass(frozen=True)
class Value:
    """An array inside a program: an input (step -1) or an output of a step, seen through views."""

    step: int
    index: int = 0
    views: tuple[Any, ...] = ()

    def split(self, parts: int) -> Value:
        """The last dimension n as (parts, n / parts)."""
        return Value(self.step, self.index, (*self.views, ("split", parts)))

    def swap(self) -> Value:
        """Dimensions 1 and 2 exchanged."""
        return Value(self.step, self.index, (*self.views, "swap"))

    def limit(self, parameter: int) -> Value:
        """The first so many of dimension 2, as that parameter of the program's call says when it runs.

        No result's shape may depend on that dimension.
        """
        return Value(self.step, self.index, (*self.views, ("limit", parameter)))

    def part(self, begin: int, end: int) -> Value:
        """Elements [begin, end) of the last dimension; not for results of the program."""
        return Value(self.step, self.index, (*self.views, ("part", begin, end)))

    def other(self, index: int) -> Value:
        """Another output of the same kernel."""
        return Value(self.step, index)

    def merge(self) -> Value:
        """The last two dimensions as one; copies where that is not a matter of strides."""
        return Value(self.step, self.index, (*self.views, "merge"))


class Program:
    """A program under construction; :meth:`build` makes it callable."""

    def __init__(self, name: str, inputs: int) -> None:
        self.name = name
        self._inputs = inputs
        self._steps: list[tuple[Any, tuple[tuple[Any, ...], ...], bool]] = []

    def input(self, i: int) -> Value:
        """Input number i."""
        return Value(-1, i)

    def call(self, kernel: Any, *values: Value, call_params: bool = False) -> Value:
        """The (first) result of a bound kernel; call_params: it gets the ``params`` of the program's call."""
        sources = tuple((v.step, v.index, *v.views) for v in values)
        self._steps.append((kernel, sources, call_params))
        return Value(len(self._steps) - 1)

    def build(self, *outputs: Value) -> Callable[..., Any]:
        """``run(x, ..., params=())`` -> an array, or a tuple of arrays if there are several outputs.

        Lazy, on the default CPU stream; no gradients. Raises TypeError if a kernel is not a bound one and
        NativeUnavailable without the native module.
        """
        made: Callable[..., Any] = native.get().program(
            self.name, self._inputs, self._steps, [(v.step, v.index, *v.views) for v in outputs]
        )
        return made


def is_bound(function: Any) -> bool:
    """True if a callable is a bound kernel, which can be part of a program."""
    return native.available() and isinstance(function, native.get().Bound)
