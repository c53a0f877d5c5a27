"""bfloat16 weights by tile products: what tiles lose is found and made good, and no row sees another."""

import linear_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import FLOATS, Case

from backend_core.testing import cpu_kernels as h

AMX = cases.isas().get("amx_bf16")
pytestmark = pytest.mark.skipif(AMX is None, reason="needs AMX-BF16")
AVX512 = h.AVX2 | h.AVX512


def alone(case):
    """Every row by itself."""
    rows = range(case.x.raw.shape[0])
    return np.concatenate([case.run(isa=AMX, x=case.x.view(lambda a, i=i: a[i : i + 1])).raw for i in rows])


def check_rows(case):
    """Within the bound, and the same bits alone, together, and with other threads."""
    want = alone(case)
    bits = want.view(np.uint16 if want.itemsize == 2 else np.uint32)
    for rows in range(1, case.x.raw.shape[0] + 1):
        got = case.run(isa=AMX, x=case.x.view(lambda a, m=rows: a[:m]), threads=1 + rows % 3)
        assert np.array_equal(got.raw.view(bits.dtype), bits[:rows]), rows
    case.check(h.Typed(want, case.out_dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_tiles_are_used(dtype):
    """Tiles add in another order than vectors do; without AMX the old bits stay."""
    case = Case.random(0, "bfloat16", 3, 40, 600, dtype)
    case.x = h.Typed.of(case.x.values, dtype)
    tiles, vectors = case.run(isa=AMX), case.run(isa=AVX512)
    if dtype != "bfloat16":  # else results are rounded to eight bits
        assert not np.array_equal(tiles.raw, vectors.raw)
    for form in ("float16", "float32"):
        other = Case.random(0, form, 3, 40, 600, dtype)
        assert np.array_equal(other.run(isa=AMX).raw, other.run(isa=AVX512).raw)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 63, 1000, 1023, 1024, 1025, 2080, 4200])
def test_depths_and_rows(k, dtype):
    check_rows(Case.random(k, "bfloat16", 17, 1 + k % 37, k, dtype, "float32"))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 150), st.integers(1, 70), st.integers(1, 1200), st.sampled_from(FLOATS), st.integers(1, 3),
    st.integers(-140, 120), st.integers(-120, 100), st.integers(0, 250),
)  # fmt: skip
def test_any_size_of_numbers(rows, n, k, dtype, threads, x_exponent, w_exponent, spread):
    """x and weights anywhere in their range, rows of x of numbers of very different size."""
    rng = np.random.default_rng([rows, n, k])
    x = np.ldexp(rng.standard_normal((rows, k)), x_exponent - rng.integers(0, spread + 1, (rows, k)))
    w = np.ldexp(rng.standard_normal((n, k)), w_exponent)
    with np.errstate(over="ignore"):
        case = Case("bfloat16", h.Typed.of(x, dtype), h.Typed.of(w, "bfloat16"))
    if not np.isfinite(case.x.values).all() or x_exponent + w_exponent > 100:
        return
    case.check(case.run(isa=AMX, threads=threads))


def test_small_weights():
    """Subnormal weights, all of them, some of them, and one among zeros."""
    rng = np.random.default_rng(1)
    w = np.zeros((40, 70))
    w[:20] = np.ldexp(rng.integers(-127, 128, (20, 70)), -133)
    w[10:20, ::3] = 1.0
    w[20, 5], w[21, 69] = 2.0**-133, -(2.0**-127)
    w[22:] = np.ldexp(rng.standard_normal((18, 70)), rng.integers(-130, -110, (18, 70)))
    for size in (2.0**100, 2.0**30):  # products are not subnormal
        for dtype in ("float32", "bfloat16"):
            x = h.Typed.of(rng.standard_normal((6, 70)) * size, dtype)
            check_rows(Case("bfloat16", x, h.Typed.of(w, "bfloat16")))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_that_do_not_fit(dtype):
    """Rows of zeros, of subnormals, of numbers too far apart, with one infinity or NaN, beside sound ones."""
    case = Case.random(3, "bfloat16", 9, 37, 100, dtype)
    clean = alone(case)
    tiny = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype]
    large = 65504.0 if dtype == "float16" else 2.0**100
    x = case.x.values.copy()
    x[1] = 0.0
    x[2] = tiny * np.arange(-50, 50)
    x[3, ::2] *= tiny
    x[4, 50:], x[4, 0] = tiny, large
    x[5, 99] = np.inf
    x[6, 98] = np.nan
    case.x = h.Typed.of(x, dtype)
    got = alone(case)
    for rows in range(1, 10):
        part = case.run(isa=AMX, x=case.x.view(lambda a, m=rows: a[:m])).raw
        assert np.array_equal(part.view(np.uint8), got[:rows].view(np.uint8)), rows
    assert np.array_equal(got[[0, 7, 8]], clean[[0, 7, 8]])
    values = h.Typed(got, case.out_dtype).values
    assert (values[1] == 0).all() and np.isinf(values[5]).all() and np.isnan(values[6]).all()
    assert np.array_equal(np.sign(values[5]), np.sign(case.w.values[:, 99]))
    sound = [0, 1, 2, 3, 4, 7, 8]
    Case("bfloat16", case.x.view(lambda a: a[sound]), case.w).check(h.Typed(got[sound], case.out_dtype))


def test_infinite_weights_and_sums():
    """Infinity times a number whose later pieces are zero is infinity; a sum too large only on the way is not."""
    w = np.zeros((20, 64))
    w[0, 3], w[1, 4], w[2, 5] = np.inf, -np.inf, np.nan
    w[3, 0], w[3, 32] = 1.5 * 2.0**127, -(2.0**127)
    x = np.ones((5, 64))
    x[1] = 2.0**-10
    x[2] = 3e38
    x[3] = -0.3
    x[4, 3] = 0.0
    for dtype in ("float32", "bfloat16"):
        case = Case("bfloat16", h.Typed.of(x, dtype), h.Typed.of(w, "bfloat16"))
        y = h.Typed(alone(case), case.out_dtype).values
        assert np.array_equal(y[:4, 0], [np.inf, np.inf, np.inf, -np.inf]) and np.isnan(y[4, 0])
        assert np.array_equal(y[:, 1], [-np.inf, -np.inf, -np.inf, np.inf, -np.inf])
        assert np.isnan(y[:, 2]).all() and (y[:, 4:] == 0).all()
        assert y[0, 3] == 2.0**126 and y[1, 3] == 2.0**116
        together = case.run(isa=AMX)
        assert np.array_equal(together.raw.view(np.uint8), alone(case).view(np.uint8))


@pytest.mark.parametrize("k", [1024, 4096, 17408])
def test_equal_terms(k):
    """All terms equal: each addition of a chain rounds the same way."""
    for value in (1.0 + 2.0**-23, 1.3333334, 1.7):
        x = h.Typed.of(np.full((2, k), value), "float32")
        case = Case("bfloat16", x, h.Typed.of(np.full((3, k), 1.6640625), "bfloat16"))
        case.check(case.run(isa=AMX))


@pytest.mark.parametrize("rows", [1, 5, 6, 16, 40])
def test_threads_do_not_change_bits(rows):
    case = Case.random(rows, "bfloat16", rows, 333, 1111)
    one = case.run(isa=AMX)
    for threads in range(2, 9):
        assert np.array_equal(case.run(isa=AMX, threads=threads).raw, one.raw)
    assert np.array_equal(one.raw[: min(rows, 16)], alone(case)[:16])
