"""The GPU kernels in the lab: results, bits, faults and traffic of every format, dtype and edge."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from bonsai_qmv import gpu_offers
from gpu_harness import KERNELS, excess, problem, run

from backend_core.simt import arguments
from backend_core.testing import lab
from backend_core.testing.lab_device import typed, values

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]

QMV, MMA, QMM = (KERNELS[f"affine_{name}"] for name in ("qmv", "mma", "qmm"))
FLOATS = ("float32", "float16", "bfloat16")


def right(kernel, p, rows, as_rows: int = 0):
    """The checked result of the first rows of a problem."""
    part = p.part(slice(0, rows))
    result = run(kernel, part, as_rows)
    result.check()
    assert excess(part, result.outputs[0]) <= 1.0
    return result


def served(kernel, bits: int, group: int, dtype: str) -> bool:
    return not kernel.eligible(bits=bits, group_size=group, x_dtype=dtype, scales_dtype=dtype, k=group)


# Every format and dtype once; number of rows, columns and groups, symmetry and bias vary along.
FORMATS = [
    (kernel, bits, group, dtype)
    for kernel, bits, group, dtype in itertools.product((QMV, MMA), (1, 2, 4), (32, 64, 128), FLOATS)
    if served(kernel, bits, group, dtype)
]
EXTRA = [(QMV, bits, 64, "float16") for bits in (3, 5, 6, 8)] + [(MMA, 8, 64, "float16")]


@pytest.mark.parametrize(
    ("i", "kernel", "bits", "group", "dtype"),
    [pytest.param(i, *c, id=f"{c[0].name}-{c[1]}bit-g{c[2]}-{c[3]}") for i, c in enumerate(FORMATS + EXTRA)],
)
def test_results(i, kernel, bits, group, dtype) -> None:
    n = (7, 24, 40, 16)[i % 4]
    rows = (1, 2, 8, 16, 5, 1, 17, 3)[i % 8]
    symmetric = (0, bits if bits <= 2 else 0, 0)[i % 3]
    p = problem(bits, group, dtype, n, group * (1, 9, 5)[i % 3], rows, symmetric=symmetric, bias=i % 5 == 0, seed=i)
    result = right(kernel, p, rows)
    if symmetric:
        assert result.report.buffers["biases"].bytes_read == 0
    if p.bias is None:
        assert result.report.buffers["bias"].bytes_read == 0


@pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)
@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
def test_scales_of_another_dtype(kernel, scales) -> None:
    result = right(kernel, problem(2, 128, "float16", 24, 384, 2, scales=scales), 2)
    assert result.outputs[0].dtype == np.float32


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(QMV, "float32"), (QMV, "float16"), (MMA, "float16"), (MMA, "bfloat16")],
    ids=lambda v: getattr(v, "name", v),
)  # fmt: skip
def test_any_number_of_rows_gives_each_the_bits_it_has_alone(kernel, dtype) -> None:
    p = problem(2, 64, dtype, 24, 320, 17)
    alone = [right(kernel, p.part(slice(i, i + 1)), 1).outputs[0][0].tobytes() for i in range(17)]
    for rows in range(2, 18):
        y = right(kernel, p, rows).outputs[0]
        assert [y[i].tobytes() for i in range(rows)] == alone[:rows], f"{rows} rows"
    # Kernels for more rows than there are.
    for rows, as_rows in ((1, 4), (3, 8), (5, 16), (9, 16), (17, 32)):
        y = right(kernel, p, rows, as_rows).outputs[0]
        assert [y[i].tobytes() for i in range(rows)] == alone[:rows], f"{rows} as {as_rows} rows"


@pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)
@pytest.mark.parametrize("rows", [1, 8])
def test_each_byte_of_the_weights_is_read_once_for_all_rows(kernel, rows) -> None:
    n, k = 64, 1024
    for symmetric in (0, 2):
        buffers = right(kernel, problem(2, 128, "float16", n, k, rows, symmetric=symmetric), rows).report.buffers
        groups = n * k // 128 * 2
        assert buffers["w"].bytes_read == buffers["w"].unique_read == n * k // 4
        # A scale is read by each lane that has a part of the group, once in a line.
        assert buffers["scales"].unique_read == groups
        assert buffers["biases"].unique_read == (0 if symmetric else groups)
        assert buffers["bias"].bytes_read == 0
        assert buffers["y"].bytes_written == buffers["y"].unique_written == rows * n * 2


@pytest.mark.parametrize(
    ("k", "simd_groups"), [(32 * 21, 4), (32 * 34, 4), (32 * 20, 3), (32 * 8, 5)],
    ids=["shares of 2, 2, 2, none", "shares of 3, 3, 3, none", "shares of 2, 2, 1", "more than quads"],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
def test_threadgroups_make_several_tiles_with_unequal_shares_of_k(k, simd_groups, rows) -> None:
    # 5 tiles and a part of one for 2 threadgroups.
    p = problem(2, 32, "float16", 88, k, rows)
    result = run(MMA, p, simd_groups=simd_groups, blocks=2).check()
    assert excess(p, result.outputs[0]) <= 1.0
    assert result.report.buffers["w"].bytes_read >= 88 * k // 4


def test_columns_have_the_same_bits_however_many_threadgroups_make_them() -> None:
    p = problem(1, 64, "float16", 72, 64 * 12, 2)
    once = run(MMA, p).check().outputs[0]
    for blocks in (1, 2, 3):
        np.testing.assert_array_equal(run(MMA, p, blocks=blocks).check().outputs[0], once)


@pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)
def test_threadgroup_memory_is_what_the_registry_says(kernel) -> None:
    for rows in (1, 4, 16):
        p = problem(2, 128, "float16", 40, 1152, rows)
        launch = kernel.launch(**{**p.facts, "rows": rows})
        # The lab counts what alignment adds.
        assert 0 <= run(kernel, p).report.threadgroup_bytes - kernel.threadgroup_bytes(launch) < 64
        assert kernel.threadgroup_bytes(launch) <= 32768


@pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_stays_in_its_row(kernel, value) -> None:
    p = problem(2, 64, "float16", 24, 320, 5)
    clean = run(kernel, p).outputs[0]
    x = np.array(values(p.x))
    x[2, 17] = value
    p.x = typed(x, "float16")
    y = run(kernel, p).check().outputs[0]
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)
def test_large_activations_and_tiny_weights_do_not_overflow(kernel) -> None:
    p = problem(2, 128, "float16", 16, 384, 3)
    p.x = typed(values(p.x) * 12000, "float16")
    p.scales, p.biases = (typed(values(a) * 1e-3, "float16") for a in (p.scales, p.biases))
    part = run(kernel, p)
    part.check()
    assert excess(p, part.outputs[0]) <= 1.0


@pytest.mark.parametrize(
    ("kernel", "facts"),
    [
        (QMV, {"bits": 7}),
        (QMV, {"group_size": 16}),
        (QMV, {"k": 100}),
        (MMA, {"x_dtype": "float32"}),
        (MMA, {"bits": 3}),
        (MMA, {"bits": 8, "x_dtype": "bfloat16"}),
    ],
)
def test_what_a_kernel_is_not_made_for_is_refused_before_launch(kernel, facts) -> None:
    p = problem(2, 64, "float16", 24, 320, 1)
    with pytest.raises(ValueError, match=kernel.name):
        kernel.launch(**{**p.facts, "rows": 1, **facts})


@pytest.mark.parametrize(
    ("bits", "group", "dtype", "n", "k", "rows", "symmetric", "options"),
    [
        (2, 128, "float16", 40, 256, 70, 0, {}),
        (2, 128, "float16", 40, 256, 64, 2, {}),
        (1, 64, "float16", 33, 192, 20, 1, {}),
        (1, 32, "float16", 7, 32, 17, 2, {}),
        (1, 128, "bfloat16", 40, 128, 65, 1, {}),
        (2, 32, "bfloat16", 24, 96, 65, 2, {}),
        (2, 32, "bfloat16", 24, 160, 30, 0, {"bias": True}),
        (2, 64, "float16", 24, 192, 30, 1, {"bias": True}),
        (4, 32, "float16", 7, 160, 17, 0, {"scales": "float32"}),
        (4, 128, "bfloat16", 40, 128, 18, 0, {}),
    ],
)
def test_many_rows(bits, group, dtype, n, k, rows, symmetric, options) -> None:
    p = problem(bits, group, dtype, n, k, rows, symmetric=symmetric, **options)
    result = right(QMM, p, rows)
    if symmetric:
        assert result.report.buffers["biases"].bytes_read == 0


def test_many_rows_do_not_write_weights_and_read_them_once_for_64_rows() -> None:
    n, k = 32, 512
    p = problem(2, 128, "float16", n, k, 128, symmetric=2)
    report = right(QMM, p, 128).report
    assert report.buffers["w"].bytes_read == 2 * n * k // 4
    assert [b for b in report.buffers if report.buffers[b].bytes_written] == ["y"]
    assert report.threadgroup_bytes <= 32768


def test_many_rows_have_the_bits_that_each_has_alone() -> None:
    p = problem(2, 64, "float16", 40, 320, 67)
    whole = right(QMM, p, 67).outputs[0]
    for rows in (slice(0, 1), slice(63, 65), slice(66, 67)):
        np.testing.assert_array_equal(run(QMM, p.part(rows)).check().outputs[0], whole[rows])


def test_weights_that_are_values_of_x_s_dtype_give_the_same_within_rounding() -> None:
    p = problem(2, 64, "float16", 40, 320, 20, symmetric=2)
    for folded in (True, False):
        assert QMM.launch(**{**p.facts, "rows": 20}, folded=folded).value("FOLDED") is folded
        assert excess(p, run(QMM, p, folded=folded).check().outputs[0]) <= 1.0


@pytest.mark.parametrize("bits", [1, 2])
def test_scales_of_which_twice_is_infinite(bits) -> None:
    p = problem(bits, 128, "float16", 40, 256, 20)
    p.scales = typed(np.full((40, 2), 40000.0), "float16")
    p.biases, p.x = typed(values(p.scales) * -1.5, "float16"), typed(values(p.x) * 2.0**-14, "float16")
    folded = gpu_offers.can_fold(mx.array(p.scales))
    assert not folded
    assert excess(p, run(QMM, p, folded=folded).check().outputs[0]) <= 1.0
    assert gpu_offers.can_fold(mx.full((2, 2), -32752, mx.float16))


#: What the type check says of members of a struct that is handed over by reference, and Metal does not.
BY_REFERENCE = {f"no matching function for call to '{name}'" for name in ("stream_words", "load_scales")}


@pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("n", "k", "bits", "small"),
    [(24, 384, 2, ()), (7, 128, 2, ("scales", "biases", "bias")), (7, 32, 1, ("w", "scales", "biases", "bias"))],
)
def test_types_hold_with_small_inputs_in_constant_memory(kernel, rows, n, k, bits, small) -> None:
    try:
        lab.find_type_checker()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
    p = problem(bits, min(k, 128), "float16", n, k, rows, bias=True)
    inputs = dict(zip(kernel.inputs, (p.x, p.w, p.scales, p.biases, p.bias), strict=True))
    assert {name for name, a in inputs.items() if a.size < 8} == set(small)
    template = arguments(kernel.launch(**{**p.facts, "rows": rows}), lab)["template"]
    found = lab.check_types(kernel.lab(), inputs=list(inputs.values()), output_dtypes=[lab.float16], template=template)
    # Scales and biases have one size: one of them alone in constant memory does not happen.
    found = [f for f in found if f.variant == "as given" and f.message not in BY_REFERENCE]
    assert not found, "\n".join(map(str, found))
