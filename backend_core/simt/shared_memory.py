"""Memory that a threadgroup may have on a device."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

#: What every Apple GPU has, and a CUDA device that cannot be asked: as much as compute capability 8.0.
METAL_BYTES, CUDA_BYTES = 32768, 166912
#: What arrays of a launch on CUDA take beyond their sizes, to begin at multiples of 16 bytes.
ALIGNMENT = 128
#: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN of the CUDA driver's interface.
_MOST_OF_A_BLOCK = 97


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def of_arrays(device: str) -> int:
    """Bytes that the arrays of a threadgroup may have on ``"metal"`` or ``"cuda"``."""
    return METAL_BYTES if device == "metal" else (most_bytes() or CUDA_BYTES) - ALIGNMENT


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
