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


def metal(kernel: SimtKernel, launch: Launch, fixed: Sequence[Any]) -> Call:
    """``f(inputs=, output_shapes=, output_dtypes=)``; `fixed` come after the inputs of a call."""
    import mlx.core as mx

    from .kernel import arguments

    call = functools.partial(kernel.metal(), **arguments(launch, mx))
    return _with_fixed(call, fixed) if fixed else call


def cuda(kernel: SimtKernel, launch: Launch, fixed: Sequence[Any]) -> Call:
    """As :func:`metal`. The first call compiles, or finds what was compiled before."""
    call: Callable[[Any, Any, Any], Any] | None = None

    def f(*, inputs: Any, output_shapes: Any, output_dtypes: Any) -> Any:
        nonlocal call
        if call is None:
            call = _started(kernel, launch, fixed, inputs, output_dtypes)
        return call(inputs, output_shapes, output_dtypes)

    return f


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


def _started(kernel: SimtKernel, launch: Launch, fixed: Sequence[Any], inputs: Sequence[Any],
             output_dtypes: Sequence[Any]) -> Callable[[Any, Any, Any], Any]:  # fmt: skip
    """``f(inputs, output_shapes, output_dtypes)``."""
    text = _text(kernel, launch, fixed)
    if compiled.why_not():
        return text
    try:
        types = names(a.dtype for a in (*inputs, *fixed)), names(output_dtypes)
        made = compiled.compiled(kernel, launch.template, *types)
        made.prepare()
    except (ValueError, OSError):
        return text
    except CompileError:
        # mlx puts its own headers before the text: if they do not help, its message is the one that users know.
        return text
    call = compiled.caller(made.symbol, launch.grid, launch.threadgroup)
    expected, outputs, fixed = [a.dtype for a in inputs], list(output_dtypes), list(fixed)
    arrays = [None] * len(inputs) + fixed
    # Which input's shape is asked for at every call, and what is known already.
    plan = [
        (i, None if arrays[i] is None else compiled.sizes(arrays[i]))
        for i in map(kernel.inputs.index, compiled.shaped(kernel))
    ]

    def fast(inputs: Any, output_shapes: Any, output_dtypes: Any) -> Any:
        if [a.dtype for a in inputs] != expected or output_dtypes != outputs:
            return text(inputs, output_shapes, output_dtypes)
        scalars: list[int] = []
        for i, known in plan:
            if known is None:
                if inputs[i].ndim > compiled.MOST_DIMENSIONS:
                    return text(inputs, output_shapes, output_dtypes)
                known = compiled.sizes(inputs[i])
            scalars += known
        return call(inputs=[*inputs, *fixed], output_shapes=output_shapes, output_dtypes=output_dtypes, scalars=scalars)

    return fast


def _text(kernel: SimtKernel, launch: Launch, fixed: Sequence[Any]) -> Callable[[Any, Any, Any], Any]:
    """What mlx compiles itself, made when it is needed."""

    @functools.cache
    def made() -> Any:
        return functools.partial(_with_text(kernel, launch.template), grid=launch.grid, threadgroup=launch.threadgroup)

    def f(inputs: Any, output_shapes: Any, output_dtypes: Any) -> Any:
        return made()(inputs=[*inputs, *fixed], output_shapes=output_shapes, output_dtypes=output_dtypes)

    return f


@functools.cache
def _with_text(kernel: SimtKernel, template: tuple[tuple[str, str | int | bool], ...]) -> Any:
    # Template parameters and functions that mlx does not see: it formats the former and copies and hashes the latter at
    # every call.
    import mlx.core as mx

    from .kernel import constants

    text = kernel.text("cuda")
    return mx.fast.cuda_kernel(
        name=kernel.name, input_names=list(kernel.inputs), output_names=list(kernel.outputs),
        source=constants(template) + text.source, header=include(text.header),
    )  # fmt: skip
