"""Launches that ask for more shared memory than the GPU has are refused before they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import mlx.core as mx
import pytest
from rows import ROW_SUMS

from backend_core.simt import bound, shared_memory


class Driver:
    """Stands for the CUDA driver of one device; status 100 is its "no device"."""

    def __init__(self, most: int, status: int = 0) -> None:
        self.most, self.status = most, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGet(self, device, ordinal: int) -> int:
        device._obj.value = 7
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        assert (attribute, device.value) == (97, 7)
        value._obj.value = self.most
        return 0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bound, "CudaCall", lambda kernel, launch, fixed: "bound")
    shared_memory.most_bytes.cache_clear()
    yield
    shared_memory.most_bytes.cache_clear()


def bind(needed: int):
    kernel = dataclasses.replace(
        ROW_SUMS, threadgroup_bytes=lambda launch: needed,
        geometry=lambda *, device, **facts: ROW_SUMS.geometry(**facts),
    )  # fmt: skip
    return kernel.bind("cuda", kernel.launch(rows=1, groups=1, dtype="float16", device="cuda"))


def test_a_gpu_with_less_than_what_launches_are_made_for(monkeypatch) -> None:
    monkeypatch.setattr(shared_memory, "_driver", lambda: Driver(101376))
    assert bind(101376 - 128) == "bound" and bind(48 << 10) == "bound"
    with pytest.raises(ValueError, match="'row_sums': 101249 bytes of threadgroup memory; there are 101248"):
        bind(101249)


def test_a_launch_made_for_another_gpu(monkeypatch) -> None:
    kernel = dataclasses.replace(ROW_SUMS, threadgroup_bytes=lambda launch: 160000)
    launch = kernel.geometry(rows=1, groups=1, dtype="float16")
    monkeypatch.setattr(shared_memory, "_driver", lambda: Driver(101376))
    with pytest.raises(ValueError, match="'row_sums': 160128 bytes of threadgroup memory; this GPU has 101376"):
        kernel.bind("cuda", launch)


def test_what_arrays_may_have(monkeypatch) -> None:
    monkeypatch.setattr(shared_memory, "_driver", lambda: Driver(232448))
    assert shared_memory.of_arrays("cuda") == 232448 - 128 and shared_memory.of_arrays("metal") == 32768
    monkeypatch.setattr(shared_memory, "_driver", lambda: Driver(0, status=100))
    shared_memory.most_bytes.cache_clear()
    assert shared_memory.of_arrays("cuda") == 166912 - 128


def test_a_gpu_that_cannot_be_asked_is_not_limited(monkeypatch) -> None:
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    for driver in (missing, lambda: Driver(0, status=100)):
        monkeypatch.setattr(shared_memory, "_driver", driver)
        shared_memory.most_bytes.cache_clear()
        assert shared_memory.most_bytes() is None and bind(160000) == "bound"
