"""Programs: several kernels as one primitive."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

pytest.importorskip("mlx.core")
import mlx.core as mx
from test_cpu_kernel import CC, compile_kernel

from backend_core import native
from backend_core.cpu_kernel import cpu_kernel, dims, like
from backend_core.program import Program, is_bound

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.status().reason or "native"),
    pytest.mark.skipif(CC is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = pathlib.Path(__file__).parent / "kernels" / "basic.c"
    return compile_kernel(source, tmp_path_factory.mktemp("kernels") / "basic.so")


def matmul(library, w, params=(1, 0.0)):
    kernel = cpu_kernel(library, "matmul")
    return kernel.bind([w], output_shape=like(0, last=w.shape[0]), output_dtype=like(0), params=list(params))


def gather(library):
    return cpu_kernel(library, "gather", ensure_row_contiguous=False).bind(output_shape=like(0), output_dtype=like(0))


def weight(n, k, seed=0):
    return mx.array(np.random.default_rng(seed).integers(-3, 4, (n, k)).astype(np.float32))


def x_of(*shape, seed=9):
    return mx.array(np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32))


def same(y, expected):
    np.testing.assert_array_equal(np.array(y), np.asarray(expected))


def test_siblings_and_a_chain(library):
    a, b, c = weight(6, 4), weight(6, 4, 1), weight(3, 6, 2)
    p = Program("both", 1)
    one, two = p.call(matmul(library, a), p.input(0)), p.call(matmul(library, b), p.input(0))
    three = p.call(matmul(library, c), two)
    run = p.build(one, three)
    for shape in ((1, 4), (5, 4), (2, 3, 4), (1, 1, 4)):
        x = x_of(*shape)
        y, z = run(x)
        same(y, np.array(x) @ np.array(a).T)
        same(z, np.array(x) @ np.array(b).T @ np.array(c).T)
    assert "3 kernels" in repr(run) and "both" in repr(run)


def test_one_output_is_an_array_and_one_node(library):
    p = Program("one", 1)
    run = p.build(p.call(matmul(library, weight(4, 4)), p.call(matmul(library, weight(4, 4, 1)), p.input(0))))
    y = run(x_of(2, 4))
    assert isinstance(y, mx.array)
    same(y, np.array(x_of(2, 4)) @ np.array(weight(4, 4, 1)).T @ np.array(weight(4, 4)).T)


@pytest.mark.parametrize("shape", [(1, 1, 12), (2, 5, 12), (0, 2, 12)])
def test_parts_of_a_result(library, shape):
    x = x_of(*shape)
    p = Program("parts", 1)
    product = p.call(matmul(library, weight(12, 12)), p.input(0))
    pieces = [product.part(0, 4), product.part(4, 10).split(2).swap(), product.part(10, 12), p.input(0).part(3, 6)]
    run = p.build(*(p.call(gather(library), piece) for piece in pieces))
    whole, out = np.array(x) @ np.array(weight(12, 12)).T, run(x)
    same(out[0], whole[..., :4])
    same(out[1], whole[..., 4:10].reshape(*shape[:2], 2, 3).transpose(0, 2, 1, 3))
    same(out[2], whole[..., 10:])
    same(out[3], np.array(x)[..., 3:6])


def test_parts_that_are_not_there(library):
    p = Program("parts", 1)
    product = p.call(matmul(library, weight(12, 12)), p.input(0))
    with pytest.raises(ValueError, match="part"):
        p.build(product.part(0, 4))
    for begin, end in ((0, 13), (5, 4)):
        run = Program("parts", 1)
        run = run.build(run.call(gather(library), run.input(0).part(begin, end)))
        with pytest.raises(ValueError, match="no part"):
            run(x_of(1, 12))
    with pytest.raises(ValueError, match="negative"):
        p.build(p.call(gather(library), product.part(-1, 4)))


@pytest.mark.parametrize("shape", [(1, 1, 12), (2, 5, 12), (1, 3, 12), (0, 2, 12)])
def test_views(library, shape):
    x = x_of(*shape)
    p = Program("heads", 1)
    product = p.call(matmul(library, weight(12, 12)), p.input(0))
    heads = p.call(gather(library), product.split(3).swap())
    back = p.call(gather(library), heads.swap().merge())
    run = p.build(heads, product.split(3).swap(), back, p.input(0).split(2), product)
    want = np.array(x) @ np.array(weight(12, 12)).T
    split = want.reshape(*shape[:2], 3, 4).transpose(0, 2, 1, 3)
    y, view, merged, plain, whole = run(x)
    same(whole, want)
    same(y, split)
    same(view, split)
    same(merged, want)
    same(plain, np.array(x).reshape(*shape[:2], 2, 6))
    # Views of outputs are arrays like others.
    same(view + 1, split + 1)
    same(mx.contiguous(view)[:, 1:], split[:, 1:])
    same(view.swapaxes(1, 2).reshape(shape), want)


def test_views_of_strided_inputs(library):
    p = Program("strided", 1)
    run = p.build(p.call(gather(library), p.input(0).swap().merge()), p.input(0).swap())
    whole = x_of(2, 6, 5, 8)
    for x in (whole[:, ::2], whole[..., 1:7:2], whole[:, :, 2:3], mx.transpose(whole, (0, 2, 1, 3)), whole[:, :1]):
        want = np.array(x).transpose(0, 2, 1, 3)
        y, view = run(x)
        same(view, want)
        same(y, want.reshape(*want.shape[:2], -1))


def test_one_answer_however_inputs_lie(library):
    """Calls are worked out ahead for inputs that lie row by row, and in every run for others: both are the same."""
    a, b = weight(6, 4), weight(6, 4, 1)
    p = Program("ways", 2)
    one = p.call(matmul(library, a), p.input(0))
    two = p.call(matmul(library, b), p.input(1).part(1, 5))
    run = p.build(one, two.split(2), p.call(gather(library), one.split(3).swap()))
    for n in (1, 3):
        x, z = x_of(2, n, 4), x_of(2, n, 6, seed=5)
        strided = [mx.array(np.array(v).transpose(2, 0, 1).copy()).transpose(1, 2, 0) for v in (x, z)]
        mx.eval(strided)
        for inputs in ((x, z), (strided[0], z), (x, strided[1]), strided):
            first, second, third = run(*inputs)
            wanted = np.array(x) @ np.array(a).T
            same(first, wanted)
            same(second, (np.array(z)[..., 1:5] @ np.array(b).T).reshape(2, n, 2, 3))
            same(third, wanted.reshape(2, n, 3, 2).swapaxes(1, 2))


def test_parameters_of_the_call(library):
    w = weight(4, 4)
    p = Program("params", 1)
    one = p.call(matmul(library, w, (5, 1.0)), p.input(0), call_params=True)
    two = p.call(matmul(library, w, (5, 1.0)), p.input(0))
    run = p.build(one, two)
    x = x_of(2, 4)
    y, z = run(x, params=[2, 0.5])
    same(y, 2 * (np.array(x) @ np.array(w).T) + 0.5)
    same(z, 5 * (np.array(x) @ np.array(w).T) + 1)


def test_shapes_are_remembered_and_forgotten(library):
    p = Program("shapes", 1)
    run = p.build(p.call(matmul(library, weight(3, 4)), p.input(0)))
    for rows in [*range(1, 40), 1, 2]:
        same(run(x_of(rows, 4)), np.array(x_of(rows, 4)) @ np.array(weight(3, 4)).T)


def test_outputs_outlive_and_survive(library):
    p = Program("alive", 1)
    product = p.call(matmul(library, weight(8, 8)), p.input(0))
    run = p.build(product.split(2).swap(), p.call(matmul(library, weight(8, 8, 1)), product))
    x = x_of(1, 64, 8)
    view, other = run(x)
    del x
    mx.eval(other)
    del other
    mx.clear_cache()
    junk = [mx.zeros((1, 64, 8)) + i for i in range(20)]
    mx.eval(junk)
    same(view, (np.array(x_of(1, 64, 8)) @ np.array(weight(8, 8)).T).reshape(1, 64, 2, 4).transpose(0, 2, 1, 3))


def test_donation_inside_a_program_copies(library):
    write = cpu_kernel(library, "put_row").bind(output_shape=like(0), output_dtype=like(0), params=[1], donate={0: 0})
    p = Program("write", 2)
    run = p.build(p.call(write, p.input(0), p.input(1)))
    x = mx.zeros((2, 3)) + 1
    mx.eval(x)
    same(run(x, mx.zeros((1, 3))), [[1, 1, 1], [0, 0, 0]])
    same(x, np.ones((2, 3)))


def put_rows(library):
    return cpu_kernel(library, "put_rows").bind(
        output_shapes=[like(0), like(1)], output_dtypes=[like(0), like(1)], params=[0], donate={0: 0, 1: 1}
    )


def test_donation_through_a_program(library):
    p = Program("writes", 4)
    first = p.call(put_rows(library), *(p.input(i) for i in range(4)), call_params=True)
    run = p.build(p.call(gather(library), first), first, first.other(1))
    address = lambda a: np.asarray(memoryview(a)).ctypes.data  # noqa: E731
    a, b = mx.zeros((3, 64)) + 1, mx.zeros((3, 64)) + 2
    mx.eval(a, b)
    places = address(a), address(b)
    for i in range(3):
        copy, a, b = run(a, b, mx.full((1, 64), i + 5.0), mx.full((1, 64), i + 8.0), params=[i])
        mx.eval(copy)
        assert (address(a), address(b)) == places
        same(copy, np.array(a))
    same(b[:, 0], [8, 9, 10])
    held = a
    _, a, b = run(a, b, mx.zeros((1, 64)), mx.zeros((1, 64)), params=[0])
    mx.eval(a)
    assert address(a) != places[0] and address(b) == places[1]
    same(held[:, 0], [5, 6, 7])


def test_an_input_that_is_read_again_is_not_donated(library):
    p = Program("reads", 4)
    first = p.call(put_rows(library), *(p.input(i) for i in range(4)))
    run = p.build(first, first.other(1), p.call(gather(library), p.input(0)))
    a, b = mx.zeros((2, 4)) + 1, mx.zeros((2, 4)) + 2
    mx.eval(a, b)
    new, _, old = run(a, b, mx.zeros((1, 4)), mx.zeros((1, 4)), params=[])
    del a, b
    same(old, np.ones((2, 4)))
    same(new, [[0] * 4, [1] * 4])


def test_limit(library):
    p = Program("limit", 1)
    w = mx.array([[1.0] * 3])
    join = cpu_kernel(library, "describe").bind(output_shape=(11,), output_dtype=mx.int64)
    run = p.build(p.call(join, p.input(0).limit(1)))
    for n in (1, 2, 5, 9):
        assert np.array(run(mx.zeros((1, 2, 5, 3)), params=[0, n]))[5] == min(n, 5)
    with pytest.raises(ValueError, match="limited"):
        p.build(p.call(matmul(library, w), p.input(0)).limit(0))
    q = Program("flat", 1)
    with pytest.raises(ValueError, match="limit"):
        q.build(q.call(join, q.input(0).limit(0)))(mx.zeros((2, 3)))


def test_what_is_wrong_is_said(library):
    bound = matmul(library, weight(4, 4))
    assert is_bound(bound) and not is_bound(lambda x: x) and not is_bound(None)
    p = Program("wrong", 1)
    value = p.call(bound, p.input(0))
    run = p.build(value)
    for args in ((), (x_of(1, 4), x_of(1, 4)), (1.0,)):
        with pytest.raises(TypeError, match=r"\[wrong\]"):
            run(*args)
    with pytest.raises(TypeError, match="params"):
        run(x_of(1, 4), stream=mx.cpu)
    with pytest.raises(ValueError, match="the same"):
        p.build(value, value)
    with pytest.raises(ValueError, match="at least one"):
        p.build()
    with pytest.raises(ValueError, match="not there"):
        p.build(p.input(1))
    with pytest.raises(ValueError, match="merged"):
        p.build(value.merge())
    q = Program("python", 1)
    q.call(lambda x: x, q.input(0))
    with pytest.raises(TypeError, match="bound kernels"):
        q.build(q.input(0))
    r = Program("odd", 1)
    odd = r.build(r.call(bound, r.input(0)).split(3))
    with pytest.raises(ValueError, match="split into 3"):
        odd(x_of(1, 4))
    s = Program("flat", 1)
    with pytest.raises(ValueError, match="exchange"):
        s.build(s.call(bound, s.input(0)).swap())(x_of(1, 4))


def test_a_failing_kernel_gives_nan(library):
    bad = cpu_kernel(library, "matmul").bind([weight(4, 4)], output_shape=like(0), output_dtype=like(0))  # no params
    p = Program("bad", 1)
    run = p.build(p.call(matmul(library, weight(4, 4)), p.call(bad, p.input(0))))
    assert np.isnan(np.array(run(x_of(2, 4)))).all()
    assert any("two parameters" in e for e in native.take_errors())


def test_neighbours_run_together(library):
    """Products, a sum with temporary memory, a copy without a loop, a failure; then another round."""
    total = cpu_kernel(library, "total").bind(output_shape=(1,), output_dtype=like(0))
    fails = cpu_kernel(library, "fails").bind(output_shape=like(0), output_dtype=like(0))
    weights = [weight(n, 40, n) for n in (40, 60, 50, 3, 30)]
    before = native.get().threads()
    x = x_of(9, 40)
    want = np.array(x) @ np.array(weights[0]).T
    try:
        for threads in (1, 2, 3, 5):
            native.get().set_threads(threads)
            p = Program("together", 1)
            first = p.call(matmul(library, weights[0]), p.input(0))
            many = [p.call(matmul(library, w), first) for w in weights[1:3]]
            many += [p.call(total, first), p.call(gather(library), first), p.call(fails, first)]
            many += [p.call(matmul(library, w), p.input(0)) for w in weights[3:]]
            run = p.build(*(p.call(gather(library), value) for value in many))
            for _ in range(20):
                out = [np.array(y) for y in run(x)]
                for y, w in zip(out[:2], weights[1:3], strict=True):
                    same(y, want @ np.array(w).T)
                same(out[2], [want.sum(dtype=np.float64)])
                same(out[3], want)
                assert np.isnan(out[4]).all()
                for y, w in zip(out[5:], weights[3:], strict=True):
                    same(y, np.array(x) @ np.array(w).T)
                assert any("the first reason" in e for e in native.take_errors())
    finally:
        native.get().set_threads(before)


def test_what_neighbours_read_stays_until_all_are_done(library):
    p = Program("memory", 2)
    first = p.call(gather(library), p.input(0))
    # Two pieces, of which one takes five times as long; who is through with the other goes on to the next step, whose
    # result must not lie where `first` is.
    slow = p.call(matmul(library, weight(6, 20000)), first)
    quick = p.call(matmul(library, weight(1000, 4)), p.input(1))
    run = p.build(p.call(gather(library), slow), p.call(gather(library), quick))
    x, z = x_of(1, 20000), x_of(1, 4)
    before = native.get().threads()
    try:
        native.get().set_threads(2)
        for _ in range(20):
            a, b = run(x, z)
            same(a, np.array(x) @ np.array(weight(6, 20000)).T)
            same(b, np.array(z) @ np.array(weight(1000, 4)).T)
    finally:
        native.get().set_threads(before)


def test_under_compile_and_threads(library):
    p = Program("compiled", 1)
    first = p.call(matmul(library, weight(4, 4)), p.input(0))
    run = p.build(first, p.call(matmul(library, weight(4, 4, 1)), first))
    f = mx.compile(lambda x: run(x)[0] + run(x)[1], shapeless=True)
    want = lambda x: (np.array(x) @ np.array(weight(4, 4)).T) @ (np.eye(4) + np.array(weight(4, 4, 1)).T)  # noqa: E731
    for rows in (2, 3):
        same(f(x_of(rows, 4)), want(x_of(rows, 4)))
    before = native.get().threads()
    try:
        for threads in range(1, 9):
            native.get().set_threads(threads)
            same(sum(run(x_of(7, 4))), want(x_of(7, 4)))
    finally:
        native.get().set_threads(before)


def test_rules_over_several_inputs(library):
    join = cpu_kernel(library, "matmul").bind(
        output_shape=(dims(0, 0, -1), dims(1, 0, 1)), output_dtype=like(0), params=[1, 0.0]
    )
    p = Program("two", 2)
    run = p.build(p.call(join, p.input(0), p.input(1)))
    same(run(x_of(2, 4), weight(3, 4)), np.array(x_of(2, 4)) @ np.array(weight(3, 4)).T)
