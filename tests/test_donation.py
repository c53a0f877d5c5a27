"""Bound kernels with several outputs, and inputs that become outputs."""

from __future__ import annotations

import pathlib
import time

import numpy as np
import pytest

pytest.importorskip("mlx.core")
import mlx.core as mx
from test_cpu_kernel import CC, compile_kernel

from backend_core import native
from backend_core.cpu_kernel import cpu_kernel, dim, dims, like, result_type

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.status().reason or "native"),
    pytest.mark.skipif(CC is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = pathlib.Path(__file__).parent / "kernels" / "basic.c"
    return compile_kernel(source, tmp_path_factory.mktemp("kernels") / "basic.so")


def same(y, expected):
    np.testing.assert_array_equal(np.array(y), np.asarray(expected))


# Several outputs


def test_bound_with_several_outputs(library):
    b = mx.array([3.0, 5.0])
    both = cpu_kernel(library, "sum_difference").bind(
        [b], output_shapes=[like(0), like(0)], output_dtypes=[like(0), result_type(0, 1)]
    )
    result = both(mx.array([1.0, 2.0]))
    assert type(result) is tuple and len(result) == 2
    same(result[1], [-2, -3])
    same(result[0], [4, 7])
    (one,) = cpu_kernel(library, "gather").bind(output_shapes=[like(0)], output_dtypes=[like(0)])(b)
    same(one, [3, 5])


def test_bound_with_several_outputs_compiles(library):
    both = cpu_kernel(library, "sum_difference").bind(output_shapes=[like(0)] * 2, output_dtypes=[like(0)] * 2)
    f = mx.compile(lambda x, y: both(x, y)[0] * both(x, y)[1], shapeless=True)
    for n in (3, 5):
        x = mx.arange(n, dtype=mx.float32)
        same(f(x, x + 1), (2 * np.arange(n) + 1) * -1.0)


def test_a_bound_call_needs_one_description(library):
    kernel = cpu_kernel(library, "sum_difference")
    for wrong in (
        {},
        {"output_shape": like(0)},
        {"output_shapes": [like(0)]},
        {"output_shape": like(0), "output_dtype": like(0), "output_shapes": [like(0)], "output_dtypes": [like(0)]},
    ):
        with pytest.raises(TypeError if len(wrong) != 1 or "output_shapes" in wrong else (TypeError, ValueError)):
            kernel.bind(**wrong)
    with pytest.raises(ValueError, match="2 output shapes and 1 output dtypes"):
        kernel.bind(output_shapes=[like(0)] * 2, output_dtypes=[like(0)])


# Donation


def cache_write(library):
    return cpu_kernel(library, "put_row").bind(output_shape=like(0), output_dtype=like(0), params=[0], donate={0: 0})


def address(a):
    return np.asarray(memoryview(a)).ctypes.data


def test_a_donated_input_is_changed_in_place(library):
    write = cache_write(library)
    buffer = mx.zeros((6, 64)) + 1
    mx.eval(buffer)
    where = address(buffer)
    for i in (1, 4):
        row = mx.full((1, 64), float(i))
        mx.eval(row)
        buffer = write(buffer, row, params=[i])
        mx.eval(buffer)
        assert address(buffer) == where
    want = np.ones((6, 64))
    want[1], want[4] = 1, 4
    same(buffer, want)


def test_an_input_that_others_hold_is_copied(library):
    write = cache_write(library)
    buffer = mx.zeros((4, 3)) + 1
    mx.eval(buffer)
    row = mx.array([[7.0, 8.0, 9.0]])
    once = write(buffer, row, params=[2])
    twice = write(buffer, row, params=[0])
    view = buffer[1:3]
    mx.eval(once, twice)
    same(buffer, np.ones((4, 3)))
    same(view, np.ones((2, 3)))
    want = np.ones((4, 3))
    want[2] = [7, 8, 9]
    same(once, want)
    del once, buffer
    # A view keeps the memory, though no array of that shape is left.
    later = write(twice, row, params=[3])
    kept = twice[:1]
    mx.eval(kept)
    del twice
    mx.eval(later)
    same(kept, [[7, 8, 9]])
    same(later, [[7, 8, 9], [1, 1, 1], [1, 1, 1], [7, 8, 9]])


def test_an_input_that_is_not_contiguous_is_copied(library):
    write = cache_write(library)
    base = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    out = write(mx.transpose(base), mx.zeros((1, 3)), params=[1])
    want = np.arange(12).reshape(3, 4).T.copy()
    want[1] = 0
    same(out, want)
    part = write(base[1:], mx.ones((1, 4)), params=[0])
    same(part, [[1, 1, 1, 1], [8, 9, 10, 11]])
    same(base, np.arange(12).reshape(3, 4))


def test_the_same_input_twice_is_copied(library):
    x = mx.zeros((1, 3)) + 2
    same(cache_write(library)(x, x, params=[0]), [[2, 2, 2]])


def test_two_buffers_are_donated_at_once(library):
    write = cpu_kernel(library, "put_rows").bind(
        output_shapes=[like(0), like(1)], output_dtypes=[like(0), like(1)], donate={0: 0, 1: 1}
    )
    a, b = mx.zeros((3, 128)) + 1, mx.zeros((3, 128)) + 2
    mx.eval(a, b)
    places = address(a), address(b)
    for i in range(3):
        a, b = write(a, b, mx.full((1, 128), i + 10.0), mx.full((1, 128), i + 20.0), params=[i])
        mx.eval(a if i == 1 else b)  # either output evaluates both
        assert (address(a), address(b)) == places
    same(a, np.repeat([[10.0], [11.0], [12.0]], 128, 1))
    same(b, np.repeat([[20.0], [21.0], [22.0]], 128, 1))
    # One of the two is held: that one is copied, the other one is not.
    held = a
    a, b = write(a, b, mx.zeros((1, 128)), mx.zeros((1, 128)), params=[0])
    mx.eval(a, b)
    assert address(a) != places[0] and address(b) == places[1]
    same(held[0], np.full(128, 10.0))


def test_donation_in_one_graph_of_several_writes(library):
    write = cache_write(library)
    x = mx.zeros((5, 7)) + 3
    for i in range(5):
        x = write(x, mx.full((1, 7), float(i)), params=[i])
    same(x, np.repeat(np.arange(5.0)[:, None], 7, 1))


def test_donation_under_compile(library):
    write = cache_write(library)
    f = mx.compile(lambda x, row: write(x + 1, row) * 2)
    for _ in range(2):
        same(f(mx.zeros((2, 2)), mx.full((1, 2), 5.0)), [[10, 10], [2, 2]])
    g = mx.compile(lambda x, row: write(x, row))
    x = mx.zeros((2, 2)) + 1
    mx.eval(x)
    same(g(x, mx.full((1, 2), 5.0)), [[5, 5], [1, 1]])
    same(x, [[1, 1], [1, 1]])


def test_what_cannot_be_donated(library):
    kernel = cpu_kernel(library, "put_row")
    with pytest.raises(ValueError, match="no output 1"):
        kernel.bind(output_shape=like(0), output_dtype=like(0), donate={1: 0})
    with pytest.raises(ValueError, match="one output only"):
        kernel.bind(output_shapes=[like(0)] * 2, output_dtypes=[like(0)] * 2, donate={0: 0, 1: 0})
    wrong = kernel.bind(output_shape=(dims(0, 0, -1), dim(1, 0)), output_dtype=like(0), donate={0: 0})
    with pytest.raises(ValueError, match="shape and dtype of the donated input 0"):
        wrong(mx.zeros((2, 2)), mx.zeros((1, 2)))
    absent = kernel.bind(output_shape=like(0), output_dtype=like(0), donate={0: 3})
    with pytest.raises(ValueError, match="no input 3"):
        absent(mx.zeros((2, 2)))


def test_calls_donate_too(library):
    kernel = cpu_kernel(library, "put_row")
    x = mx.zeros((2, 3)) + 1
    mx.eval(x)
    for donate in ({0: 0}, {0: 0}):
        (y,) = kernel(inputs=[x, mx.zeros((1, 3))], output_shapes=[like(0)], output_dtypes=[like(0)], params=[1],
                      donate=donate)  # fmt: skip
        same(y, [[1, 1, 1], [0, 0, 0]])
    same(x, np.ones((2, 3)))


def test_an_empty_donation(library):
    same(cache_write(library)(mx.zeros((0, 3)), mx.zeros((1, 3))), np.zeros((0, 3)))


def test_an_async_chain_ends_right(library):
    write = cache_write(library)
    x = mx.zeros((64, 256))
    for i in range(64):
        x = write(x, mx.full((1, 256), float(i)), params=[i])
        mx.async_eval(x)
    time.sleep(0)
    same(x, np.repeat(np.arange(64.0)[:, None], 256, 1))
