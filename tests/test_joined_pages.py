"""Weights in huge pages: the same numbers at the same address, in fewer pages."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from backend_core import joined_pages


def address(a: mx.array) -> int:
    return int(np.asarray(memoryview(a)).__array_interface__["data"][0])


def huge_kilobytes(begin: int, end: int) -> int:
    """Of the mappings that [begin, end) touches."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < end and int(span[2], 16) > begin
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1])
    return total


def test_numbers_and_addresses_stay():
    a = mx.random.normal((2000, 2000), key=mx.random.key(0))
    mx.eval(a)
    before, at = np.array(a), address(a)
    joined_pages.collapse([a])
    assert np.array_equal(np.array(a), before) and address(a) == at


def test_pages_are_huge():
    a = mx.random.normal((2000, 2000), key=mx.random.key(0))
    mx.eval(a)
    page, at = joined_pages.PAGE, address(a)
    begin, end = -(-at // page) * page, (at + a.nbytes) // page * page
    # Of the pages that the array fills: the two at its ends hold more, and the system may refuse them or break them up.
    inner = np.asarray(memoryview(a)).reshape(-1).view(np.uint8)[begin - at : end - at]
    made = joined_pages.collapse([inner])
    assert made <= (end - begin) // page
    if made < (end - begin) // page:
        pytest.skip(f"this system made {made} huge pages of {(end - begin) // page} out of memory that is in use")
    assert huge_kilobytes(begin, end) >= (end - begin) // 1024


def test_nothing_where_the_owner_said_never(monkeypatch, tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(joined_pages, "_SETTING", setting)
    a = mx.ones((1 << 21,))
    mx.eval(a)
    assert not joined_pages.allowed() and joined_pages.collapse([a]) == 0
    monkeypatch.setattr(joined_pages, "_SETTING", tmp_path / "missing")
    assert joined_pages.collapse([a]) == 0


def test_arrays_without_a_buffer_are_left_out():
    b = mx.ones((1 << 21,), mx.bfloat16)
    mx.eval(b)
    assert joined_pages.collapse([b]) >= 0
    assert mx.array_equal(b, mx.ones((1 << 21,), mx.bfloat16))


def test_what_is_no_array_is_left_out():
    class Nothing:
        nbytes = joined_pages.PAGE

    assert joined_pages.collapse([Nothing()]) == 0
