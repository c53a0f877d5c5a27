"""Kernels as mx.fast.metal_kernel takes them: a body, with the signature written around it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import launch, module
from .dtypes import BFloat16Array, LabDtype, Sparse, as_array, bfloat16, dtype_of, int32, int64, skew_of
from .errors import LabError
from .report import Result
from .signature import Generated, InputFacts, generate


@dataclass(frozen=True)
class _Input:
    facts: InputFacts
    value: np.ndarray[Any, Any] | Sparse
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    skew: int = 0


@dataclass(frozen=True)
class MetalKernel:
    """A kernel to be called as the object that mx.fast.metal_kernel returns; made by :func:`metal_kernel`.

    files
        Name and text of the files that line directives in source and header name, for messages.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    files: tuple[tuple[str, str], ...] = ()

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        contract: Mapping[str, Any] | None = None,
        groups: Sequence[tuple[int, int, int]] | None = None,
        timeout: float = 60.0,
    ) -> Result:
        """Runs the kernel; nothing is changed but the arrays that are returned.

        inputs
            Arrays, numbers, ``lab.sparse``, ``lab.to_bfloat16`` arrays. A contiguous slice of a larger array lies
            where it lies there, so that wide loads of it may be misaligned.
        grid, threadgroup
            Threads in x, y, z; the last groups are smaller if the grid is no multiple.
        output_shapes, output_dtypes
            As in mlx. Outputs hold nothing before, unless init_value is given: then they are filled with it.
        contract
            Name of an input or output to its shape, or to ``(shape, dtype)``. What does not fit is refused.
        groups
            Run these threadgroups only; outputs need not be complete then.
        timeout
            Seconds after which the launch is stopped, a fault.

        Raises :class:`LabError` for text that does not compile and launches that cannot be made.
        """
        given = self._inputs(inputs)
        outputs = self._outputs(output_shapes, output_dtypes, init_value)
        by_output = dict(zip(self.output_names, outputs, strict=True))
        _check_contract(self.name, given, by_output, contract or {})
        facts = [i.facts for i in given]
        text = self.generated(facts, [d for _, d in outputs], template)
        loaded = self._load(text)
        by_input = {i.facts.name: i for i in given}
        bound = []
        for index, argument in enumerate(text.arguments):
            if argument.part == "output":
                array, dtype = by_output[argument.name]
                fresh = init_value is None
                bound.append(launch.Bound(argument.name, index, array, dtype, False, not fresh, fresh))
                continue
            item = by_input[argument.name]
            if argument.part == "input":
                bound.append(launch.Bound(argument.name, index, item.value, item.facts.dtype, True, skew=item.skew))
                continue
            value: Any = {"shape": item.shape, "strides": item.strides, "ndim": len(item.shape)}[argument.part]
            dtype = int64 if argument.part == "strides" else int32
            name = f"{argument.name}_{argument.part}"
            bound.append(launch.Bound(name, index, np.array(value, dtype=dtype.storage), dtype, True))
        entry = loaded.entries[text.function]
        report = launch.run(loaded, entry, bound, grid, threadgroup, groups=groups, timeout=timeout)
        return Result([array for array, _ in outputs], report)

    def generated(
        self, inputs: Sequence[InputFacts], output_dtypes: Sequence[Any], template: Sequence[tuple[str, Any]] = ()
    ) -> Generated:
        """The Metal text for inputs of these types and sizes."""
        outputs = [(n, dtype_of(d)) for n, d in zip(self.output_names, output_dtypes, strict=True)]
        return generate(self.name, self.source, self.header, inputs, outputs, template, self.atomic_outputs)

    def whole_text(self, text: Generated) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Header, signature and body with line directives, and the texts that these name."""
        head, body = f"{self.name}.header.metal", f"{self.name}.metal"
        whole = f'#line 1 "{head}"\n{text.header}\n#line 1 "{self.name}.signature"\n{text.before}'
        whole += f'#line 1 "{body}"\n{self.source}\n#line 1 "{self.name}.signature"\n{text.after}'
        return whole, ((head, self.header), (body, self.source), *self.files)

    def _load(self, text: Generated) -> module.Module:
        whole, texts = self.whole_text(text)
        return module.load(whole, texts, include="lab/mlx_utils.h")

    def _inputs(self, inputs: Sequence[Any]) -> list[_Input]:
        if len(inputs) != len(self.input_names):
            raise LabError(f"{self.name} takes {len(self.input_names)} inputs {self.input_names}, not {len(inputs)}")
        out = []
        for name, value in zip(self.input_names, inputs, strict=True):
            if isinstance(value, Sparse):
                facts = InputFacts(name, value.dtype, value.size, len(value.shape))
                out.append(_Input(facts, value, value.shape, _row_strides(value.shape)))
                continue
            try:
                array, dtype = as_array(value)
            except ValueError as e:
                raise LabError(f"{self.name}: input {name!r}: {e}") from None
            strides, skew = tuple(s // array.itemsize for s in array.strides), skew_of(array)
            if self.ensure_row_contiguous or array.flags.c_contiguous:
                skew = skew if array.flags.c_contiguous else 0
                memory, strides = np.ascontiguousarray(array).reshape(array.shape), _row_strides(array.shape)
            else:
                memory = _span(self.name, name, array)
            out.append(_Input(InputFacts(name, dtype, array.size, array.ndim), memory, array.shape, strides, skew))
        return out

    def _outputs(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], init_value: float | None
    ) -> list[tuple[np.ndarray[Any, Any], LabDtype]]:
        if not len(shapes) == len(dtypes) == len(self.output_names):
            raise LabError(
                f"{self.name} has {len(self.output_names)} outputs {self.output_names}, "
                f"but {len(shapes)} shapes and {len(dtypes)} dtypes are given"
            )
        out = []
        for name, shape, wanted in zip(self.output_names, shapes, dtypes, strict=True):
            try:
                dtype = dtype_of(wanted)
                array = np.zeros(tuple(shape), dtype=dtype.storage)
            except (TypeError, ValueError) as e:
                raise LabError(f"{self.name}: output {name!r} of shape {shape}: {e}") from None
            if dtype is bfloat16:
                array = array.view(BFloat16Array)
            if init_value is not None:
                array[...] = to_storage(init_value, dtype)
            out.append((array, dtype))
        return out


def to_storage(value: float, dtype: LabDtype) -> Any:
    """A number as an element of the type's storage."""
    from .dtypes import to_bfloat16

    return to_bfloat16(value) if dtype is bfloat16 else np.array(value).astype(dtype.storage)


