"""The kernels of many rows in the lab: results, bits, faults and traffic of every group, dtype and edge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from t5_gpu import KERNELS, excess, problem, run
from t5_ternary import gpu_offers, reference
from t5_ternary.layout import packed_columns

from backend_core.simt import arguments
from backend_core.simt.tiles import rows_of_tiles
from backend_core.testing import lab
from backend_core.testing.lab_device import moved, typed, values
from backend_core.testing.metal_text import metal_text

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]

QMM, SIMD = KERNELS["t5_qmm"], KERNELS["t5_qmm_simd"]
BOTH = pytest.mark.parametrize("kernel", [QMM, SIMD], ids=lambda k: k.name)


def right(kernel, p):
    """The checked result."""
    result = run(kernel, p).check()
    assert excess(p, result.outputs[0]) <= 1.0
    launch = kernel.launch(**{**p.facts, "rows": len(p.x)})
    assert result.report.threadgroup_bytes == kernel.threadgroup_bytes(launch) <= 32768
    return result


# Few launches compile anew: a text for each group, dtype, height of tiles and bias.
@pytest.mark.parametrize(
    ("kernel", "group", "dtype", "n", "k", "rows", "bias"),
    [
        (QMM, 64, "float16", 7, 192, 65, False),
        (QMM, 64, "bfloat16", 40, 64, 17, True),
        (QMM, 128, "bfloat16", 33, 384, 129, False),
        (SIMD, 64, "float16", 7, 192, 65, False),
        (SIMD, 64, "bfloat16", 40, 64, 17, True),
        (SIMD, 64, "float32", 72, 128, 63, True),
        (SIMD, 128, "float16", 65, 384, 129, False),
        (SIMD, 128, "bfloat16", 24, 128, 127, True),
        (SIMD, 128, "float32", 24, 256, 32, False),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_results(kernel, group, dtype, n, k, rows, bias) -> None:
    buffers = right(kernel, problem(group, dtype, n, k, rows, bias=bias)).report.buffers
    assert (buffers["bias"].bytes_read > 0) is bias
    assert [name for name in buffers if buffers[name].bytes_written] == ["y"]


def test_scales_of_another_dtype() -> None:
    result = right(SIMD, problem(128, "float16", 24, 256, 20, scales="bfloat16"))
    assert result.outputs[0].dtype == np.float32
    assert QMM.eligible(group_size=128, x_dtype="float16", scales_dtype="bfloat16", k=256)


@BOTH
@pytest.mark.parametrize("group", [64, 128])
def test_every_byte_is_five_trits_at_every_place(kernel, group) -> None:
    # Rows of x are unit vectors, so that results are weights; all bytes that can occur, at all places of a group.
    size = 13 * group // 64
    w = (np.arange(243)[:, None] + np.arange(size) * 37) % 243
    # Behind the group's end there is nothing.
    trits = reference.unpack(w.astype(np.uint8), group)
    p = problem(group, "float16", 243, group, group)
    p.w, p.x = reference.pack(trits, group), typed(np.eye(group), "float16")
    p.scales = typed(np.full((243, 1), 0.75), "float16")
    y = values(run(kernel, p).check().outputs[0])
    np.testing.assert_array_equal(y, 0.75 * (trits.astype(np.float64).T - 1))


@BOTH
@pytest.mark.parametrize(("group", "rows"), [(64, 130), (128, 130), (128, 32)])
def test_each_byte_of_the_weights_is_read_once_for_a_tile_of_rows(kernel, group, rows) -> None:
    n, k = 64, 256
    buffers = right(kernel, problem(group, "float16", n, k, rows)).report.buffers
    tiles = -(-rows // 64)
    assert buffers["w"].bytes_read == tiles * buffers["w"].unique_read == tiles * n * packed_columns(k, group)
    assert buffers["scales"].bytes_read == 2 * tiles * buffers["scales"].unique_read == 2 * tiles * n * k // group * 2
    # Rows of x are read once for each tile of columns, and beyond the end again.
    columns, made = (64, rows_of_tiles(rows)) if kernel is SIMD else (32, 64 * tiles)
    assert buffers["x"].bytes_read == n // columns * made * k * 2
    assert buffers["y"].bytes_written == buffers["y"].unique_written == rows * n * 2


@BOTH
def test_a_row_has_the_bits_it_has_in_any_tile_of_any_height_and_view(kernel) -> None:
    p = problem(128, "float16", 40, 256, 129)
    whole = right(kernel, p).outputs[0]
    for rows in (slice(0, 1), slice(63, 65), slice(128, 129), slice(5, 40)):
        np.testing.assert_array_equal(run(kernel, p.part(rows)).check().outputs[0], whole[rows])

    p.x, p.w, p.scales = moved(p.x, 1), moved(p.w, 3), moved(p.scales, 1)
    np.testing.assert_array_equal(right(kernel, p).outputs[0], whole)


@BOTH
def test_not_a_number_stays_in_its_row(kernel) -> None:
    p = problem(128, "float16", 24, 256, 20)
    clean = right(kernel, p).outputs[0]
    for value in (np.nan, np.inf):
        x = np.array(values(p.x))
        x[2, 122] = value
        p.x = typed(x, "float16")
        y = run(kernel, p).check().outputs[0]
        assert not np.isfinite(y[2]).any()
        np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


@BOTH
def test_large_activations_and_tiny_scales_do_not_overflow(kernel) -> None:
    p = problem(128, "float16", 24, 256, 20)
    p.x, p.scales = typed(values(p.x) * 12000, "float16"), typed(values(p.scales) * 1e-5, "float16")
    right(kernel, p)


@pytest.mark.parametrize(
    ("kernel", "facts"),
    [
        (QMM, {"group_size": 32}),
        (QMM, {"x_dtype": "float32"}),
        (QMM, {"k": 100}),
        (SIMD, {"group_size": 32}),
        (SIMD, {"device": "cuda"}),
        (SIMD, {"k": 0}),
    ],
)
def test_what_a_kernel_is_not_made_for_is_refused_before_launch(kernel, facts) -> None:
    p = problem(64, "float16", 24, 320, 1)
    with pytest.raises(ValueError, match=kernel.name):
        kernel.launch(**{**p.facts, "rows": 17, **facts})
    assert gpu_offers.many_rows({**p.facts, "device": "metal"}) is SIMD


@BOTH
@pytest.mark.parametrize(("n", "k", "small"), [(24, 384, ()), (7, 128, ("scales", "bias"))])
def test_types_hold_with_small_inputs_in_constant_memory(kernel, n, k, small) -> None:
    try:
        lab.find_type_checker()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
    p = problem(128, "float16", n, k, 17, bias=True)
    inputs = dict(zip(kernel.inputs, (p.x, p.w, p.scales, p.bias), strict=True))
    assert {name for name, a in inputs.items() if a.size < 8} == set(small)
    template = arguments(kernel.launch(**{**p.facts, "rows": 17}), lab)["template"]
    found = lab.check_types(kernel.lab(), inputs=list(inputs.values()), output_dtypes=[lab.float16], template=template)
    assert not found, "\n".join(map(str, found))


def test_the_text_for_metal_is_the_functions_and_the_stored_kernel() -> None:
    p = problem(128, "bfloat16", 7, 128, 17)
    arrays, dtypes = [p.x, p.w, p.scales, p.scales], ("bfloat16", "uint8", "bfloat16", "bfloat16")
    text = metal_text(
        "t5_ternary.gpu_tiles:T5_QMM_SIMD", {**p.facts, "rows": 17},
        [(a.shape, dtype) for a, dtype in zip(arrays, dtypes, strict=True)], [((17, 7), "bfloat16")],
    )  # fmt: skip
    functions = SIMD.text("metal").header
    assert text.startswith(functions) and "#include" not in text
    assert text[len(functions) :] == (Path(__file__).parent / "t5_qmm_simd.golden.metal").read_text()
