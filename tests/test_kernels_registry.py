"""The registry of announced kernels: checked at once, hashed by content."""

from __future__ import annotations

import dataclasses

import pytest

from backend_core.kernels_registry import KernelInfo, Registry


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "libk.so"
    path.write_bytes(b"\x7fELF one")
    return path


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "k.metal"
    path.write_text("kernel")
    return path


def test_announced_kernels_are_kept_in_order(library, source):
    registry = Registry("toy")
    registry.cpu(name="qmv", library=library, symbol="toy_qmv", exactness="bitwise")
    registry.source(name="qmv", device="metal", path=str(source))
    registry.source(name="qmv", device="cuda", path=source, exactness="lossy")
    assert registry.plugin == "toy"
    assert registry.kernels == [
        KernelInfo("qmv", "cpu", library, "toy_qmv", "bitwise"),
        KernelInfo("qmv", "metal", source, "", "rounding"),
        KernelInfo("qmv", "cuda", source, "", "lossy"),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        registry.kernels[0].symbol = "other"  # type: ignore[misc]


def test_two_of_a_name_on_one_device_are_refused(library):
    registry = Registry("toy")
    registry.cpu(name="a", library=library, symbol="f")
    with pytest.raises(ValueError, match="'a' is registered twice for cpu"):
        registry.cpu(name="a", library=library, symbol="g")
    assert len(registry.kernels) == 1


def test_a_missing_file_says_what_may_have_happened(tmp_path):
    registry = Registry("toy")
    for missing in (tmp_path / "no.so", tmp_path):  # a directory is no kernel either
        with pytest.raises(FileNotFoundError, match=r"kernel 'a'.*compiler"):
            registry.cpu(name="a", library=missing, symbol="f")
    assert registry.kernels == []


@pytest.mark.parametrize(
    "kwargs,said",
    [({"device": "tpu"}, "device 'tpu'"), ({"device": "metal", "exactness": "exact"}, "exactness 'exact'"),
     ({"device": "cpu"}, "cpu()")],
)  # fmt: skip
def test_nonsense_is_refused(source, kwargs, said):
    with pytest.raises(ValueError) as info:
        Registry("toy").source(name="a", path=source, **kwargs)
    assert "kernel 'a'" in str(info.value) and said in str(info.value)


def test_a_cpu_kernel_needs_a_symbol(library):
    with pytest.raises(ValueError, match="symbol"):
        Registry("toy").cpu(name="a", library=library, symbol="")


def test_content_hash_follows_the_content_not_the_place(tmp_path):
    def hashed(folder, text, names=("a", "b")):
        (tmp_path / folder).mkdir()
        registry = Registry("toy")
        for name in names:
            path = tmp_path / folder / name
            path.write_text(text + name)
            registry.source(name=name, device="metal", path=path)
        return registry.content_hash()

    first = hashed("one", "x")
    assert hashed("two", "x") == first
    assert hashed("three", "x", ("b", "a")) == first  # the order of announcing means nothing
    assert hashed("four", "y") != first
    assert hashed("five", "x", ("a",)) != first
    assert len(first) == 16


def test_one_file_of_many_kernels_counts_once(library):
    one, many = Registry("toy"), Registry("toy")
    one.cpu(name="a", library=library, symbol="a")
    for name in "abc":
        many.cpu(name=name, library=library, symbol=name)
    assert one.content_hash() == many.content_hash()
