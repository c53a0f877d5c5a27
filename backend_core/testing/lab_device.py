"""A GPU's stand-in for tests of offers: kernels of `backend_core.simt` run in the lab, with all checks, on any machine.

    from backend_core.testing.lab_device import lab_device, select

    with lab_device("metal") as gpu:
        report = select(model, my_plugin, "my_plugin")    # as on a Mac, but for times
        y = model(x)
    assert gpu.calls[-1].kernel == "dense_qmv"

Sites have its device, every launch is checked, and every race is won, since times of the lab say nothing. A launch with
any fault raises, as a kernel that does not compile does; an offer then is lost with that message.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from backend_core import Policy, Report, accelerate, machine, race, walk
from backend_core.plugins import PluginHost
from backend_core.simt import Launch, SimtKernel, arguments, bound, compiled, families, nvrtc
from backend_core.testing import lab

Array = np.ndarray[Any, Any]


class Call(NamedTuple):
    """A launch that was made: the kernel's name, and its geometry."""

    kernel: str
    launch: Launch

    @property
    def rows(self) -> int:
        """Rows that the launch makes; for kernels whose template has ROWS (rows of a pass; passes are the second
        dimension of the grid), TILE_ROWS (rows of a tile) or WARPS_M (tiles of 64 rows each), as the shared headers
        name them."""
        template, threadgroups = dict(self.launch.template), self.launch.grid[0] // self.launch.threadgroup[0]
        if "ROWS" in template:
            return int(template["ROWS"]) * self.launch.grid[1]
        return threadgroups * (int(template["TILE_ROWS"]) if "TILE_ROWS" in template else 64 * int(template["WARPS_M"]))


class LabDevice:
    """What :func:`lab_device` gives.

    name
        ``"metal"`` or ``"cuda"``; may be changed between models.
    generations
        By name, what :func:`backend_core.simt.families.generation` says; may be changed too.
    header
        Text that is put between every kernel's functions and its body, to break it.
    calls
        Every launch, in order.
    failed
        How many of them raised.
    """

    def __init__(self, name: str = "metal") -> None:
        self.name = name
        self.generations: dict[str, tuple[int, ...]] = {"cuda": (9, 0), "metal": (16,)}
        self.header = ""
        self.calls: list[Call] = []
        self.failed = 0

    def bind(self, kernel: SimtKernel, launch: Launch, fixed: Sequence[Any] = ()) -> Callable[..., Any]:
        """In place of ``kernel.bind(device, launch, fixed)``: kernels take and give mlx arrays."""

        def call(*, inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any) -> list[Any]:
            return self._run(kernel, launch, [*inputs, *fixed], output_shapes, output_dtypes)

        return call

    def text(self, kernel: SimtKernel, template: Any) -> Callable[..., Any]:
        """In place of mlx's call of a text on CUDA."""

        def call(*, inputs: Any, grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any) -> list[Any]:
            return self._run(kernel, Launch(template, grid, threadgroup), inputs, output_shapes, output_dtypes)

        return call

    def _run(self, kernel: SimtKernel, launch: Launch, arrays: Any, shapes: Any, dtypes: Any) -> list[Any]:
        import mlx.core as mx

        made = kernel.lab()
        if self.header:
            # Errors in it are its own, not those of a line of the kernel's file.
            header = f'{made.header}\n#line 1 "lab_device.header"\n{self.header}\n'
            made = dataclasses.replace(made, header=header, files=(*made.files, ("lab_device.header", self.header)))
        self.calls.append(Call(kernel.name, launch))
        try:
            result = made(
                inputs=[from_mlx(a) for a in arrays], output_shapes=shapes,
                output_dtypes=[getattr(lab, bound.names([d])[0]) for d in dtypes], **arguments(launch, lab),
            )  # fmt: skip
            # A launch on CUDA may ask for more than Metal has.
            result.check(("threadgroup-memory",) if self.name == "cuda" else ())
        except Exception:
            self.failed += 1
            raise
        outputs = zip(result.outputs, dtypes, strict=True)
        return [mx.array(np.asarray(lab.to_float32(y))).astype(d) for y, d in outputs]


