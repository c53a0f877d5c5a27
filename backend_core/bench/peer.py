"""ggml's own kernels, called through its public C interface from a llama.cpp build directory.

Nothing is compiled here: the shared libraries of the build are opened with ctypes, so that both sides run in one
process and can be interleaved. ggml gets its best conditions: one graph with many calls per run, a thread pool
that lives as long as the peer, plans made once, and of the weight layouts that this processor has kernels for
(plain, repacked, AMX tiles) the one that is fastest at the work in question.

Interface used: ggml.h, ggml-backend.h and ggml-alloc.h of llama.cpp 2025 and later (ggml >= 0.9).
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AccelError

#: ggml_type numbers, which ggml never changes.
TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_K": 10, "q3_K": 11, "q4_K": 12,
    "q5_K": 13, "q6_K": 14, "iq4_nl": 20, "i32": 26, "bf16": 30, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39,
    "nvfp4": 40, "q1_0": 41, "q2_0": 42,
}  # fmt: skip
_BASE = ("ggml-base", "ggml")


class PeerError(AccelError):
    """The peer's build directory lacks something; the message names it."""


def find(directory: Path, name: str) -> Path:
    """A file of a build directory by name. Raises PeerError."""
    if not directory.is_dir():
        raise PeerError(f"--peers: {directory} is not a directory; it takes the build directory of llama.cpp")
    for path in (directory / "bin" / name, directory / name, *sorted(directory.rglob(name))):
        if path.is_file():
            return path
    raise PeerError(f"--peers: there is no {name} below {directory}; {_advice(name)}")


def _advice(name: str) -> str:
    if name.startswith("lib"):
        return "build llama.cpp with shared libraries (cmake -DBUILD_SHARED_LIBS=ON)"
    return f"build it with `cmake --build {{directory}} --target {name}`"


def _library(directory: Path, stem: str) -> Path:
    for suffix in (".so", ".dylib"):
        try:
            return find(directory, f"lib{stem}{suffix}")
        except PeerError:
            if suffix == ".dylib":
                break
    return find(directory, f"lib{stem}.so")


def _cpu_libraries(directory: Path) -> list[Any]:
    """The libraries of the CPU backend that this process has loaded."""
    found = []
    for path in {*directory.rglob("libggml-cpu*.so"), *directory.rglob("libggml-cpu*.dylib")}:
        try:
            found.append(ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW))
        except OSError:  # one for another processor
            continue
    return found


class _InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


