"""NVIDIA's run-time compiler: the library that mlx has loaded, called directly.

Kernels of `backend_core.simt` need none of mlx's own headers, without which compiling takes a quarter of the time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path


class CompileError(RuntimeError):
    """The text does not compile; the message is the compiler's, with lines of the kernel's file."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiler. Raises OSError if the process has none loaded, as without a CUDA build of mlx."""
    maps = Path("/proc/self/maps")
    found = re.search(r"\S*/libnvrtc\.so[.\d]*$", maps.read_text() if maps.exists() else "", re.MULTILINE)
    if found is None:
        raise OSError("libnvrtc is not loaded")
    return ctypes.CDLL(found.group())


@functools.cache
def version() -> str:
    """``"13.0"``. Raises OSError as :func:`library`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_text(text: str, name: str, architecture: str) -> bytes:
    """Machine code (cubin) of a CUDA text, for ``"sm_90a"`` or the like. Other threads run meanwhile.

    Raises CompileError; FileNotFoundError if CUDA's headers cannot be found; OSError as :func:`library`.
    """
    lib, program = library(), ctypes.c_void_p()
    if lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None):
        raise CompileError(f"{name}: the compiler takes no program")
    try:
        words = [f"--gpu-architecture={architecture}", *(f"--include-path={p}" for p in include_folders())]
        options = (ctypes.c_char_p * len(words))(*(w.encode() for w in words))
        if lib.nvrtcCompileProgram(program, len(words), options):
            log = _bytes(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
            raise CompileError(f"{name} does not compile: {log.rstrip(bytes(1)).decode(errors='replace')}")
        return _bytes(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(max(size.value, 1))
    get(program, text)
    return text.raw[: size.value]


@functools.cache
def include_folders() -> tuple[Path, ...]:
    """Folders with CUDA's headers. Raises FileNotFoundError if there are none."""
    for folder in _candidates():
        if (folder / "cuda_fp16.h").is_file():
            return tuple(p for p in (folder, folder / "cccl", *_beside_mlx()) if p.is_dir())
    raise FileNotFoundError("CUDA's headers were not found: install nvidia-cuda-runtime, or set CUDA_HOME")


def _beside_mlx() -> Iterator[Path]:
    import mlx.core as mx

    yield Path(mx.__file__).parent / "include" / "cccl"


def _candidates() -> Iterator[Path]:
    # Of the packages the release that is loaded first: headers and compiler must fit each other.
    spec = importlib.util.find_spec("nvidia")
    packages = [p for root in (spec and spec.submodule_search_locations) or () for p in Path(root).glob("*/include")]
    yield from sorted(packages, key=lambda p: p.parent.name != f"cu{version().partition('.')[0]}")
    yield from (Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))
    yield Path("/usr/local/cuda/include")
