"""The kernel of many rows on Metal in the lab: results, bits, faults and traffic of every format, dtype and edge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bonsai_qmv import gpu_offers
from bonsai_qmv.gpu_tiles import AFFINE_QMM_SIMD
from gpu_harness import excess, problem, run

from backend_core.simt import arguments
from backend_core.simt.tiles import rows_of_tiles
from backend_core.testing import lab
from backend_core.testing.lab_device import moved, typed, values
from backend_core.testing.metal_text import metal_text

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]


def right(p, **over):
    """The checked result."""
    result = run(AFFINE_QMM_SIMD, p, **over).check()
    assert excess(p, result.outputs[0]) <= 1.0
    launch = AFFINE_QMM_SIMD.launch(**{**p.facts, "rows": len(p.x)}, **over)
    assert result.report.threadgroup_bytes == AFFINE_QMM_SIMD.threadgroup_bytes(launch) <= 32768
    return result


# Few launches compile anew: a text for each bits, group, dtype, symmetry, height of tiles and bias.
@pytest.mark.parametrize(
    ("bits", "group", "dtype", "n", "k", "rows", "symmetric", "options"),
    [
        (1, 32, "float16", 40, 96, 65, 0, {}),
        (1, 64, "bfloat16", 7, 64, 17, 1, {}),
        (1, 128, "float32", 24, 256, 63, 2, {}),
        (1, 128, "float16", 72, 128, 33, 64, {"bias": True}),  # biases far from the codes
        (2, 32, "bfloat16", 65, 160, 64, 0, {"bias": True}),
        (2, 64, "float16", 7, 192, 127, 1, {}),  # scales times a half of an odd number
        (2, 128, "float16", 24, 384, 129, 2, {}),
        (2, 64, "float16", 40, 192, 20, 0, {"scales": "bfloat16"}),
        (4, 32, "float32", 7, 96, 32, 0, {"bias": True}),
        (4, 64, "float16", 24, 192, 17, 4, {}),
        (4, 128, "bfloat16", 64, 256, 66, 0, {}),
    ],
)
def test_results(bits, group, dtype, n, k, rows, symmetric, options) -> None:
    p = problem(bits, group, dtype, n, k, rows, symmetric=symmetric, **options)
    buffers = right(p).report.buffers
    assert buffers["biases"].bytes_read == 0 if symmetric else buffers["biases"].unique_read > 0
    assert (buffers["bias"].bytes_read > 0) is (p.bias is not None)
    assert [name for name in buffers if buffers[name].bytes_written] == ["y"]


def test_tiles_of_codes_do_where_tiles_of_weights_would() -> None:
    for bits, symmetric in ((1, 1), (2, 2)):
        p = problem(bits, 64, "float16", 40, 192, 20, symmetric=symmetric)
        for whole in (True, False):
            assert AFFINE_QMM_SIMD.launch(**{**p.facts, "rows": 20}, whole=whole).value("WHOLE") is whole
        right(p, whole=False)


@pytest.mark.parametrize(("bits", "rows"), [(1, 300), (2, 300), (4, 300), (2, 32)])
def test_each_byte_of_the_weights_is_read_once_for_a_tile_of_rows(bits, rows) -> None:
    n, k = 128, 256
    p = problem(bits, 128, "float16", n, k, rows)
    buffers = right(p).report.buffers
    tiles = -(-rows // 64)
    assert buffers["w"].bytes_read == tiles * buffers["w"].unique_read == tiles * n * k * bits // 8
    for name in ("scales", "biases"):
        assert buffers[name].bytes_read == tiles * buffers[name].unique_read == tiles * n * k // 128 * 2
    # Rows of x are read once for each 64 columns, and beyond the end again.
    assert buffers["x"].bytes_read == n // 64 * rows_of_tiles(rows) * k * 2
    assert buffers["y"].bytes_written == buffers["y"].unique_written == rows * n * 2


def test_a_row_has_the_bits_it_has_in_any_tile_of_any_height_and_view() -> None:
    p = problem(2, 64, "float16", 40, 320, 129)
    whole = right(p).outputs[0]
    for rows in (slice(0, 1), slice(63, 65), slice(128, 129), slice(5, 40)):
        np.testing.assert_array_equal(run(AFFINE_QMM_SIMD, p.part(rows)).check().outputs[0], whole[rows])

    p.x, p.w, p.scales, p.biases = moved(p.x, 1), moved(p.w, 1), moved(p.scales, 1), moved(p.biases, 3)
    np.testing.assert_array_equal(right(p).outputs[0], whole)


def test_not_a_number_stays_in_its_row() -> None:
    p = problem(2, 64, "float16", 24, 128, 20)
    clean = right(p).outputs[0]
    for value in (np.nan, np.inf):
        x = np.array(values(p.x))
        x[2, 17] = value
        p.x = typed(x, "float16")
        y = run(AFFINE_QMM_SIMD, p).check().outputs[0]
        assert not np.isfinite(y[2]).any()
        np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


def test_large_activations_and_tiny_weights_do_not_overflow() -> None:
    p = problem(2, 64, "float16", 24, 128, 20)
    p.x = typed(values(p.x) * 12000, "float16")
    p.scales, p.biases = (typed(values(a) * 1e-3, "float16") for a in (p.scales, p.biases))
    right(p)


@pytest.mark.parametrize(
    "facts", [{"bits": 3}, {"group_size": 16}, {"k": 100}, {"device": "cuda"}, {"x_dtype": "int8"}], ids=str
)
def test_what_it_is_not_made_for_is_refused_before_launch(facts) -> None:
    p = problem(2, 64, "float16", 24, 320, 1)
    with pytest.raises(ValueError, match="affine_qmm_simd"):
        AFFINE_QMM_SIMD.launch(**{**p.facts, "rows": 17, **facts})


def test_launches_are_for_whole_tiles() -> None:
    p = problem(2, 64, "float16", 65, 64, 1)
    for rows in (17, 32, 33, 64, 65, 300):
        launch = AFFINE_QMM_SIMD.launch(**{**p.facts, "rows": rows})
        made = launch.grid[0] // 128 * launch.value("TILE_ROWS")
        assert rows <= made == rows_of_tiles(rows) < rows + 64 and launch.grid[1] == 2
    assert gpu_offers.many_rows({**p.facts, "device": "metal"}) is AFFINE_QMM_SIMD


@pytest.mark.parametrize(
    ("n", "k", "bits", "dtype", "small"),
    [
        (24, 384, 2, "bfloat16", ()),
        (7, 128, 4, "float16", ("scales", "biases", "bias")),
        (7, 32, 1, "float32", ("w", "scales", "biases", "bias")),
    ],
)
def test_types_hold_with_small_inputs_in_constant_memory(n, k, bits, dtype, small) -> None:
    try:
        lab.find_type_checker()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
    p = problem(bits, min(k, 128), dtype, n, k, 17, bias=True)
    inputs = dict(zip(AFFINE_QMM_SIMD.inputs, (p.x, p.w, p.scales, p.biases, p.bias), strict=True))
    assert {name for name, a in inputs.items() if a.size < 8} == set(small)
    template = arguments(AFFINE_QMM_SIMD.launch(**{**p.facts, "rows": 17}), lab)["template"]
    found = lab.check_types(
        AFFINE_QMM_SIMD.lab(), inputs=list(inputs.values()), output_dtypes=[getattr(lab, dtype)], template=template,
        together=(("scales", "biases"),),
    )  # fmt: skip
    assert not found, "\n".join(map(str, found))


def test_the_text_for_metal_is_the_functions_and_the_stored_kernel() -> None:
    p = problem(2, 128, "bfloat16", 7, 128, 17, symmetric=2)
    dtypes = ("bfloat16", "uint32", "bfloat16", "bfloat16", "bfloat16")
    arrays = [p.x, p.w, p.scales, p.biases, p.scales]
    text = metal_text(
        "bonsai_qmv.gpu_tiles:AFFINE_QMM_SIMD", {**p.facts, "rows": 17},
        [(a.shape, dtype) for a, dtype in zip(arrays, dtypes, strict=True)], [((17, 7), "bfloat16")],
    )  # fmt: skip
    functions = AFFINE_QMM_SIMD.text("metal").header
    assert text.startswith(functions) and "#include" not in text
    assert text[len(functions) :] == (Path(__file__).parent / "affine_qmm_simd.golden.metal").read_text()
