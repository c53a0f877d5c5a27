"""Shared memory that a threadgroup may have on the CUDA device at hand."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

#: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN of the CUDA driver's interface.
_MOST_OF_A_BLOCK = 97


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def most_bytes() -> int | None:
    """The device's own limit, 101376 on compute capability 8.6 and 8.9 and 232448 on 9.0; None where the driver cannot
    be asked."""
    try:
        driver = _driver()
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(value), _MOST_OF_A_BLOCK, device)
    )
    return None if failed else value.value
