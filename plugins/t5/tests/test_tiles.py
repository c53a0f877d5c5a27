"""Many rows by tile products: every byte, blocks, rows that do not fit, bits that do not depend on company."""

import numpy as np
import pytest
import t5_cases as cases
from t5_cases import Case
from t5_ternary import reference

from backend_core.testing import cpu_kernels as h

AMX = cases.isas().get("amx")
pytestmark = pytest.mark.skipif(AMX is None, reason="this processor has no AMX-INT8 with VNNI and VBMI")
GROUPS = (64, 128)


@pytest.mark.parametrize("group", GROUPS)
def test_every_byte_in_every_place(group):
    """Row m of x is a power of two times unit vectors and a little of all others, so that it fits fixed point and each
    output is a weight and a known rest."""
    size, rng = 13 * group // 64, np.random.default_rng(0)
    for place in range(size):
        digits = 5 if place < size - 1 else (3 if group == 128 else 4)
        codes = np.arange(3**digits)
        trits = rng.integers(0, 3, (len(codes), 2 * group), dtype=np.uint8)
        for i in range(digits):
            trits[:, 5 * place + i] = codes // 3**i % 3
            trits[:, group + 5 * place + i] = codes[::-1] // 3**i % 3
        x = rng.integers(-4, 5, (17, 2 * group)).astype(np.float32)
        x[range(digits), 5 * place + np.arange(digits)] = 64
        w = h.Typed(reference.pack(trits, group), "uint8")
        scales = h.Typed.of(rng.choice([0.25, 0.5, 2.0], (len(codes), 2)), "float16")
        case = Case(h.Typed(x, "float32"), w, scales, group)
        # Whole numbers and powers of two: exact.
        assert np.array_equal(case.run(isa=AMX).raw, x.astype(np.float64) @ case.weights().T)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows,n,k", [(17, 1, 64), (33, 15, 192), (47, 33, 1024), (40, 19, 16384), (200, 70, 4096)])
def test_blocks(rows, n, k, group):
    """Rows and columns that do not fill a tile; more of x than a block holds."""
    case = Case.random(rows, group, rows, n, -(-k // group) * group, ("float32", "float16"), bias=rows % 2 == 1)
    case.check(case.run(isa=AMX, threads=2))


@pytest.mark.parametrize("unfit", [1, 6, 30])
def test_rows_that_do_not_fit(unfit):
    """A few are computed in float32 alone, many make all rows go that way; their neighbours are right."""
    case = Case.random(unfit, 128, 40, 21, 512, ("float32", "float32"), bias=True)
    for m in range(unfit):
        case.x.raw[(7 * m) % 40, 3] = 1e6
    case.check(case.run(isa=AMX, threads=2))
    case.x.raw[5, 1] = np.nan
    y = case.run(isa=AMX).raw
    assert np.isnan(y[5]).all() and np.isfinite(np.delete(y, 5, 0)).all()


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_a_row_has_its_bits_in_any_company(dtype):
    case = Case.random(3, 64, 70, 37, 320, (dtype, "float16"), bias=True)
    whole = case.run(isa=AMX, threads=2).raw
    for first, last in ((0, 17), (3, 36), (50, 70)):
        part = case.run(isa=AMX, x=case.x.view(lambda a, b=first, e=last: a[b:e])).raw
        assert part.tobytes() == whole[first:last].tobytes()


def test_scales_that_are_not_finite():
    case = Case.random(4, 128, 20, 9, 256, ("float32", "float32"))
    case.scales.raw[4, 1] = np.inf
    y = case.run(isa=AMX).raw
    assert not np.isfinite(y[:, 4]).any() and np.isfinite(np.delete(y, 4, 1)).all()
