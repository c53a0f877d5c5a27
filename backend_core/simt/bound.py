"""One launch of a kernel as a callable with little work per call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import compiled
from .included import include
from .nvrtc import CompileError

if TYPE_CHECKING:
    from .kernel import Launch, SimtKernel

Call = Callable[..., Any]
#: Most characters of a message: compilers write pages.
MOST_TEXT = 1500


def metal(kernel: SimtKernel, launch: Launch, fixed: Sequence[Any]) -> Call:
    """``f(inputs=, output_shapes=, output_dtypes=)``; `fixed` come after the inputs of a call."""
    import mlx.core as mx

    from .kernel import arguments

    call = functools.partial(kernel.metal(), **arguments(launch, mx))
    return _with_fixed(call, fixed) if fixed else call


class CudaCall:
    """One launch on CUDA. The first call compiles, or finds what was compiled before.

    notes
        Why mlx compiles the text instead, without bounds on registers, one sentence each; empty if it does not. Several
        calls may be given one list.
    """

    def __init__(self, kernel: SimtKernel, launch: Launch, fixed: Sequence[Any]) -> None:
        self.kernel, self.launch, self.fixed = kernel, launch, list(fixed)
        self.notes: list[str] = []
        self._compiled: Call | None = None
        self._known: dict[int, list[int]] = {}  # what is given for the shapes of fixed arrays
        self._asked: list[int] = []  # the inputs whose shapes are given
        self._types: tuple[list[Any], list[Any]] | None = None

    def __call__(self, *, inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any) -> Any:
        if self._types is None:
            self._types = [a.dtype for a in inputs], list(output_dtypes)
            self._compiled = self._compile()
        outputs: dict[str, Any] = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        if self._compiled is not None:
            if self._types == ([a.dtype for a in inputs], list(output_dtypes)):
                try:
                    scalars = [v for i in self._asked for v in self._known.get(i) or compiled.sizes(inputs[i])]
                except ValueError as error:
                    self._say(f"an array of {error}")
                else:
                    return self._compiled(inputs=[*inputs, *self.fixed], scalars=scalars, **outputs)
            else:
                given, before = (", ".join(names(types)) for types in ((a.dtype for a in inputs), self._types[0]))
                self._say(f"called with {given} after {before}")
        outputs |= {"grid": self.launch.grid, "threadgroup": self.launch.threadgroup}
        return _with_text(self.kernel, self.launch.template)(inputs=[*inputs, *self.fixed], **outputs)

    def _say(self, reason: str) -> None:
        text = f"kernel {self.kernel.name!r} is compiled by mlx, without bounds on registers: {reason[:MOST_TEXT]}"
        if text not in self.notes:
            self.notes.append(text)

    def _compile(self) -> Call | None:
        assert self._types is not None
        if reason := compiled.why_not():
            self._say(reason)
            return None
        inputs, outputs = self._types
        try:
            types = names([*inputs, *(a.dtype for a in self.fixed)]), names(outputs)
            made = compiled.compiled(self.kernel, self.launch.template, *types)
            made.prepare()
            self._asked = [self.kernel.inputs.index(name) for name in compiled.shaped(self.kernel)]
            first = len(inputs)
            self._known = {i: compiled.sizes(self.fixed[i - first]) for i in self._asked if i >= first}
        except (ValueError, OSError, CompileError) as error:
            # mlx puts its own headers before the text; if they do not help, the offer is lost with mlx's message.
            self._say(str(error))
            return None
        given = self.kernel.bytes_at_launch(self.launch.template)
        return compiled.caller(made.symbol, self.launch.grid, self.launch.threadgroup, given)


def compile_ahead(kernel: SimtKernel, launches: Iterable[Launch], inputs: Sequence[Any], output_dtypes: Sequence[Any]
                  ) -> None:  # fmt: skip
    """Compile what is not in the cache for these launches on CUDA, all at once."""
    if not compiled.why_not():
        types = names(a.dtype for a in inputs), names(output_dtypes)
        compiled.prepare(compiled.compiled(kernel, launch.template, *types) for launch in launches)


def names(dtypes: Iterable[Any]) -> tuple[str, ...]:
    """mlx's names of dtypes: ``"float16"``."""
    return tuple(str(d).rpartition(".")[2] for d in dtypes)


def _with_fixed(call: Call, fixed: Sequence[Any]) -> Call:
    def f(*, inputs: Any, output_shapes: Any, output_dtypes: Any) -> Any:
        return call(inputs=[*inputs, *fixed], output_shapes=output_shapes, output_dtypes=output_dtypes)

    return f


@functools.cache
def _with_text(kernel: SimtKernel, template: tuple[tuple[str, str | int | bool], ...]) -> Any:
    # Template parameters and functions that mlx does not see: it formats the former and copies and hashes the latter at
    # every call.
    import mlx.core as mx

    return mx.fast.cuda_kernel(
        name=kernel.name, input_names=list(kernel.inputs), output_names=list(kernel.outputs),
        source=kernel.cuda_body(template), header=include(kernel.text("cuda").header),
        shared_memory=kernel.bytes_at_launch(template),
    )  # fmt: skip