def _row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _span(kernel: str, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory from the first to the last element of an array with strides, as one row."""
    if any(s < 0 or s % array.itemsize for s in array.strides):
        raise LabError(f"{kernel}: input {name!r} has strides {array.strides}, which the lab cannot lay out")
    length = 1 + sum((n - 1) * (s // array.itemsize) for n, s in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (length,), (array.itemsize,)).copy()


def _shape(wanted: Any) -> tuple[int, ...]:
    return tuple(operator.index(n) for n in wanted)


def _check_contract(
    kernel: str,
    inputs: list[_Input],
    outputs: Mapping[str, tuple[np.ndarray[Any, Any], LabDtype]],
    contract: Mapping[str, Any],
) -> None:
    actual = {i.facts.name: (i.shape, i.facts.dtype) for i in inputs}
    actual |= {name: (array.shape, dtype) for name, (array, dtype) in outputs.items()}
    wrong = []
    for name, wanted in contract.items():
        if name not in actual:
            raise LabError(
                f"{kernel}: the contract names {name!r}, which is no input or output; there are {sorted(actual)}"
            )
        shape, dtype = actual[name]
        try:
            if len(wanted) == 2 and isinstance(wanted[0], (tuple, list)):
                wanted_shape, wanted_dtype = _shape(wanted[0]), dtype_of(wanted[1])
            else:
                wanted_shape, wanted_dtype = _shape(wanted), dtype
        except (TypeError, ValueError):
            raise LabError(f"{kernel}: the contract of {name!r} is a shape or (shape, dtype), not {wanted!r}") from None
        if shape != wanted_shape or dtype != wanted_dtype:
            wrong.append(f"{name}: {shape} {dtype.name}, the contract wants {wanted_shape} {wanted_dtype.name}")
    if wrong:
        raise LabError(f"{kernel}: buffers do not fit the contract, nothing was launched\n" + "\n".join(wrong))


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
) -> MetalKernel:
    """A kernel from the body of a Metal function; the arguments are those of mx.fast.metal_kernel.

    Nothing is compiled before the first call. Input sizes, ranks and dtypes and the template decide the signature,
    as in mlx: inputs of fewer than 8 elements are in the constant address space, ``x_shape``, ``x_strides``,
    ``x_ndim`` and the position attributes exist where the body names them.
    """
    return MetalKernel(
        name, tuple(input_names), tuple(output_names), source, header, ensure_row_contiguous, atomic_outputs
    )
