"""The two limits of the machine, measured by the core's own kernels on the core's own threads.

No call that reads b bytes and does f multiply-adds is faster than max(b / read bandwidth, f / FMA rate). Both are
measured in every round of a benchmark, since on shared machines they change from minute to minute.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from typing import Any

from .. import native
from ..cpu_kernel import cpu_kernel

#: Read per sample of the bandwidth; more than any last-level cache in sight keeps of a buffer read in a circle.
READ_BYTES = 1 << 29
#: (bytes ahead to prefetch, streams a thread reads at once, bytes of a piece): the best way depends on the machine.
_WAYS = ((0, 4, 1 << 20), (0, 4, 1 << 22), (2048, 8, 1 << 18), (2048, 1, 1 << 18))
_FMA_S = 0.004


class Floors:
    """Measures both limits again and again; holds a buffer of `read_bytes` (READ_BYTES).

    Raises NativeUnavailable without the native module.
    """

    def __init__(self, read_bytes: int = 0) -> None:
        import mlx.core as mx

        read_bytes = read_bytes or READ_BYTES
        module = native.get()
        library = module.__file__
        assert library is not None
        self._read = cpu_kernel(library, "accel_floor_read")
        self._fma = cpu_kernel(library, "accel_floor_fma")
        per_round = ctypes.CDLL(library).accel_floor_fma_per_round
        per_round.restype = ctypes.c_int64
        self._per_round = int(per_round())
        self._threads = int(module.threads())
        # In 8 parts, so that one sample need not read all of it.
        self._buffers = [mx.full((max(read_bytes // 8 // 4, 16),), i, mx.uint32) for i in range(8)]
        mx.eval(self._buffers)
        for buffer in self._buffers:
            _huge_pages(buffer)
        self._next = 0
        self._way = max(_WAYS, key=lambda way: statistics.median(self._bandwidth(way) for _ in range(5)))
        self._rounds = 1000
        seconds = self._fma_seconds()
        self._rounds = max(1000, int(self._rounds * _FMA_S / max(seconds, 1e-6)))

    def __call__(self) -> tuple[float, float]:
        """(bytes read a second, float32 multiply-adds a second), of all threads together."""
        return self._bandwidth(self._way), self._pieces * self._rounds * self._per_round / self._fma_seconds()

    @property
    def _pieces(self) -> int:
        return 4 * self._threads

    def _bandwidth(self, way: tuple[int, int, int]) -> float:
        import mlx.core as mx

        parts = [self._buffers[(self._next + i) % 8] for i in range(2)]
        self._next += 2
        begin = time.perf_counter()
        mx.eval([self._call(self._read, [b], (1,), mx.uint64, list(way)) for b in parts])
        return sum(b.nbytes for b in parts) / (time.perf_counter() - begin)

    def _fma_seconds(self) -> float:
        import mlx.core as mx

        begin = time.perf_counter()
        mx.eval(self._call(self._fma, [self._buffers[0]], (self._pieces,), mx.float32, [self._rounds]))
        return time.perf_counter() - begin

    @staticmethod
    def _call(kernel: Any, inputs: list[Any], shape: tuple[int, ...], dtype: Any, params: list[int]) -> Any:
        [out] = kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], params=params)
        return out


def _huge_pages(buffer: Any) -> None:
    """Ask Linux to put a buffer into huge pages: a limit should not be that of the page tables."""
    import numpy as np

    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    view = np.array(buffer, copy=False)
    page = 2 << 20
    begin = -(-view.ctypes.data // page) * page
    end = (view.ctypes.data + view.nbytes) // page * page
    if sys.platform == "linux" and end > begin:
        advise(begin, end - begin, 14)  # MADV_HUGEPAGE
        advise(begin, end - begin, 25)  # MADV_COLLAPSE; older kernels answer with an error, and do it by and by
