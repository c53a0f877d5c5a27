"""mlx's attention kernels for few queries, unmodified: one pass over the keys, or blocks of keys and a second pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upstream_kernels.affine import rounded
from upstream_kernels.attention import Case, check

from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

TEXT = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/sdpa_vector.h"
instantiate_kernel("one_half_64", sdpa_vector, half, 64)
instantiate_kernel("one_bfloat16_t_128", sdpa_vector, bfloat16_t, 128)
instantiate_kernel("one_float_96", sdpa_vector, float, 96)
instantiate_kernel("first_half_64", sdpa_vector_2pass_1, half, 64)
instantiate_kernel("first_bfloat16_t_128", sdpa_vector_2pass_1, bfloat16_t, 128)
instantiate_kernel("gqa_half_64", sdpa_vector_2pass_1_gqa, half, 64, 64, 8, 4)
instantiate_kernel("gqa_bfloat16_t_128", sdpa_vector_2pass_1_gqa, bfloat16_t, 128, 128, 8, 2)
instantiate_kernel("second_half_64", sdpa_vector_2pass_2, half, 64)
instantiate_kernel("second_bfloat16_t_128", sdpa_vector_2pass_2, bfloat16_t, 128)
"""
#: Indices of function constants.
HAS_MASK, TRANSPOSED, CAUSAL, BOOL_MASK, FLOAT_MASK, HAS_SINKS, BLOCKS = range(20, 27)


def constants(case: Case) -> dict[int, Any]:
    masked = case.mask in ("bool", "float")
    return {
        HAS_MASK: masked, TRANSPOSED: case.transposed, CAUSAL: case.mask == "causal", BOOL_MASK: case.mask == "bool",
        FLOAT_MASK: case.mask == "float", HAS_SINKS: case.sinks,
    }  # fmt: skip