#: name -> (result, arguments); P is any handle.
_P = c_void_p
_API: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_version": (c_char_p, ()),
    "ggml_log_set": (None, (_P, _P)),
    "ggml_init": (_P, (_InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_new_tensor": (_P, (_P, c_int, c_int, POINTER(c_int64))),
    "ggml_new_graph_custom": (_P, (_P, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_nbytes": (c_size_t, (_P,)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_blck_size": (c_int64, (c_int,)),
    "ggml_quantize_chunk": (c_size_t, (c_int, _P, _P, c_int64, c_int64, c_int64, _P)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_rms_norm": (_P, (_P, _P, c_float)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_argmax": (_P, (_P, _P)),
    "ggml_rope_ext": (_P, (_P, _P, _P, _P, c_int, c_int, c_int, *(c_float,) * 6)),
    "ggml_flash_attn_ext": (_P, (_P, _P, _P, _P, _P, c_float, c_float, c_float)),
    "ggml_soft_max_ext": (_P, (_P, _P, _P, c_float, c_float)),
    "ggml_permute": (_P, (_P, _P, c_int, c_int, c_int, c_int)),
    "ggml_backend_dev_by_type": (_P, (c_int,)),
    "ggml_backend_dev_init": (_P, (_P, c_char_p)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_dev_buffer_type": (_P, (_P,)),
    "ggml_backend_dev_supports_op": (c_bool, (_P, _P)),
    "ggml_backend_dev_description": (c_char_p, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, c_char_p)),
    "ggml_backend_load_all_from_path": (None, (c_char_p,)),
    "ggml_backend_buft_name": (c_char_p, (_P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_set_usage": (None, (_P, c_int)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_graph_plan_create": (_P, (_P, _P)),
    "ggml_backend_graph_plan_compute": (c_int, (_P, _P)),
    "ggml_backend_graph_plan_free": (None, (_P, _P)),
    "ggml_backend_free": (None, (_P,)),
    "ggml_threadpool_params_init": (None, (_P, c_int)),
}


#: Seconds that ggml's threads spin after a graph, at most.
_SPIN_S = 0.5


class Ggml:
    """The libraries of one build directory, and a CPU backend with `threads` threads.

    Raises PeerError if a library or a function is missing.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self.directory, self.threads = directory, threads
        self._libraries = [ctypes.CDLL(str(_library(directory, stem)), ctypes.RTLD_GLOBAL) for stem in _BASE]
        for name, (result, arguments) in _API.items():
            setattr(self, name.removeprefix("ggml_"), self._function(name, result, arguments))
        # Its log says which tensor it repacks, for each.
        self._silence = ctypes.CFUNCTYPE(None, c_int, c_char_p, _P)(lambda level, text, data: None)
        self.log_set(ctypes.cast(self._silence, _P), None)
        self.device = self._cpu()
        registry = self.backend_dev_backend_reg(self.device)
        self.backend = self.backend_dev_init(self.device, None)
        if not self.backend:
            raise PeerError(f"--peers: ggml of {directory} has no working CPU backend")

        def extra(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            address = self.backend_reg_get_proc_address(registry, name.encode())
            if not address:
                raise PeerError(f"--peers: ggml of {directory} has no {name}; it is too old for this harness")
            return ctypes.CFUNCTYPE(result, *arguments)(address)

        extra("ggml_backend_set_n_threads", None, _P, c_int)(self.backend, threads)
        params = ctypes.create_string_buffer(4096)  # ggml_threadpool_params, larger than it is
        self.threadpool_params_init(params, threads)
        self._pool_free = extra("ggml_threadpool_free", None, _P)
        self._pool = extra("ggml_threadpool_new", _P, _P)(params)
        self._pause, self._resume = self._pool_function("pause"), self._pool_function("resume")
        extra("ggml_backend_cpu_set_threadpool", None, _P, _P)(self.backend, self._pool)
        bufts = extra("ggml_backend_dev_get_extra_bufts", POINTER(_P), _P)(self.device)
        #: Weight layouts by name, plain memory first.
        self.layouts: dict[str, Any] = {"plain": self.backend_dev_buffer_type(self.device)}
        i = 0
        while bufts and bufts[i]:
            self.layouts[self.backend_buft_name(bufts[i]).decode()] = bufts[i]
            i += 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)  # the functions of _API are attributes of the instance

    def _function(self, name: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        for library in self._libraries:
            function = getattr(library, name, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                return function
        raise PeerError(f"--peers: the libraries of {self.directory} have no {name}; they are too old for this harness")

    def _pool_function(self, name: str) -> Callable[[Any], None] | None:
        """``ggml_threadpool_NAME``, which the registry of functions does not have; None where it cannot be reached."""
        for library in (*self._libraries, *_cpu_libraries(self.directory)):
            function = getattr(library, f"ggml_threadpool_{name}", None)
            if function is not None:
                function.restype, function.argtypes = None, (_P,)
                return function
        return None

    def wake(self) -> None:
        """Threads wait for work from now on, as they do between the tokens of a program that does nothing else."""
        if self._resume is not None and self._pause is not None:
            self._resume(self._pool)

    def rest(self) -> None:
        """Threads sleep. After a graph they would wait for the next one by spinning, for tenths of a second, on
        processors that others are measured on."""
        if self._resume is not None and self._pause is not None:
            self._pause(self._pool)
        else:
            time.sleep(_SPIN_S)

    def _cpu(self) -> Any:
        device = self.backend_dev_by_type(0)
        if not device:  # a build whose back ends are loaded by name
            self.backend_load_all_from_path(str(find(self.directory, "libggml-base.so").parent).encode())
            device = self.backend_dev_by_type(0)
        if not device:
            raise PeerError(f"--peers: ggml of {self.directory} has no CPU backend (libggml-cpu)")
        return device

    @functools.cached_property
    def release(self) -> str:
        """ggml's version."""
        return str(self.version().decode())

    def block(self, kind: str) -> int:
        """Weights per block of a type; rows must be a multiple of it."""
        return int(self.blck_size(TYPES[kind]))

    def matrix_bytes(self, kind: str, n: int, k: int) -> int:
        """Bytes of an (n, k) matrix of a type."""
        return int(n * self.row_size(TYPES[kind], k))

    def quantized(self, kind: str, values: np.ndarray) -> bytes:
        """float32 rows (n, k) in a type's format, by ggml's own quantizer."""
        values = np.ascontiguousarray(values, np.float32)
        n, k = values.shape
        out = ctypes.create_string_buffer(self.matrix_bytes(kind, n, k))
        if kind == "f32":
            return values.tobytes()
        self.quantize_chunk(TYPES[kind], values.ctypes.data, out, 0, n, k, None)
        return out.raw

    def close(self) -> None:
        """Free backend and threads."""
        if self.backend:
            self.backend_free(self.backend)
            self._pool_free(self._pool)
            self.backend = None


class Arena:
    """A ggml context whose tensors live in one buffer of a layout."""

    def __init__(self, ggml: Ggml, tensors: int, graph_nodes: int = 0) -> None:
        self.ggml = ggml
        size = tensors * ggml.tensor_overhead() + 4096
        if graph_nodes:
            size += ggml.graph_overhead_custom(graph_nodes, False)
        self.context = ggml.init(_InitParams(size, None, True))
        if not self.context:
            raise PeerError("ggml could not allocate a context")
        self._buffer: Any = None

    def tensor(self, kind: str, *shape: int) -> Any:
        """A tensor by ggml's order of dimensions: the contiguous one first."""
        return self.ggml.new_tensor(self.context, TYPES[kind], len(shape), (c_int64 * len(shape))(*shape))

    def allocate(self, layout: Any, weights: bool = False) -> None:
        """Memory for all tensors made so far. Raises PeerError if there is not enough."""
        self._buffer = self.ggml.backend_alloc_ctx_tensors_from_buft(self.context, layout)
        if not self._buffer:
            raise PeerError("ggml could not allocate its tensors")
        if weights:
            self.ggml.backend_buffer_set_usage(self._buffer, 1)

    def fill(self, tensor: Any, data: bytes) -> None:
        """Set a tensor from bytes in its type's format; a layout of its own repacks them here."""
        assert len(data) == self.ggml.nbytes(tensor)
        self.ggml.backend_tensor_set(tensor, data, 0, len(data))

    def read(self, tensor: Any) -> np.ndarray:
        """A float32 tensor's values, flat."""
        out = np.empty(self.ggml.nbytes(tensor) // 4, np.float32)
        self.ggml.backend_tensor_get(tensor, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        if self._buffer:
            self.ggml.backend_buffer_free(self._buffer)
        self.ggml.free(self.context)
        self._buffer = self.context = None
