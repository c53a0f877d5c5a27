"""mlx's attention kernel for prompts (steel), unmodified: tiles of queries and keys, SIMD-group matrices."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upstream_kernels.affine import rounded
from upstream_kernels.attention import Case, check

from backend_core.reference import worst_ratio
from backend_core.reference_ops import logsumexp, logsumexp_bound
from backend_core.testing import lab

pytestmark = pytest.mark.upstream_kernels

#: name -> type, queries and keys of a tile, head dimension, SIMD groups along queries and along the head, mask's type.
KERNELS: dict[str, tuple[str, int, int, int, int, int, str]] = {
    "half_64": ("half", 32, 32, 64, 4, 1, "half"),
    "half_64_bool": ("half", 32, 32, 64, 4, 1, "bool"),
    "bfloat16_t_128": ("bfloat16_t", 32, 16, 128, 4, 1, "bfloat16_t"),
    "float_72": ("float", 32, 32, 72, 4, 1, "float"),
    "half_128_pairs": ("half", 32, 16, 128, 4, 2, "half"),
    "float_128_pairs": ("float", 32, 16, 128, 4, 2, "float"),
}
#: Indices of function constants.
ALIGN_Q, ALIGN_K, HAS_MASK, CAUSAL, HAS_SINKS, SAVE_LSE = 200, 201, 300, 301, 302, 303


def instance(name: str) -> str:
    metal, bq, bk, d, wm, wn, mask = KERNELS[name]
    return f'instantiate_kernel("{name}", attention, {metal}, {bq}, {bk}, {d}, {d}, {wm}, {wn}, {mask}, float)'


TEXT = "\n".join(
    [
        '#include "mlx/backend/metal/kernels/utils.h"',
        '#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"',
        *map(instance, KERNELS),
    ]
)


def steps(array: np.ndarray) -> list[int]:
    """Steps between batches, heads and rows, in elements."""
    return [s // array.itemsize for s in array.strides[:3]]


def launch(upstream: Path, name: str, case: Case, arrays: dict[str, Any], lse: bool = False) -> lab.Result:
    _, bq, bk, d, wm, wn, _ = KERNELS[name]
    q, k, v = (arrays[n] for n in "qkv")
    out = rounded(np.zeros(q.shape), case.metal)
    length, keys = case.queries, case.keys
    params = struct.pack(
        "6if7i12q", case.batch, case.heads, d, length, keys, case.heads // case.kv_heads, case.scale, -(-length // bq),
        -(-keys // bk), length // bq, keys // bk, length % bq, keys % bk, keys - length,
        *(s for a in (q, k, v, out) for s in steps(a)),
    )  # fmt: skip
    buffers: dict[int, Any] = {0: q, 1: k, 2: v, 3: out, 4: np.frombuffer(params, np.uint8)}
    if "mask" in arrays:
        buffers |= {5: np.array(steps(arrays["mask"]), np.int64), 6: arrays["mask"]}
    if case.sinks:
        buffers[7] = arrays["sinks"]
    if lse:
        buffers[8] = np.zeros(q.shape[:3], np.float32)
    constants = {
        ALIGN_Q: length % bq == 0, ALIGN_K: keys % bk == 0, HAS_MASK: "mask" in arrays, CAUSAL: case.mask == "causal",
        HAS_SINKS: case.sinks, SAVE_LSE: lse,
    }  # fmt: skip
    return lab.run_msl(
        TEXT, name, buffers, grid=(-(-length // bq) * 32, case.heads * wm, case.batch * wn), threadgroup=(32, wm, wn),
        outputs=[3, *([8] if lse else [])], constants=constants, include_dirs=[upstream],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("half_64", Case("half", 64, 1, 1, 1, 32, 64)),
        ("half_64", Case("half", 64, 1, 2, 1, 33, 65)),  # one query and one key in the last tiles
        ("half_64", Case("half", 64, 2, 2, 1, 40, 70, "causal")),
        ("half_64", Case("half", 64, 1, 2, 2, 9, 33, "float", sinks=True)),
        ("half_64_bool", Case("half", 64, 1, 2, 1, 35, 31, "bool")),
        ("bfloat16_t_128", Case("bfloat16_t", 128, 1, 1, 1, 17, 40, "causal", sinks=True)),
        ("float_72", Case("float", 72, 1, 1, 1, 33, 34)),
        ("half_128_pairs", Case("half", 128, 1, 2, 1, 45, 49, "causal")),
        ("float_128_pairs", Case("float", 128, 1, 1, 1, 34, 17)),
    ],
    ids=str,
)
def test_steel_attention(upstream: Path, name: str, case: Case) -> None:
    arrays = case.arrays()
    result = launch(upstream, name, case, arrays).check()
    check(result.outputs[0], case, arrays)
    counts = result.report.buffers
    assert counts["Q"].unique_read == arrays["q"].nbytes
    if not case.mask:
        assert counts["K"].unique_read == arrays["k"].nbytes
    if name == "half_64" and not case.mask and (case.queries % 32, case.keys % 32) == (0, 0):
        # Keys and values once per tile of queries.
        assert counts["K"].bytes_read == counts["V"].bytes_read == case.queries // 32 * arrays["k"].nbytes
    assert counts["O"].bytes_written == counts["O"].unique_written == result.outputs[0].nbytes
    assert result.report.threadgroup_bytes <= 32 << 10


@pytest.mark.parametrize(("name", "twice"), [("half_64", False), ("half_128_pairs", True)])
def test_steel_attention_keeps_logsumexp(upstream: Path, name: str, twice: bool) -> None:
    """With two SIMD groups to a row of queries, both store its logsumexp, the same."""
    case = Case("half", KERNELS[name][3], 1, 2, 1, 45, 70)
    arrays = case.arrays()
    result = launch(upstream, name, case, arrays, lse=True)
    assert {(f.kind, f.buffer) for f in result.report.faults} == ({("race-same-value", "lse")} if twice else set())
    assert sum(f.count for f in result.report.faults) == (case.heads * case.queries if twice else 0)
    check(result.outputs[0], case, arrays)
    q, k = (lab.to_float32(arrays[n]).astype(np.float64) for n in "qk")
    scores = case.scale * (q @ np.repeat(k, case.heads, axis=1).swapaxes(-1, -2))
    sizes = case.scale * (np.abs(q) @ np.abs(np.repeat(k, case.heads, axis=1)).swapaxes(-1, -2))
    y64 = logsumexp(scores)[..., 0]
    bound = logsumexp_bound(y64, case.keys, "float32") + 4 * np.sqrt(case.d) * 2.0**-24 * sizes.max(axis=-1)
    assert worst_ratio(result.outputs[1].astype(np.float64), y64, bound, "float32") <= 1.0