@contextlib.contextmanager
def lab_device(name: str = "metal", refuses: str | None = None) -> Iterator[LabDevice]:
    """A machine whose GPU is the lab, as long as the block lasts.

    refuses
        On ``"cuda"``: calls are made as there, with a run-time compiler that refuses every text with this message, so
        that texts go to mlx, whose part the lab plays.

    Raises CompilerMissing at the first launch without a C++ compiler.
    """
    device = LabDevice(name)

    def timed(probe: Any, modules: Any, ours: Any, rows: Any, of: Any, **_: Any) -> dict[int, race.Timing]:
        return {m: race.Timing(1.0, 2.0, 0.01) for m in rows}

    def bind(kernel: SimtKernel, name: str, launch: Launch, fixed: Sequence[Any] = ()) -> Callable[..., Any]:
        return device.bind(kernel, launch, fixed) if refuses is None else bound.CudaCall(kernel, launch, fixed)

    def refuse(*_: Any) -> bytes:
        raise nvrtc.CompileError(refuses)

    with contextlib.ExitStack() as stack:
        replace = mock.patch.object
        for module in (machine, walk):
            stack.enter_context(replace(module, "default_device", lambda: device.name))
        stack.enter_context(replace(families, "generation", lambda device_: device.generations.get(device_, ())))
        stack.enter_context(replace(race, "race", timed))
        stack.enter_context(replace(SimtKernel, "bind", bind))
        if refuses is None:
            stack.enter_context(replace(SimtKernel, "compile_ahead", lambda *_: None))
        else:
            for module, attribute, value in (
                (compiled, "why_not", lambda: ""), (compiled, "architecture", lambda: "sm_90a"),
                (nvrtc, "version", lambda: "0.0"), (nvrtc, "compile_text", refuse), (bound, "_with_text", device.text),
            ):  # fmt: skip
                stack.enter_context(replace(module, attribute, value))
            # What was refused is remembered.
            compiled.compiled.cache_clear()
            stack.callback(compiled.compiled.cache_clear)
        yield device


def select(model: Any, plugin: Any, name: str, **options: Any) -> Report:
    """``accelerate(model)`` with this plugin, a module or object with hooks, under this name and no other.

    options: of the `Policy`; activations stay the model's own.
    """
    policy = Policy(**{"activations": "model", **options})
    # A plugin that the policy names has to be there when a host is made.
    unnamed = dataclasses.replace(policy, plugins="")
    host = PluginHost(unnamed, devices=("cpu", "metal", "cuda"), isa=("portable",), entry_points=[])
    host.policy = policy
    host.register(plugin, name)
    return accelerate(model, policy, host=host)


def typed(a: Array, dtype: str) -> Array:
    """Float values as the lab's array of `dtype`, by mlx's name."""
    return lab.to_bfloat16(a) if dtype == "bfloat16" else a.astype(dtype)


def values(a: Array) -> Array:
    """The lab's array as float64."""
    return np.asarray(lab.to_float32(a), np.float64)


def moved(a: Array, by: int) -> Array:
    """The same array, `by` elements behind where the lab puts arrays otherwise."""
    flat = np.zeros(a.size + by, a.dtype)
    flat[by:] = a.ravel()
    return flat[by:].reshape(a.shape)


def from_mlx(a: Any) -> Array:
    """The lab's array of an mlx array."""
    import mlx.core as mx

    return lab.to_bfloat16(np.array(a.astype(mx.float32))) if a.dtype == mx.bfloat16 else np.array(a)


def to_mlx(a: Array, dtype: str) -> Any:
    """The mlx array of `dtype` of the lab's array of floats."""
    import mlx.core as mx

    return mx.array(values(a).astype(np.float32)).astype(getattr(mx, dtype))


def wrong_rows(f: Callable[[Any], Any], x: Any, parts: Iterable[slice], want: Array, allowed: Array, bits: Any
               ) -> list[str]:  # fmt: skip
    """What is wrong with f(x[part]), on the lab or on a GPU, for these parts of the rows of x; empty if all is well.

    want, allowed: result and largest error of all rows of x, in float64. bits: what the first rows must be
    to the bit; parts that go on behind them are not compared.
    """
    import mlx.core as mx

    found = []
    for part in parts:
        y = f(x[part])
        have = np.array(y.astype(mx.float32)).astype(np.float64)
        if not (np.abs(have - want[part]) <= allowed[part]).all():
            found.append(f"rows {part.start} to {part.stop} are wrong")
        if part.stop <= len(bits) and not bool(mx.array_equal(y, bits[part])):
            found.append(f"rows {part.start} to {part.stop} have other bits than elsewhere")
    return found


def excess(y: Array, want: Array, allowed: Array) -> float:
    """Largest error of the lab's array y over the allowed one, inf where y is not a number."""
    ratio = np.abs(values(y) - want) / allowed
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())
