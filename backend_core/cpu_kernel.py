"""CPU kernels as lazy mlx operations.

A CPU kernel is a C function in a plain shared library, written against ``accel/kernel.h`` (see
``python -m backend_core --include-dir``). :func:`cpu_kernel` makes it callable from Python::

    scale = cpu_kernel("kernels.so", "scale_rows")
    y, = scale(inputs=[x, s], output_shapes=[like(0)], output_dtypes=[like(0)], params=[2])

    layer = scale.bind([s], output_shape=like(0), output_dtype=like(0), params=[2])
    y = layer(x)

The result is a node of mlx's graph like any other: it runs when it is evaluated, on a CPU stream, and works
under ``mx.compile``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import native

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class OneDim:
    """Dimension `axis` of input `input`; see :func:`dim`."""

    input: int
    axis: int

    def terms(self) -> tuple[Any, ...]:
        return (("dim", self.input, self.axis),)


@dataclass(frozen=True)
class Dims:
    """Dimensions ``[begin:end]`` of input `input`; see :func:`dims`."""

    input: int
    begin: int = 0
    end: int | None = None

    def terms(self) -> tuple[Any, ...]:
        return (("dims", self.input, self.begin, _END if self.end is None else self.end),)


@dataclass(frozen=True)
class Like:
    """Shape (or dtype) of input `input`; see :func:`like`."""

    input: int
    last: int | OneDim | None = None

    def terms(self) -> tuple[Any, ...]:
        if self.last is None:
            return Dims(self.input).terms()
        return Dims(self.input, 0, -1).terms() + _terms(self.last)


@dataclass(frozen=True)
class ResultType:
    """What the dtypes of some inputs promote to; see :func:`result_type`."""

    inputs: tuple[int, ...]


_END = 2**31 - 1


def like(input: int, *, last: int | OneDim | None = None) -> Like:
    """The shape of input number `input`, with its last dimension replaced by `last` if that is given.

    `last` is a number or a :func:`dim` of another input. As an output dtype, ``like(i)`` is the dtype of that
    input. Unlike a shape given as numbers, a rule holds for every number of rows, also inside
    ``mx.compile(..., shapeless=True)``.
    """
    return Like(input, last)


def dim(input: int, axis: int) -> OneDim:
    """One dimension of an input, as an entry of an output shape: ``(dim(0, 0), 4, dim(1, -1))``."""
    return OneDim(input, axis)


def dims(input: int, begin: int = 0, end: int | None = None) -> Dims:
    """Dimensions ``[begin:end]`` of an input, as an entry of an output shape: ``(dims(1), dim(0, -1))``."""
    return Dims(input, begin, end)


def result_type(*inputs: int) -> ResultType:
    """As an output dtype: what the dtypes of these inputs promote to under mlx's rules."""
    return ResultType(tuple(inputs))


def _terms(entry: Any) -> tuple[Any, ...]:
    return entry.terms() if isinstance(entry, (OneDim, Dims, Like)) else (entry,)


def _shape(rule: Any) -> tuple[Any, ...]:
    if isinstance(rule, (OneDim, Dims, Like)):
        return rule.terms()
    return tuple(t for entry in rule for t in _terms(entry))


def _dtype(rule: Any) -> Any:
    if isinstance(rule, Like):
        return (rule.input,)
    return rule.inputs if isinstance(rule, ResultType) else rule