def strides(array: np.ndarray) -> list[np.ndarray]:
    """Steps between heads and between keys, in elements, as size_t."""
    return [np.array(s // array.itemsize, dtype=np.uint64) for s in array.strides[1:3]]


def masks(case: Case, arrays: dict[str, Any], first: int) -> dict[int, Any]:
    """The mask's buffer (bool first, float next) and its steps between keys, queries and heads."""
    if case.mask not in ("bool", "float"):
        return {}
    mask = arrays["mask"]
    steps = [np.int32(mask.strides[axis] // mask.itemsize) for axis in (3, 2, 1)]
    buffers: dict[int, Any] = {first if case.mask == "bool" else first + 1: mask}
    return buffers | dict(enumerate(steps, first + 2))


def query(case: Case, arrays: dict[str, Any]) -> np.ndarray:
    """q as it lies in memory."""
    return np.ascontiguousarray(arrays["q"].swapaxes(1, 2)) if case.transposed else arrays["q"]


def one_pass(upstream: Path, case: Case, arrays: dict[str, Any]) -> lab.Result:
    out = rounded(np.zeros((case.batch, case.heads, case.queries, case.d)), case.metal)
    k, v = arrays["k"], arrays["v"]
    values = [query(case, arrays), k, v, out, case.heads // case.kv_heads, case.keys, *strides(k), *strides(v)]
    buffers = dict(enumerate([*values, np.float32(case.scale)])) | masks(case, arrays, 11)
    if case.sinks:
        buffers |= {16: arrays["sinks"], 17: case.heads}
    return lab.run_msl(
        TEXT, f"one_{case.metal}_{case.d}", buffers, grid=(case.batch * case.heads * 1024, case.queries, 1),
        threadgroup=(1024, 1, 1), outputs=[3], constants=constants(case), include_dirs=[upstream],
    )  # fmt: skip


def first_pass(upstream: Path, kernel: str, case: Case, arrays: dict[str, Any], blocks: int) -> lab.Result:
    shape = (case.batch, case.heads, case.queries, blocks)
    parts = [rounded(np.zeros((*shape, case.d)), case.metal), *(np.zeros(shape, np.float32) for _ in range(2))]
    k, v = arrays["k"], arrays["v"]
    buffers = dict(enumerate([query(case, arrays), k, v, *parts]))
    buffers |= dict(enumerate([case.keys, *strides(k), *strides(v), np.float32(case.scale)], 7))
    buffers |= masks(case, arrays, 13)
    if case.sinks:
        buffers[18] = arrays["sinks"]
    group = (32, case.heads // case.kv_heads, case.queries)
    return lab.run_msl(
        TEXT, f"{kernel}_{case.metal}_{case.d}", buffers, threadgroup=group,
        grid=(case.kv_heads * group[0], case.batch * group[1], blocks * group[2]),
        outputs=[3, 4, 5], constants=constants(case) | {BLOCKS: blocks}, include_dirs=[upstream],
    )  # fmt: skip


def second_pass(upstream: Path, case: Case, parts: list[Any], blocks: int) -> lab.Result:
    out = rounded(np.zeros((case.batch, case.heads, case.queries, case.d)), case.metal)
    return lab.run_msl(
        TEXT, f"second_{case.metal}_{case.d}", dict(enumerate([*parts, out, blocks])), outputs=[3],
        grid=(case.batch * case.heads * 1024, case.queries, 1), threadgroup=(1024, 1, 1), include_dirs=[upstream],
    )  # fmt: skip


CASES = [
    Case("half", 64, 1, 2, 1, 1, 100),
    Case("half", 64, 1, 2, 2, 1, 1),  # one key: 31 SIMD groups have none
    Case("half", 64, 2, 4, 2, 3, 33, "causal"),
    Case("half", 64, 1, 2, 1, 2, 70, "bool"),
    Case("half", 64, 1, 2, 1, 1, 70, "float", sinks=True),
    Case("half", 64, 1, 4, 2, 3, 31, transposed=True),
    Case("bfloat16_t", 128, 1, 2, 1, 1, 65, sinks=True),
    Case("bfloat16_t", 128, 2, 2, 1, 2, 64, "float"),
    Case("float", 96, 1, 1, 1, 2, 40, "causal"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_vector(upstream: Path, case: Case) -> None:
    arrays = case.arrays()
    result = one_pass(upstream, case, arrays).check()
    check(result.outputs[0], case, arrays)
    counts = result.report.buffers
    # Every head reads every visible key and value: heads that share them do not share the loads.
    seen = case.visible(arrays) * case.d * arrays["k"].itemsize
    assert counts["keys"].bytes_read == counts["values"].bytes_read == seen
    assert counts["out"].bytes_written == counts["out"].unique_written == result.outputs[0].nbytes
    assert result.report.threadgroup_bytes == 4 * (32 * 32 + 32 + 32)


PASSES = [
    (Case("half", 64, 1, 4, 2, 1, 300), 32),
    (Case("half", 64, 1, 2, 1, 1, 1024), 64),
    (Case("half", 64, 1, 2, 1, 1, 20), 32),  # blocks without keys
    (Case("half", 64, 2, 4, 2, 3, 200, "causal"), 32),
    (Case("half", 64, 1, 2, 1, 2, 257, "bool"), 64),
    (Case("half", 64, 1, 2, 1, 2, 140, "float", sinks=True), 32),
    (Case("half", 64, 1, 2, 1, 2, 64, transposed=True), 32),
    (Case("bfloat16_t", 128, 1, 2, 1, 1, 161, sinks=True), 32),
]


@pytest.mark.parametrize(("case", "blocks"), PASSES, ids=str)
def test_sdpa_vector_in_two_passes(upstream: Path, case: Case, blocks: int) -> None:
    arrays = case.arrays()
    first = first_pass(upstream, "first", case, arrays, blocks).check()
    second = second_pass(upstream, case, first.outputs, blocks).check()
    check(second.outputs[0], case, arrays, in_parts=True)
    counts = first.report.buffers
    assert counts["keys"].unique_read <= counts["keys"].bytes_read
    if not case.mask:
        each = case.heads // case.kv_heads * case.queries
        assert counts["keys"].bytes_read == counts["values"].bytes_read == each * arrays["k"].nbytes
    assert second.report.buffers["partials"].bytes_read == first.outputs[0].nbytes


@pytest.mark.parametrize(
    ("case", "blocks", "together"),
    [
        (Case("half", 64, 1, 8, 1, 1, 500), 32, 4),
        (Case("half", 64, 2, 16, 2, 1, 33), 64, 4),  # fewer keys than blocks
        (Case("bfloat16_t", 128, 1, 8, 1, 1, 257), 32, 2),
    ],
    ids=str,
)
def test_sdpa_vector_gqa_shares_loads(upstream: Path, case: Case, blocks: int, together: int) -> None:
    """The variant for 8 heads on one key head: its promise, each key read 8 / `together` times, is counted."""
    arrays = case.arrays()
    first = first_pass(upstream, "gqa", case, arrays, blocks).check()
    second = second_pass(upstream, case, first.outputs, blocks).check()
    check(second.outputs[0], case, arrays, in_parts=True)
    counts = first.report.buffers
    times = 8 // together
    assert counts["keys"].bytes_read == counts["values"].bytes_read == times * arrays["k"].nbytes
    # One float per lane of an output, sum and maximum, for each head and each part of the block.
    assert first.report.threadgroup_bytes == 4 * 8 * together * (case.d + 2)


def test_a_query_that_sees_no_key_gives_zeros(upstream: Path) -> None:
    case = Case("half", 64, 1, 2, 1, 2, 40, "bool")
    arrays = case.arrays()
    arrays["mask"] = np.zeros_like(arrays["mask"])
    result = one_pass(upstream, case, arrays).check()
    assert not result.outputs[0].any()
    assert result.report.buffers["keys"].bytes_read == 0


def test_a_wrong_stride_is_seen(upstream: Path) -> None:
    """Steps between heads taken from a shape that is not the array's: the lab says which buffer ends where."""
    case = Case("half", 64, 1, 2, 2, 1, 40)
    arrays = case.arrays()
    longer = dict(arrays, k=np.zeros((1, 2, 48, 64), np.float16))
    k = arrays["k"]
    out = np.zeros((1, 2, 1, 64), np.float16)
    values = [arrays["q"], k, arrays["v"], out, 1, 40, *strides(longer["k"]), *strides(arrays["v"])]
    result = lab.run_msl(
        TEXT, "one_half_64", dict(enumerate([*values, np.float32(0.125)])), grid=(2048, 1, 1),
        threadgroup=(1024, 1, 1), outputs=[3], include_dirs=[upstream],
    )  # fmt: skip
    assert {(f.kind, f.buffer) for f in result.report.faults} == {("out-of-bounds-read", "keys")}
    assert sum(f.count for f in result.report.faults) == 8 * 64
