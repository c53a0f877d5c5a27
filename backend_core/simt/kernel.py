"""A kernel for Metal, CUDA and the lab from one source file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import shared_memory
from .text import KernelText, given_at_launch, text_of

#: What a CUDA kernel has without asking.
DECLARED_BYTES = 49152


@dataclass(frozen=True)
class Launch:
    """How a kernel is started.

    template
        Name and value of each template parameter, in order. dtypes by mlx's name (``"float16"``).
    grid
        Threads in all, a multiple of `threadgroup` in each dimension.
    threadgroup
        Threads of a threadgroup.
    """

    template: tuple[tuple[str, str | int | bool], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    def __post_init__(self) -> None:
        if any(t < 1 or g % t for g, t in zip(self.grid, self.threadgroup, strict=True)):
            raise ValueError(f"a grid of {self.grid} threads is not made of threadgroups of {self.threadgroup}")
        if (threads := self.threadgroup[0] * self.threadgroup[1] * self.threadgroup[2]) > 1024 or threads % 32:
            raise ValueError(f"a threadgroup of {threads} threads: at most 1024, and whole SIMD groups of 32")

    def value(self, name: str) -> str | int | bool:
        """A template parameter's value."""
        return dict(self.template)[name]


@dataclass(frozen=True)
class SimtKernel:
    """One kernel of a ``.metal`` file, and what the host must know about it.

    name
        As in the file's line ``// --- kernel NAME ---``.
    source
        The file: a path or a file of ``importlib.resources``.
    inputs, outputs
        Names, in the order of the arrays of a call.
    template
        Names of the template parameters, in order.
    geometry
        ``geometry(**facts) -> Launch``; which facts, the kernel's module says.
    threadgroup_bytes
        ``threadgroup_bytes(launch) -> int``: threadgroup memory that a launch takes.
    eligible
        ``eligible(**facts) -> str``: why the kernel cannot serve, "" if it can.
    devices
        What its text is written for. The lab's report refuses what CUDA does not have in a kernel for both.
    """

    name: str
    source: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[str, ...]
    geometry: Callable[..., Launch]
    threadgroup_bytes: Callable[[Launch], int] = lambda launch: 0
    eligible: Callable[..., str] = lambda **facts: ""
    devices: tuple[str, ...] = ("metal", "cuda")

    def text(self, target: str) -> KernelText:
        """Functions and body for ``"metal"`` or ``"cuda"``."""
        return text_of(self.source, self.name, target)

    def launch(self, **facts: Any) -> Launch:
        """The geometry for these facts. ``device`` is one of them, ``"metal"`` if not given.

        Raises ValueError if the kernel is not made for them, or if template parameters are not the kernel's or
        threadgroup memory is more than the device has.
        """
        if (device := facts.get("device", "metal")) not in self.devices:
            raise ValueError(f"kernel {self.name!r} does not run on {device!r}")
        if reason := self.eligible(**facts):
            raise ValueError(f"kernel {self.name!r}: {reason}")
        launch = self.geometry(**facts)
        if (names := tuple(name for name, _ in launch.template)) != self.template:
            raise ValueError(f"kernel {self.name!r} has the template parameters {self.template}, not {names}")
        most = shared_memory.of_arrays(device)
        if (size := self.threadgroup_bytes(launch)) > most:
            raise ValueError(f"kernel {self.name!r}: {size} bytes of threadgroup memory; there are {most}")
        return launch

    def bytes_at_launch(self, template: Sequence[tuple[str, str | int | bool]]) -> int:
        """Threadgroup memory that a launch on CUDA must ask for, 0 if the kernel has enough of its own."""
        size = self.threadgroup_bytes(Launch(tuple(template), (32, 1, 1), (32, 1, 1)))
        return 0 if size <= DECLARED_BYTES else size + shared_memory.ALIGNMENT

    def cuda_body(self, template: Sequence[tuple[str, str | int | bool]]) -> str:
        """The body for CUDA, behind its template parameters as constants."""
        body = self.text("cuda").source
        return constants(template) + (given_at_launch(body) if self.bytes_at_launch(template) else body)

    def metal(self) -> Any:
        """``mx.fast.metal_kernel`` of this kernel; calling it needs Metal, except while a function is exported."""
        return _made(self, "metal", self.text("metal"))

    def cuda(self) -> Any:
        """``mx.fast.cuda_kernel`` of this kernel. Raises RuntimeError where mlx has no CUDA."""
        return _made(self, "cuda", self.text("cuda"))

    def lab(self) -> Any:
        """The kernel in the lab: the Metal text, run on the host over numpy arrays."""
        return _made(self, "lab", self.text("metal"))

    def on(self, device: str) -> Any:
        """``metal()`` or ``cuda()``. Raises ValueError for another device."""
        if device not in ("metal", "cuda"):
            raise ValueError(f"kernel {self.name!r} does not run on {device!r}")
        return _made(self, device, self.text(device))

    def bind(self, device: str, launch: Launch, fixed: Sequence[Any] = ()) -> Callable[..., Any]:
        """One launch on ``"metal"`` or ``"cuda"``: ``f(inputs=, output_shapes=, output_dtypes=)`` -> outputs.

        fixed
            Arrays that are the last inputs of every call, and are not given there.

        As ``on(device)`` with the keywords of `arguments`, but on CUDA a call takes less time, and what was compiled
        once on this machine is not compiled again.

        Raises ValueError for another device or one with too little threadgroup memory for the launch, RuntimeError
        where mlx does not have the device.
        """
        import mlx.core as mx

        from . import bound

        if device == "metal":
            return bound.metal(self, launch, fixed)
        if device != "cuda":
            raise ValueError(f"kernel {self.name!r} does not run on {device!r}")
        if not mx.cuda.is_available():
            raise RuntimeError(f"kernel {self.name!r}: mlx has no CUDA here")
        size, most = self.bytes_at_launch(launch.template), shared_memory.most_bytes()
        if most is not None and size > most:
            raise ValueError(f"kernel {self.name!r}: {size} bytes of threadgroup memory; this GPU has {most}")
        return bound.CudaCall(self, launch, fixed)

    def compile_ahead(self, launches: Iterable[Launch], inputs: Sequence[Any], output_dtypes: Sequence[Any]) -> None:
        """Compile for CUDA what these launches need, all at once; the calls that follow compile nothing.

        inputs: arrays of a call, fixed ones included; only their dtypes count.
        """
        from . import bound

        bound.compile_ahead(self, launches, inputs, output_dtypes)


