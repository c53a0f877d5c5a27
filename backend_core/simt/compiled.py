"""CUDA kernels compiled once per machine instead of once per process.

mlx compiles a custom kernel in every process, with headers that take most of the time. Here the text is compiled
without them (`nvrtc`) and kept in the user's cache. mlx takes ready machine code too (``precompiled_cuda_kernel``), but
would copy and hash all of it at every call; it looks first whether its own cache has the code under the kernel's name
and the hash of what it was given. So the code is put there under the hash of nothing, and nothing is what calls give.

Where any of this does not work (`why_not` says it) kernels go to mlx as text.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import paths
from . import nvrtc

if TYPE_CHECKING:
    from .kernel import SimtKernel

Template = tuple[tuple[str, "str | int | bool"], ...]

#: mlx's dtypes on CUDA.
TYPES = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "bool": "bool",
    **{f"{sign}int{bits}": f"{'unsigned ' if sign else ''}{word}" for sign in ("", "u")
       for bits, word in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))},
}  # fmt: skip
#: Dimensions of an array whose shape a kernel is given.
MOST_DIMENSIONS = 4

_BEFORE = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct shape_of_4 {
int a, b, c, d;
__device__ __forceinline__ int operator[](int i) const { return i == 0 ? a : i == 1 ? b : i == 2 ? c : d; }
};
"""


def text_of(kernel: SimtKernel, template: Template, inputs: Sequence[str], outputs: Sequence[str], symbol: str) -> str:
    """The whole CUDA text; its function `symbol` takes inputs, outputs, and five ints for each shape it names.

    inputs, outputs: mlx's names of the dtypes. Raises ValueError if the kernel names strides.
    """
    text = kernel.text("cuda")
    parameters = [f"const {TYPES[t]}* {name}" for name, t in zip(kernel.inputs, inputs, strict=True)]
    parameters += [f"{TYPES[t]}* {name}" for name, t in zip(kernel.outputs, outputs, strict=True)]
    begin = ""
    for name in shaped(kernel):
        parameters += [f"int {name}_{d}" for d in "abcd"] + [f"int {name}_ndim"]
        begin += f"const shape_of_4 {name}_shape = {{{', '.join(f'{name}_{d}' for d in 'abcd')}}};\n"
    if any(f"{name}_strides" in text.source for name in kernel.inputs):
        raise ValueError(f"kernel {kernel.name!r} names strides")
    return (
        f'{_BEFORE}{text.header}\nextern "C" __global__ void {bounds(template)}{symbol}(\n{", ".join(parameters)}) {{\n'
        f"{begin}{kernel.cuda_body(template)}\n}}\n"
    )


def bounds(template: Template) -> str:
    """How many registers the compiler may use: as many as let a launch run at all, if the template has the number of
    SIMD_GROUPS, and RESIDENT threadgroups on one multiprocessor, if it has that."""
    values = dict(template)
    if "SIMD_GROUPS" not in values:
        return ""
    return f"__launch_bounds__({32 * int(values['SIMD_GROUPS'])}, {int(values.get('RESIDENT', 1))}) "


@functools.cache
def shaped(kernel: SimtKernel) -> tuple[str, ...]:
    """The inputs whose shape or number of dimensions the kernel names."""
    source = kernel.text("cuda").source
    return tuple(name for name in kernel.inputs if f"{name}_shape" in source or f"{name}_ndim" in source)


def sizes(array: Any) -> list[int]:
    """What a kernel is given for a shape: four lengths and the number of dimensions. Raises ValueError beyond four."""
    shape = array.shape
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    return [*shape, *(1,) * (MOST_DIMENSIONS - len(shape)), len(shape)]


