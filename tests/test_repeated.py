"""Functions whose graph node is made anew from its parts (kernels/bindings/repeated.cpp)."""

from __future__ import annotations

import gc
import threading
import weakref

import mlx.core as mx
import numpy as np
import pytest

from backend_core import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native module: {native.status().reason}")


def counted(fixed, f):
    """(Repeated, list of what its function was called with)."""
    calls = []

    def function(x):
        calls.append(x)
        return f(x)

    return native.get().Repeated(function, list(fixed)), calls


def quantized():
    w, scales, biases = mx.quantize(mx.random.normal((32, 128)), 64, 4)
    return (w, scales, biases), lambda x: mx.quantized_matmul(x, w, scales, biases, True, 64, 4)


def test_results_are_those_of_the_function() -> None:
    fixed, stock = quantized()
    f, calls = counted(fixed, stock)
    xs = [mx.random.normal(s) for s in ((1, 128), (4, 128), (2, 3, 128))] * 3
    for x in xs:
        y = f(x)
        assert (y.shape, y.dtype) == ((*x.shape[:-1], 32), mx.float32)
        assert mx.array_equal(y, stock(x))
    assert len(calls) == f.known == 3
    # Many at once, on what was evaluated before and what was not, sliced and transposed.
    a = mx.random.normal((128, 4)).T
    b = mx.random.normal((4, 256))[:, ::2]
    have = [f(a), f(b), f(f(a) @ mx.ones((32, 128))), f(a * 2)]
    want = [stock(a), stock(b), stock(stock(a) @ mx.ones((32, 128))), stock(a * 2)]
    mx.eval(have, want)
    assert all(mx.array_equal(h, w) for h, w in zip(have, want, strict=True))
    assert len(calls) == 3


def test_another_dtype_is_another_call() -> None:
    w = mx.random.normal((64, 64))
    f, calls = counted([w], lambda x: mx.matmul(x, w))
    x = mx.random.normal((2, 64))
    assert mx.array_equal(f(x), x @ w) and mx.array_equal(f(x), x @ w)
    assert len(calls) == 1
    half = x.astype(mx.float16)
    for _ in range(2):
        y = f(half)
        # The function casts first: there is no node with just these inputs.
        assert y.dtype == mx.float32 and mx.array_equal(y, half @ w)
    assert len(calls) == 3 and f.known == 1


def test_a_node_of_other_inputs_is_never_repeated() -> None:
    w = mx.random.normal((8, 8))
    other = mx.random.normal((8, 8))
    for function in (
        lambda x: x @ other,
        lambda x: w @ x,
        lambda x: (x @ w) + 1,
        lambda x: x,
        lambda x: mx.split(x, 2)[0],
        lambda x: mx.array(1.0),
    ):
        f, calls = counted([w], function)
        x = mx.random.normal((8, 8))
        for _ in range(3):
            assert mx.array_equal(f(x), function(x))
        assert len(calls) == 3 and f.known == 0


def test_a_first_array_that_is_one_of_the_fixed_teaches_nothing() -> None:
    w = mx.random.normal((8, 8))
    f, calls = counted([w], lambda x: x @ x)
    assert mx.array_equal(f(w), w @ w)
    x = mx.random.normal((8, 8))
    assert mx.array_equal(f(x), x @ x) and len(calls) == 2 and f.known == 0


def test_what_the_function_gives_that_is_no_array_comes_through() -> None:
    f, calls = counted([], lambda x: [x, "text"])
    x = mx.ones((2,))
    assert f(x)[1] == "text" and f("a") == ["a", "text"] and f(None) == [None, "text"]
    assert len(calls) == 3


def test_exceptions_come_through_and_nothing_is_kept() -> None:
    fixed, stock = quantized()
    f, calls = counted(fixed, stock)
    for _ in range(2):
        with pytest.raises(ValueError, match="quantized_matmul"):
            f(mx.ones((2, 64)))
    assert f.known == 0 and len(calls) == 2
    with pytest.raises(TypeError, match="function"):
        native.get().Repeated(3, [])


def test_inside_of_traces_the_function_runs() -> None:
    fixed, stock = quantized()
    f, calls = counted(fixed, stock)
    x = mx.random.normal((2, 128))
    mx.eval(f(x))
    compiled = mx.compile(lambda x: f(x) * 2)
    assert mx.array_equal(compiled(x), stock(x) * 2)
    grad = mx.grad(lambda x: f(x).sum())(x)
    assert mx.allclose(grad, mx.grad(lambda x: stock(x).sum())(x))
    assert len(calls) == 3 and f.known == 1


def test_another_default_stream_is_another_call() -> None:
    fixed, stock = quantized()
    f, calls = counted(fixed, stock)
    x = mx.random.normal((2, 128))
    mx.eval(x, fixed, f(x))
    with mx.stream(mx.new_stream(mx.cpu)):
        y = f(x)
        assert mx.array_equal(y, stock(x)) and len(calls) == 2
        assert mx.array_equal(f(x), y) and len(calls) == 2
    assert mx.array_equal(f(x), y) and len(calls) == 3


def test_prompts_of_every_length_do_not_pile_up() -> None:
    fixed, stock = quantized()
    f, _ = counted(fixed, stock)
    for rows in range(1, 200):
        f(mx.ones((rows, 128)))
        assert f.known <= 64
    assert mx.array_equal(f(mx.ones((7, 128))), stock(mx.ones((7, 128))))


def test_the_function_may_call_it_again() -> None:
    w = mx.random.normal((8, 8))

    def function(x):
        return x @ w if depth.pop() == 0 else f(x)

    depth = [0, 1, 2]
    f = native.get().Repeated(function, [w])
    x = mx.random.normal((8, 8))
    assert mx.array_equal(f(x), x @ w) and f.known == 1 and not depth


def test_threads() -> None:
    fixed, stock = quantized()
    f, _ = counted(fixed, stock)
    xs = [mx.random.normal((i % 5 + 1, 128)) for i in range(100)]
    mx.eval(xs, fixed)
    want, failed = [np.array(stock(x)) for x in xs], []

    def work() -> None:
        mx.set_default_stream(mx.new_stream(mx.cpu))
        for x, y in zip(xs, want, strict=True):
            if not np.array_equal(np.array(f(x)), y):
                failed.append(x.shape)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failed == []


def test_a_cycle_is_collected() -> None:
    class Owner:
        pass

    owner = Owner()
    owner.f = native.get().Repeated(lambda x, o=owner: x + len(o.__dict__), [], ["a note"])
    assert owner.f.notes == ["a note"]
    assert owner.f(mx.array([1.0])).item() == 2.0
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
