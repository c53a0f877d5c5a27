"""The GPU kernels in the lab: results, bits, faults and traffic of every group, dtype, number of rows and edge."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from t5_gpu import KERNELS, excess, problem, run
from t5_ternary import reference
from t5_ternary.layout import packed_columns

from backend_core.simt import arguments
from backend_core.testing import lab
from backend_core.testing.lab_device import typed, values

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]

QMV, MMA = KERNELS["t5_qmv"], KERNELS["t5_mma"]
FLOATS = ("float32", "float16", "bfloat16")
BOTH = pytest.mark.parametrize("kernel", [QMV, MMA], ids=lambda k: k.name)


def right(kernel, p, rows, as_rows: int = 0):
    """The checked result of the first rows of a problem."""
    part = p.part(slice(0, rows))
    # As on CUDA, where launches may ask for more threadgroup memory than Metal has.
    result = run(kernel, part, as_rows, device="cuda")
    result.check(("threadgroup-memory",))
    assert excess(part, result.outputs[0]) <= 1.0
    return result


# Every group and dtype; number of columns and groups and the bias vary along. 8 groups of 128 and 16 of 64 end at a
# multiple of 16 bytes, others do not.
FORMATS = [
    (kernel, group, dtype, groups)
    for kernel, group, dtype, groups in itertools.product((QMV, MMA), (64, 128), FLOATS, (1, 9, 16))
    if not kernel.eligible(group_size=group, x_dtype=dtype, scales_dtype=dtype, k=group)
]


@pytest.mark.parametrize(
    ("i", "kernel", "group", "dtype", "groups"),
    [pytest.param(i, *c, id=f"{c[0].name}-g{c[1]}-{c[2]}-{c[3]}") for i, c in enumerate(FORMATS)],
)
def test_results(i, kernel, group, dtype, groups) -> None:
    n = (7, 24, 40, 16, 33)[i % 5]
    rows = (1, 2, 8, 16, 5, 17, 3)[i % 7]
    result = right(kernel, problem(group, dtype, n, group * groups, rows, bias=i % 3 == 0, seed=i), rows)
    if i % 3:
        assert result.report.buffers["bias"].bytes_read == 0


@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
def test_scales_of_another_dtype(scales) -> None:
    result = right(QMV, problem(128, "float16", 24, 384, 2, scales=scales), 2)
    assert result.outputs[0].dtype == np.float32
    assert MMA.eligible(group_size=128, x_dtype="float16", scales_dtype=scales, k=384)


@pytest.mark.parametrize(
    ("kernel", "dtype", "group"),
    [(QMV, "float32", 64), (QMV, "float16", 128), (MMA, "float16", 128), (MMA, "bfloat16", 64)],
    ids=lambda v: getattr(v, "name", v),
)  # fmt: skip
def test_any_number_of_rows_gives_each_the_bits_it_has_alone(kernel, dtype, group) -> None:
    p = problem(group, dtype, 24, 640, 17)
    alone = [right(kernel, p.part(slice(i, i + 1)), 1).outputs[0][0].tobytes() for i in range(17)]
    for rows in range(2, 18):
        y = right(kernel, p, rows).outputs[0]
        assert [y[i].tobytes() for i in range(rows)] == alone[:rows], f"{rows} rows"
    # Kernels for more rows than there are.
    for rows, as_rows in ((1, 4), (3, 8), (5, 16), (9, 16)):
        y = right(kernel, p, rows, as_rows).outputs[0]
        assert [y[i].tobytes() for i in range(rows)] == alone[:rows], f"{rows} as {as_rows} rows"


@BOTH
@pytest.mark.parametrize("group", [64, 128])
def test_every_byte_is_five_trits(kernel, group) -> None:
    # Row b of the weights has byte b in all places but the last of each group; x is one of the first five unit vectors
    # of a byte, so that results are single trits.
    size = 13 * group // 64
    w = np.full((243, size), 121, np.uint8)
    at = (size // 2) | 1
    w[:, at] = np.arange(243)
    p = problem(group, "float16", 243, group, 5)
    x = np.zeros((5, group))
    x[range(5), range(5 * at, 5 * at + 5)] = 1.0
    p.w, p.x = w, typed(x, "float16")
    p.scales = typed(np.full((243, 1), 0.75), "float16")
    trits = np.arange(243)[:, None] // 3 ** np.arange(5) % 3 - 1
    np.testing.assert_array_equal(values(run(kernel, p).check().outputs[0]), 0.75 * trits.T)


@BOTH
def test_weights_of_zero_add_nothing(kernel) -> None:
    p = problem(128, "float16", 16, 1152, 3, zeros=1.0)
    assert not values(run(kernel, p).check().outputs[0]).any()
    # One weight in each row: nothing of the others' activations is left over.
    trits = np.ones((16, 1152), np.uint8)
    trits[np.arange(16), np.arange(16) * 70] = 2
    p.w = reference.pack(trits, 128)
    y = run(kernel, p).check().outputs[0]
    assert excess(p, y) <= 1.0


@BOTH
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("group", [64, 128])
def test_each_byte_of_the_weights_is_read_once_for_all_rows(kernel, group, several) -> None:
    n, k, rows = 64, 1024, (4 if kernel is MMA else 8) if several else 1
    buffers = right(kernel, problem(group, "float16", n, k, rows), rows).report.buffers
    assert buffers["w"].bytes_read == buffers["w"].unique_read == n * packed_columns(k, group)
    assert buffers["scales"].unique_read == n * k // group * 2
    # There are no biases, and what stands for a bias that is not there is not read.
    assert "biases" not in buffers and buffers["bias"].bytes_read == 0
    assert buffers["y"].bytes_written == buffers["y"].unique_written == rows * n * 2


@pytest.mark.parametrize("k", [5120, 6144, 8192, 17408])
def test_no_lane_idles(k) -> None:
    """By group, K = 5120 would leave 24 of 64 turns of lanes without work."""
    for group in (64, 128):
        # Matrix-vector: turns of 32 lanes with one run of bytes each, in units of the lanes' work.
        columns, run_ = packed_columns(k, group), group // 64
        assert columns / (32 * run_ * -(-columns // (32 * run_))) > 0.95
        # Matrix: octets, of thirteen steps of four lanes with a word each.
        assert columns == 13 * 4 * 4 * -(-k // 1024)


@pytest.mark.parametrize("k", [5120, 17408])
def test_loads_are_those_of_full_turns(k) -> None:
    """Counted: each turn of 32 lanes loads two bytes each, of one line or, where 64 bytes cross its end, of two."""
    read = right(QMV, problem(128, "float16", 16, k, 1), 1).report.buffers["w"]
    loads = 16 * -(-packed_columns(k, 128) // 64) * 2
    assert loads <= read.read_transactions <= 1.5 * loads


@BOTH
def test_threadgroup_memory_is_what_the_registry_says(kernel) -> None:
    for rows, group in itertools.product((1, 4, 16), (64, 128)):
        p = problem(group, "float16", 40, 1152, rows)
        launch = kernel.launch(**{**p.facts, "rows": rows})
        # The lab counts what alignment adds.
        assert 0 <= run(kernel, p).report.threadgroup_bytes - kernel.threadgroup_bytes(launch) < 64
        assert kernel.threadgroup_bytes(launch) <= 32768


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_rows_have_room_or_are_refused(dtype) -> None:
    for k, device in itertools.product((128, 5120, 17408, 65536, 131072), ("metal", "cuda")):
        facts = {"n": 64, "k": k, "group_size": 128, "x_dtype": dtype, "scales_dtype": dtype, "out_dtype": dtype,
                 "device": device}  # fmt: skip
        if MMA.eligible(**facts):
            assert k > 4096
            continue
        for rows in (1, 3, 8, 16):
            MMA.launch(rows=rows, **facts)  # raises where it does not fit
    assert not MMA.eligible(**{**facts, "k": 17408, "device": "cuda"})


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_stays_in_its_row(kernel, value) -> None:
    p = problem(64, "float16", 24, 320, 5)
    clean = run(kernel, p).outputs[0]
    x = np.array(values(p.x))
    x[2, 17] = value
    p.x = typed(x, "float16")
    y = run(kernel, p).check().outputs[0]
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


@BOTH
def test_large_activations_and_tiny_scales_do_not_overflow(kernel) -> None:
    p = problem(128, "float16", 16, 384, 3)
    p.x = typed(values(p.x) * 12000, "float16")
    p.scales = typed(values(p.scales) * 1e-5, "float16")
    y = run(kernel, p).check().outputs[0]
    assert excess(p, y) <= 1.0


@pytest.mark.parametrize(
    ("kernel", "facts"),
    [
        (QMV, {"group_size": 32}),
        (QMV, {"k": 100}),
        (QMV, {"x_dtype": "float64"}),
        (MMA, {"group_size": 32}),
        (MMA, {"x_dtype": "float32"}),
        (MMA, {"k": 1 << 17}),
    ],
)
def test_what_a_kernel_is_not_made_for_is_refused_before_launch(kernel, facts) -> None:
    p = problem(64, "float16", 24, 320, 1)
    with pytest.raises(ValueError, match=kernel.name):
        kernel.launch(**{**p.facts, "rows": 1, **facts})


@BOTH
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("n", "k", "small"), [(24, 384, ()), (7, 128, ("scales", "bias"))])
def test_types_hold_with_small_inputs_in_constant_memory(kernel, rows, n, k, small) -> None:
    try:
        lab.find_type_checker()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
    p = problem(128, "float16", n, k, rows, bias=True)
    inputs = dict(zip(kernel.inputs, (p.x, p.w, p.scales, p.bias), strict=True))
    assert {name for name, a in inputs.items() if a.size < 8} == set(small)
    template = arguments(kernel.launch(**{**p.facts, "rows": rows}), lab)["template"]
    found = lab.check_types(kernel.lab(), inputs=list(inputs.values()), output_dtypes=[lab.float16], template=template)
    found = [f for f in found if f.variant == "as given"]
    assert not found, "\n".join(map(str, found))