class CpuKernel:
    """A kernel ready to be called; made by :func:`cpu_kernel`.

    Attributes: ``name``, ``library`` (path), ``symbol``.
    """

    def __init__(
        self,
        library: str,
        symbol: str,
        name: str,
        ensure_row_contiguous: bool,
        vjp: Callable[..., Any] | None,
    ) -> None:
        self.name = name
        self.library = library
        self.symbol = symbol
        self._native = native.get()
        self._options = {"ensure_row_contiguous": ensure_row_contiguous, "vjp": vjp}
        try:
            self._kernel = self._native.Kernel(library, symbol)
        except RuntimeError as e:
            raise RuntimeError(f"CPU kernel {name!r}: {e}") from None
        self._calls: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<CPU kernel {self.name!r}: {self.symbol} of {self.library}>"

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Any],
        output_dtypes: Sequence[Any],
        params: Sequence[int | float] = (),
        stream: Any = None,
        donate: Mapping[int, int] | None = None,
    ) -> list[mx.array]:
        """Adds one call of the kernel to mlx's graph and returns its outputs.

        inputs
            The arrays the kernel reads, of any dtype and shape it accepts.
        output_shapes
            One per output: a sequence of numbers, :func:`dim` and :func:`dims` entries, or a rule such as
            :func:`like`.
        output_dtypes
            One per output: an ``mx.Dtype``, ``like(i)`` or ``result_type(i, j)``.
        params
            Integers and floats, the kernel's ``call->params``.
        stream
            A CPU stream, or None for the thread's default CPU stream.
        donate
            Output number -> input number: that output holds the input's elements when the kernel is entered, and
            the kernel writes only what changes. Where nobody else holds the input, the output takes its memory;
            else the input is copied first. Both must have one shape and dtype.

        Raises ValueError if a rule does not fit the inputs or the stream is a GPU's, and TypeError for wrong
        types. What the kernel itself rejects is known only at evaluation: its outputs are then NaN (integers:
        0), and the next call of any CPU kernel raises RuntimeError with the message, unless
        :func:`backend_core.native.take_errors` has taken it before.
        """
        call = self._prepare(output_shapes, output_dtypes, donate)
        return call(list(inputs), stream, params=list(params))

    def bind(
        self,
        fixed_inputs: Sequence[mx.array] = (),
        *,
        output_shape: Any = None,
        output_dtype: Any = None,
        output_shapes: Sequence[Any] | None = None,
        output_dtypes: Sequence[Any] | None = None,
        params: Sequence[int | float] = (),
        donate: Mapping[int, int] | None = None,
    ) -> Callable[..., Any]:
        """A fast callable for a kernel whose trailing inputs never change.

        It returns one array if the output is described by `output_shape` and `output_dtype`, and a tuple if the
        outputs are described by `output_shapes` and `output_dtypes`; `donate` is that of a call. It is called as
        ``bound(x)`` or ``bound(x, y, ...)``: its arrays are the kernel's first inputs, and `fixed_inputs` follow.
        Keywords: ``stream``, as in a call, and ``params``, which replace the bound ones for that call.

        Raises ValueError or TypeError as a call does.
        """
        several = output_shapes is not None
        if several != (output_dtypes is not None) or several == (output_shape is not None or output_dtype is not None):
            raise TypeError("bind takes output_shape and output_dtype, or output_shapes and output_dtypes")
        shapes, dtypes = (output_shapes, output_dtypes) if several else ([output_shape], [output_dtype])
        call = self._make(shapes or (), dtypes or (), params, donate)
        return call.bind(list(fixed_inputs), several)

    def _make(self, shapes: Sequence[Any], dtypes: Sequence[Any], params: Sequence[int | float] = (),
              donate: Mapping[int, int] | None = None) -> Any:  # fmt: skip
        return self._native.Call(
            self._kernel,
            self.name,
            output_shapes=[_shape(s) for s in shapes],
            output_dtypes=[_dtype(d) for d in dtypes],
            params=list(params),
            donate=dict(donate) if donate else None,
            **self._options,
        )

    def _prepare(self, shapes: Sequence[Any], dtypes: Sequence[Any], donate: Mapping[int, int] | None) -> Any:
        """The call for these rules, remembered: it is what costs most of a call's time."""
        key = (
            tuple(s if isinstance(s, (OneDim, Dims, Like)) else tuple(s) for s in shapes),
            tuple(dtypes),
            tuple(sorted(donate.items())) if donate else (),
        )
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= 64:
                self._calls.clear()
            call = self._calls[key] = self._make(shapes, dtypes, (), donate)
        return call


def cpu_kernel(
    library: str | os.PathLike[str] | Any,
    symbol: str,
    *,
    name: str | None = None,
    ensure_row_contiguous: bool = True,
    vjp: Callable[..., Any] | None = None,
) -> CpuKernel:
    """A C function of a shared library as a lazy mlx operation.

    library
        Path of the library, or a file of ``importlib.resources``.
    symbol
        Name of the function, ``void symbol(const accel_call*)``.
    name
        Shown in errors and graphs; the symbol by default.
    ensure_row_contiguous
        If True, an input that is not row-contiguous is copied before the kernel sees it; if False, the kernel
        gets the strides as they are.
    vjp
        ``vjp(primals, cotangents, argnums) -> [gradient for each of argnums]``, made of mlx operations;
        without it, differentiating the kernel is an error. It must not hold the object that holds the kernel,
        which would then never be freed (use ``weakref``).

    Raises :class:`backend_core.native.NativeUnavailable` if CPU kernels cannot run here, and RuntimeError,
    naming kernel, library and symbol, if there is no such library or function or if it was built for a newer
    kernel ABI than this mlx-accel has.
    """
    return CpuKernel(_path(library), symbol, name or symbol, ensure_row_contiguous, vjp)


def _path(library: Any) -> str:
    if isinstance(library, (str, os.PathLike)):
        return os.fspath(Path(library).absolute())
    # importlib.resources: a library can only be opened from a real file.
    import importlib.resources

    with importlib.resources.as_file(library) as path:
        return os.fspath(path.absolute())


class _Callable(ModuleType):
    """This module, callable: the package exports the function under the module's own name, and importing a
    submodule puts the module there."""

    def __call__(self, *args: Any, **kwargs: Any) -> CpuKernel:
        return cpu_kernel(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