#: Types of template parameters on CUDA.
_CUDA_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def constants(template: Sequence[tuple[str, str | int | bool]]) -> str:
    """Template parameters as declarations of CUDA."""
    lines = []
    for name, v in template:
        if isinstance(v, str):
            lines.append(f"using {name} = {_CUDA_TYPES[v]};\n")
        else:
            lines.append(f"constexpr {'bool' if isinstance(v, bool) else 'int'} {name} = {str(v).lower()};\n")
    return "".join(lines)


@functools.cache
def _made(kernel: SimtKernel, target: str, text: KernelText) -> Any:
    options: dict[str, Any] = {
        "name": kernel.name, "input_names": list(kernel.inputs), "output_names": list(kernel.outputs),
        "source": text.source, "header": text.header,
    }  # fmt: skip
    if target == "lab":
        from backend_core.testing import lab

        return dataclasses.replace(lab.metal_kernel(**options), files=text.files)
    import mlx.core as mx

    return mx.fast.metal_kernel(**options) if target == "metal" else mx.fast.cuda_kernel(**options)


def arguments(launch: Launch, dtypes: Any) -> dict[str, Any]:
    """The keywords of a call: template, grid and threadgroup.

    dtypes: the module that has the dtypes, ``mlx.core`` or the lab.
    """
    template = [(name, getattr(dtypes, v) if isinstance(v, str) else v) for name, v in launch.template]
    return {"template": template, "grid": launch.grid, "threadgroup": launch.threadgroup}


def check_shapes(kernel: SimtKernel, expected: Mapping[str, Sequence[int]], arrays: Mapping[str, Any]) -> None:
    """Raise ValueError naming the array if one has not the shape that the contract asks for."""
    for name, shape in expected.items():
        if tuple(arrays[name].shape) != tuple(shape):
            raise ValueError(f"kernel {kernel.name!r}: {name} is {tuple(arrays[name].shape)}, not {tuple(shape)}")


def check_dtypes(kernel: SimtKernel, layer: str, expected: Mapping[str, str | Sequence[str]], arrays: Mapping[str, Any]
                 ) -> None:  # fmt: skip
    """Raise ValueError naming the layer and the array if one has not the dtype, or one of the dtypes, that the contract
    asks for. expected: mlx's names (``"float16"``)."""
    for name, wanted in expected.items():
        have = str(arrays[name].dtype).rpartition(".")[2]
        if have not in (wanted := (wanted,) if isinstance(wanted, str) else tuple(wanted)):
            raise ValueError(
                f"kernel {kernel.name!r}: {name} of {layer} is {have}, not {' or '.join(wanted)}; store it as "
                f"{wanted[0]} in the layer and accelerate the model again"
            )