class Compiled:
    """One kernel with its template parameters and dtypes, ready to be called.

    symbol
        Name of the function, which tells text, compiler and GPU.
    """

    def __init__(self, kernel: SimtKernel, template: Template, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.kernel, self.architecture = kernel, architecture()
        plain = text_of(kernel, template, inputs, outputs, "SYMBOL")
        key = "\0".join((plain, self.architecture, nvrtc.version()))
        self.symbol = f"{kernel.name}_{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        self._text = plain.replace("SYMBOL(", f"{self.symbol}(", 1)
        self._ready = False
        self._refused = ""

    def prepare(self) -> None:
        """Compile, or read from the cache, and hand over to mlx. Raises as :func:`nvrtc.compile_text`, and OSError."""
        if self._ready:
            return
        if self._refused:
            # The compiler takes seconds to say so, and every layer asks.
            raise nvrtc.CompileError(self._refused)
        file = paths.cache_dir() / "cuda" / f"{self.symbol}.cubin"
        try:
            code = file.read_bytes()
        except OSError:
            try:
                code = nvrtc.compile_text(self._text, self.kernel.name, self.architecture)
            except nvrtc.CompileError as error:
                self._refused = str(error)
                raise
            _write(file, code)
        hand_over(self.symbol, code)
        self._ready = True


@functools.lru_cache(maxsize=4096)
def compiled(kernel: SimtKernel, template: Template, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Compiled:
    """The one of each process; nothing is compiled yet."""
    return Compiled(kernel, template, inputs, outputs)


def prepare(kernels: Iterable[Compiled]) -> None:
    """All at once, on as many threads as there are CPUs. What fails is left to the first call to say."""
    todo = [k for k in dict.fromkeys(kernels) if not k._ready and not k._refused]
    if todo:
        with ThreadPoolExecutor(min(len(todo), os.cpu_count() or 1)) as pool:
            list(pool.map(_try, todo))


def _try(kernel: Compiled) -> None:
    try:
        kernel.prepare()
    except (OSError, nvrtc.CompileError):
        return


def hand_over(symbol: str, code: bytes) -> None:
    """Put machine code where mlx looks for what it has compiled before. Raises OSError."""
    stem = mlx_folder() / f"{symbol}_{hash_of_nothing():x}"
    for file, content in ((stem.with_name(f"{stem.name}.txt"), f"{symbol}\t{symbol}\n".encode()),
                          (stem.with_name(f"{stem.name}.ptx"), code)):  # fmt: skip
        try:
            same = file.read_bytes() == content
        except OSError:
            same = False
        if not same:
            _write(file, content)


def mlx_folder() -> Path:
    """Where mlx keeps compiled kernels."""
    import mlx.core as mx

    if folder := os.environ.get("MLX_PTX_CACHE_DIR"):
        return Path(folder)
    names = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return Path(next(filter(None, names), "/tmp")) / "mlx" / getattr(mx, "__version__", "") / "ptx"


@functools.cache
def hash_of_nothing() -> int:
    """``std::hash<std::string>`` of "", by the C++ library itself. Raises OSError without it."""
    function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    function.restype, function.argtypes = ctypes.c_size_t, (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    return int(function(b"", 0, 0xC70F6907))


@functools.cache
def architecture() -> str:
    """``"sm_90a"``: the default GPU as the compiler names it."""
    import mlx.core as mx

    info = mx.device_info()
    major, minor = (int(info[f"compute_capability_{part}"]) for part in ("major", "minor"))
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.cache
def why_not() -> str:
    """Why kernels go to mlx as text; "" if compiled ones work. Tried once, with a kernel of one line."""
    import mlx.core as mx

    if os.environ.get("MLX_ACCEL_CUDA_CACHE") == "0":
        return "MLX_ACCEL_CUDA_CACHE=0"
    symbol = "accel_selftest"
    text = f'extern "C" __global__ void {symbol}(const float* x, float* y, int n) {{ y[0] = x[0] * n; }}\n'
    try:
        hand_over(symbol, nvrtc.compile_text(text, symbol, architecture()))
        call = caller(symbol, (32, 1, 1), (32, 1, 1), 0)
        (y,) = call(inputs=[mx.array([2.0])], output_shapes=[(1,)], output_dtypes=[mx.float32], scalars=[21])
        return "" if y.item() == 42.0 else f"a product is {y.item()}"
    except Exception as error:  # whatever an mlx that works otherwise does must not stop anybody
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def caller(symbol: str, grid: tuple[int, int, int], threadgroup: tuple[int, int, int], threadgroup_bytes: int
           ) -> Callable[..., Any]:  # fmt: skip
    """``f(inputs=, output_shapes=, output_dtypes=, scalars=)`` for what was handed over.

    threadgroup_bytes: what a launch must ask for.
    """
    import mlx.core as mx

    return functools.partial(
        mx.fast.precompiled_cuda_kernel, name=symbol, compiled_source=b"", grid=grid,
        threadgroup=threadgroup, shared_memory=threadgroup_bytes, ensure_row_contiguous=True,
    )  # fmt: skip


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
