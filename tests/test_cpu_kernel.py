"""cpu_kernel: C kernels as lazy mlx operations."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

pytest.importorskip("mlx.core")
import mlx.core as mx

from backend_core import native
from backend_core.__main__ import sdk_dir
from backend_core.cpu_kernel import cpu_kernel, dim, dims, like, result_type

HERE = pathlib.Path(__file__).parent
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.status().reason or "native"),
    pytest.mark.skipif(CC is None, reason="needs a C compiler"),
]


def compile_kernel(source: pathlib.Path, out: pathlib.Path, include: pathlib.Path | None = None) -> pathlib.Path:
    include = include or sdk_dir("include")
    subprocess.run(
        [CC, "-std=c11", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{include}", source, "-o", out],
        check=True,
    )
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_kernel(HERE / "kernels" / "basic.c", tmp_path_factory.mktemp("kernels") / "basic.so")


@pytest.fixture(autouse=True)
def no_errors_left():
    native.take_errors()
    yield
    assert native.take_errors() == []


def arrays(m=3, n=4, k=5, seed=0):
    rng = np.random.default_rng(seed)
    # Small integers: sums are exact in whatever order.
    return [rng.integers(-4, 5, s).astype(np.float32) for s in ((m, k), (n, k))]


PARAMS = [2, 0.5]


def expect(x, w):
    return 2 * (x.astype(np.float64) @ w.T) + 0.5


def bound_matmul(library, w, **options):
    kernel = cpu_kernel(library, "matmul", **options)
    return kernel.bind([w], output_shape=like(0, last=w.shape[0]), output_dtype=like(0), params=PARAMS)


def same(y, expected):
    np.testing.assert_array_equal(np.array(y), np.asarray(expected))


# Calls


def test_call(library):
    x, w = arrays()
    kernel = cpu_kernel(library, "matmul")
    out = kernel(inputs=[mx.array(x), mx.array(w)], output_shapes=[(3, 4)], output_dtypes=[mx.float32], params=PARAMS)
    assert isinstance(out, list) and len(out) == 1
    assert out[0].shape == (3, 4) and out[0].dtype == mx.float32
    same(out[0], expect(x, w))
    assert kernel.name == kernel.symbol == "matmul" and str(library) in repr(kernel)


def test_bound(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w), name="my layer")
    same(layer(mx.array(x)), expect(x, w))
    x3 = np.stack([x, x + 1])
    same(layer(mx.array(x3)), expect(x3, w))
    same(layer(mx.array(x[0])), expect(x[0], w))
    assert layer.__name__ == "my layer" and "1 fixed" in repr(layer)


def test_bound_takes_several_arrays(library):
    x, w = arrays()
    layer = cpu_kernel(library, "matmul").bind(
        output_shape=like(0, last=dim(1, 0)), output_dtype=like(0), params=PARAMS
    )
    same(layer(mx.array(x), mx.array(w)), expect(x, w))
    same(layer(mx.array(x), mx.array(w), params=[1, 0.0]), x @ w.T)
    same(layer(mx.array(x), mx.array(w)), expect(x, w))


def test_two_outputs(library):
    a, b = mx.array([1.0, 2.0]), mx.array([3.0, 5.0])
    kernel = cpu_kernel(library, "sum_difference")
    s, d = kernel(inputs=[a, b], output_shapes=[like(0)] * 2, output_dtypes=[like(0)] * 2)
    same(d, [-2, -3])
    same(s, [4, 7])
    with pytest.raises(ValueError, match="1 output shapes and 2 output dtypes"):
        kernel(inputs=[a, b], output_shapes=[like(0)], output_dtypes=[like(0)] * 2)


def test_rules(library):
    kernel = cpu_kernel(library, "gather", ensure_row_contiguous=False)
    x, y = mx.zeros((2, 3, 4)), mx.zeros((5,), mx.float16)

    def shape(rule):
        return kernel(inputs=[x, y], output_shapes=[rule], output_dtypes=[mx.float32])[0].shape

    assert shape(like(0)) == (2, 3, 4)
    assert shape(like(0, last=7)) == (2, 3, 7)
    assert shape(like(0, last=dim(1, 0))) == (2, 3, 5)
    assert shape((dims(0, 0, -1), 1, dim(1, -1))) == (2, 3, 1, 5)
    assert shape((dims(0, 1), 6)) == (3, 4, 6)
    assert shape([8, dim(0, 1)]) == (8, 3)
    assert shape(()) == ()

    def dtype(rule):
        return kernel(inputs=[x, y], output_shapes=[like(0)], output_dtypes=[rule])[0].dtype

    assert dtype(mx.int8) == mx.int8
    assert dtype(like(1)) == mx.float16
    assert dtype(result_type(0, 1)) == mx.float32
    with pytest.raises(ValueError, match=r"\[gather\].*dimension 3 of input 0"):
        shape((dim(0, 3),))
    with pytest.raises(ValueError, match="described by input 2"):
        shape(like(2))
    with pytest.raises(ValueError, match="needs at least 1 dimensions"):
        kernel(inputs=[mx.array(1.0)], output_shapes=[like(0, last=3)], output_dtypes=[like(0)])
    with pytest.raises(ValueError, match="negative"):
        shape((-1,))
    with pytest.raises(ValueError, match="32 bits"):
        shape((2**40,))
    with pytest.raises(TypeError, match="dtype"):
        dtype("float32")


def test_wrong_arguments(library):
    _, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    for args, keywords in [
        (([1.0],), {}),
        ((), {}),
        ((mx.zeros((1, 5)), "cpu"), {}),
        ((mx.zeros((1, 5)),), {"nothing": 1}),
        ((mx.zeros((1, 5)),), {"params": ["a"]}),
    ]:
        with pytest.raises(TypeError):
            layer(*args, **keywords)
    with pytest.raises(ValueError, match="at least 1 dim"):
        layer(mx.array(1.0))
    with pytest.raises(ValueError, match="one output"):
        cpu_kernel(library, "sum_difference")._make([like(0)] * 2, [like(0)] * 2).bind([])


# Lazy, compiled, differentiated


def test_lazy(library):
    kernel = cpu_kernel(library, "fails")
    y = kernel(inputs=[mx.zeros(3)], output_shapes=[like(0)], output_dtypes=[like(0)])[0]
    del y  # never evaluated, never run
    assert native.take_errors() == []


def test_compile(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    f = mx.compile(lambda a: layer(mx.exp(a * 0) * a) + 1)
    for rows in (x, x[:1], x + 1):
        same(f(mx.array(rows)), expect(rows, w) + 1)


def test_shapeless_compile_replays_other_rows(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    traced = []

    def f(a):
        traced.append(1)
        return layer(a) + 1

    f = mx.compile(f, shapeless=True)
    same(f(mx.array(x[:1])), expect(x[:1], w) + 1)
    same(f(mx.array(x)), expect(x, w) + 1)
    assert len(traced) == 1


def test_static_shape_refuses_shapeless_compile(library):
    x, w = arrays()
    kernel = cpu_kernel(library, "matmul")

    def f(a):
        return kernel(inputs=[a, mx.array(w)], output_shapes=[(3, 4)], output_dtypes=[mx.float32], params=PARAMS)[0]

    same(mx.compile(f)(mx.array(x)), expect(x, w))
    with pytest.raises(ValueError, match=r"\[matmul\].*like\(0, last=N\)"):
        g = mx.compile(f, shapeless=True)
        g(mx.array(x))
        mx.eval(g(mx.array(x[:2])))


def test_equal_calls_are_merged_and_different_ones_are_not(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    a, b = PARAMS, [3, 0.5]
    f = mx.compile(lambda v: layer(v) - layer(v, params=a))
    same(f(mx.array(x)), np.zeros((3, 4)))
    f = mx.compile(lambda v: layer(v, params=b) - layer(v, params=a))
    same(f(mx.array(x)), x @ w.T)


def test_gradient(library):
    x, w = arrays()
    wa = mx.array(w)

    def vjp(primals, cotangents, argnums):
        assert argnums == [0] and len(primals) == 2 and len(cotangents) == 1
        return [2 * (cotangents[0] @ primals[1])]

    layer = bound_matmul(library, wa, vjp=vjp)
    ones = np.ones((3, 4), np.float32)
    same(mx.grad(lambda a: layer(a).sum())(mx.array(x)), 2 * ones @ w)
    same(mx.compile(mx.grad(lambda a: layer(a).sum()))(mx.array(x)), 2 * ones @ w)
    value, gradient = mx.value_and_grad(lambda a: (layer(a) * 3).sum())(mx.array(x))
    assert value.item() == 3 * expect(x, w).sum()
    same(gradient, 6 * ones @ w)
    tangent = x + 1
    _, jvp = mx.jvp(layer, [mx.array(x)], [mx.array(tangent)])
    same(jvp[0], 2 * tangent @ w.T)


def test_gradient_errors(library):
    x, w = arrays()
    with pytest.raises(ValueError, match=r"\[matmul\].*no gradient"):
        layer = bound_matmul(library, mx.array(w))
        mx.eval(mx.grad(lambda a: layer(a).sum())(mx.array(x)))
    with pytest.raises(ValueError, match="vmap"):
        mx.eval(mx.vmap(layer)(mx.array(x)))
    for wrong, message in [
        (lambda p, c, a: [], "0 gradients for 1"),
        (lambda p, c, a: [c[0]], "shape"),
        (lambda p, c, a: 3, "list of arrays"),
        (lambda p, c, a: 1 / 0, "division"),
    ]:
        layer = bound_matmul(library, mx.array(w), vjp=wrong)
        with pytest.raises((ValueError, TypeError, ZeroDivisionError), match=message):
            mx.eval(mx.grad(lambda a, f=layer: f(a).sum())(mx.array(x)))
    with pytest.raises(TypeError, match="callable"):
        bound_matmul(library, mx.array(w), vjp=3)


def test_gradient_callable_is_released(library):
    class Gradient:
        def __call__(self, primals, cotangents, argnums):
            return [cotangents[0] @ primals[1]]

    g = Gradient()
    gone = weakref.ref(g)
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w), vjp=g)
    y = layer(mx.array(x))
    mx.eval(y)
    del g, layer, y
    mx.synchronize()
    bound_matmul(library, mx.array(w))  # drops what went away on a stream's thread
    assert gone() is None


def test_export_says_that_it_cannot(library, tmp_path):
    _, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)serializ|export|primitive"):
        mx.export_function(str(tmp_path / "f.mlxfn"), layer, mx.zeros((1, 5)))


# Streams and threads


def test_streams(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    stream = mx.new_stream(mx.cpu)
    same(layer(mx.array(x), stream=stream), expect(x, w))
    same(layer(mx.array(x), stream), expect(x, w))
    same(layer(mx.array(x), mx.cpu), expect(x, w))
    same(layer(mx.array(x), None), expect(x, w))
    with mx.stream(stream):
        same(
            layer(layer(mx.array(x))[:, :1] * mx.ones((1, 5))),
            expect(expect(x, w)[:, :1] * np.ones((1, 5)), w),
        )
    local = mx.new_thread_local_stream(mx.cpu)
    same(layer(mx.array(x), local), expect(x, w))
    with mx.stream(local):
        same(layer(mx.array(x)), expect(x, w))


def in_threads(count, f):
    errors = []

    def run(i):
        try:
            f(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive()
    if errors:
        raise errors[0]


def test_worker_thread(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    in_threads(1, lambda i: same(layer(mx.array(x)), expect(x, w)))


def test_many_threads_and_streams_at_once(library):
    x, w = arrays(31, 17, 23)
    wa = mx.array(w)
    mx.eval(wa)
    layer = bound_matmul(library, wa)

    def work(i):
        stream = mx.new_stream(mx.cpu)
        for j in range(20):
            same(layer(mx.array(x + i + j), stream=stream), expect(x + i + j, w))

    in_threads(4, work)
    streams = [mx.new_stream(mx.cpu) for _ in range(4)]
    ys = [layer(mx.array(x + i), stream=streams[i % 4]) for i in range(40)]
    mx.eval(ys)
    for i, y in enumerate(ys):
        same(y, expect(x + i, w))


@pytest.mark.parametrize("n", [1, 6, 7, 8, 1000, 100_003])
def test_bits_do_not_depend_on_threads(library, n):
    x = mx.random.normal((n,), key=mx.random.key(1))
    m = native.get()
    before = m.threads()
    kernel = cpu_kernel(library, "total")
    seen = set()
    try:
        for threads in (1, 2, 3, 7):
            m.set_threads(threads)
            y = kernel(inputs=[x], output_shapes=[()], output_dtypes=[mx.float32])[0]
            seen.add(np.array(y).tobytes())
    finally:
        m.set_threads(before)
    assert len(seen) == 1
    assert abs(np.frombuffer(seen.pop(), np.float32)[0] - np.array(x, np.float64).sum()) < 1e-2 * n**0.5


# Inputs of all kinds


VIEWS = {
    "plain": lambda a: a,
    "transposed": lambda a: a.T,
    "rows": lambda a: a[1:3],
    "columns": lambda a: a[:, 1:5],
    "every other": lambda a: a[::2, ::3],
    "backwards": lambda a: a[::-1, ::-1],
    "broadcast rows": lambda a: (mx if isinstance(a, mx.array) else np).broadcast_to(a[:1], (4, 6)),
    "broadcast columns": lambda a: (mx if isinstance(a, mx.array) else np).broadcast_to(a[:, :1], (4, 9)),
    "scalar broadcast": lambda a: (mx if isinstance(a, mx.array) else np).broadcast_to(a[0, 0], (2, 3, 2)),
    "four dimensions": lambda a: a.reshape(2, 2, 3, 2).transpose(3, 1, 0, 2)[:, 1:],
    "zero rows": lambda a: a[2:2],
    "zero columns": lambda a: a[:, 3:3].T,
    "scalar": lambda a: a[1, 2],
}  # fmt: skip


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64"])
def test_views(library, view, contiguous, dtype):
    base = np.arange(24).reshape(4, 6).astype(dtype)
    a = VIEWS[view](mx.array(base))
    expected = VIEWS[view](base)
    kernel = cpu_kernel(library, "gather", ensure_row_contiguous=contiguous)
    y = kernel(inputs=[a], output_shapes=[like(0)], output_dtypes=[like(0)])[0]
    assert y.shape == expected.shape
    same(y, expected)


def test_large_views(library):
    base = np.arange(300 * 500 * 2, dtype=np.float32).reshape(300, 500, 2)
    kernel = cpu_kernel(library, "gather")
    for axes in ((2, 0, 1), (1, 0, 2), (0, 2, 1)):
        a = mx.array(base).transpose(axes)[:, 3:]
        y = kernel(inputs=[a], output_shapes=[like(0)], output_dtypes=[like(0)])[0]
        same(y, base.transpose(axes)[:, 3:])


def described(library, a, **options):
    kernel = cpu_kernel(library, "describe", **options)
    out = kernel(inputs=[a], output_shapes=[(12,)], output_dtypes=[mx.int64])[0].tolist()
    ndim = out[0]
    return out[1], out[2], out[3 : 3 + ndim], out[3 + ndim : 3 + 2 * ndim]


def test_kernel_sees_strides_on_demand(library):
    a = mx.zeros((4, 6))
    assert described(library, a.T, ensure_row_contiguous=False)[1:] == (24, [6, 4], [1, 6])
    assert described(library, a.T)[1:] == (24, [6, 4], [4, 1])
    b = mx.broadcast_to(a[:1], (3, 6))
    assert described(library, b, ensure_row_contiguous=False)[3][0] == 0
    assert described(library, b)[3] == [6, 1]
    assert described(library, mx.array(1.0))[1:] == (1, [], [])


def test_dtypes(library):
    header = (sdk_dir("include") / "accel" / "kernel.h").read_text()
    numbers = dict(re.findall(r"ACCEL_([A-Z0-9]+) = (\d+)", header))
    assert len(numbers) == 14
    for name, number in numbers.items():
        dtype = getattr(mx, {"BOOL": "bool_"}.get(name, name.lower()))
        assert described(library, mx.zeros((1,), dtype))[0] == int(number)


def test_temporaries_stay_alive(library):
    _, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    ys = []
    for i in range(200):
        ys.append(layer(mx.full((2, 5), float(i % 7))))
        mx.async_eval(ys[-1])
    for i, y in enumerate(ys):
        same(y, expect(np.full((2, 5), i % 7, np.float32), w))


def test_exit_with_work_queued(library):
    code = (
        "import sys, mlx.core as mx\nfrom backend_core import cpu_kernel, like\n"
        "w = mx.ones((500, 500))\nlayer = cpu_kernel(sys.argv[1], 'matmul').bind("
        "[w], output_shape=like(0), output_dtype=like(0), params=[1, 0.0])\n"
        "y = w\nfor _ in range(5): y = layer(y)\nmx.async_eval(y)\nprint('bye')"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "bye\n"), done.stderr


# What kernels are told, and what they tell


def test_environment(library):
    kernel = cpu_kernel(library, "environment")
    y = kernel(inputs=[mx.zeros(1)], output_shapes=[(4,)], output_dtypes=[mx.int64])[0].tolist()
    m = native.get()
    assert y == [m.isa()[0], m.threads(), m.build_info()["kernel_abi"], 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int32", "bool_"])
def test_failure(library, dtype):
    kernel = cpu_kernel(library, "fails", name="my kernel")
    y = kernel(inputs=[mx.zeros(3)], output_shapes=[like(0)], output_dtypes=[getattr(mx, dtype)])[0]
    mx.eval(y)
    assert native.take_errors() == ["my kernel: the first reason"]
    assert native.take_errors() == []
    if dtype in ("int32", "bool_"):
        same(y, np.zeros(3))
    else:
        assert mx.isnan(y).all().item()
    same(mx.ones(2) + 1, [2, 2])  # the stream still works


def test_failure_nobody_asked_about_is_raised_by_the_next_call(library):
    x, w = arrays()
    layer = bound_matmul(library, mx.array(w))
    fails = cpu_kernel(library, "fails")
    options = {"inputs": [mx.zeros(3)], "output_shapes": [like(0)], "output_dtypes": [like(0)]}
    mx.eval(fails(**options), fails(**options))
    with pytest.raises(RuntimeError, match="fails: the first reason; fails: the first reason"):
        layer(mx.array(x))
    same(layer(mx.array(x)), expect(x, w))  # once
    mx.eval(fails(**options))
    with pytest.raises(RuntimeError, match="a CPU kernel failed: fails"):
        fails(**options)


def test_failures_from_threads(library):
    everything = [
        cpu_kernel(library, "fails", name=f"kernel {i}")(
            inputs=[mx.zeros(3)],
            output_shapes=[like(0)],
            output_dtypes=[like(0)],
            stream=mx.new_stream(mx.cpu),
        )
        for i in range(3)
        for _ in range(5)
    ]
    mx.eval(everything)
    expected = [f"kernel {i}: the first reason" for i in range(3) for _ in range(5)]
    assert sorted(native.take_errors()) == expected


def test_out_of_memory(library):
    kernel = cpu_kernel(library, "wants_memory")
    mx.eval(kernel(inputs=[mx.zeros(1)], output_shapes=[(1,)], output_dtypes=[mx.float32]))
    assert native.take_errors() == ["wants_memory: out of memory"]


def test_not_called_without_output(library):
    kernel = cpu_kernel(library, "fails")
    y = kernel(inputs=[mx.zeros((0, 3))], output_shapes=[like(0)], output_dtypes=[like(0)])[0]
    assert np.array(y).shape == (0, 3)


def test_no_inputs(library):
    kernel = cpu_kernel(library, "environment")
    assert kernel(inputs=[], output_shapes=[(4,)], output_dtypes=[mx.int64])[0].tolist()[3] == 1


# Libraries


def test_library_errors(library, tmp_path):
    with pytest.raises(RuntimeError, match=r"'missing'.*/nowhere/k\.so: there is no such file"):
        cpu_kernel("/nowhere/k.so", "missing")
    with pytest.raises(RuntimeError, match="not a file"):
        cpu_kernel(tmp_path, "matmul")
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(RuntimeError, match=r"text\.so"):
        cpu_kernel(text, "matmul")
    with pytest.raises(RuntimeError, match=r"'nothing'.*nothing.*no such symbol"):
        cpu_kernel(library, "nothing")
    plain = compile_kernel(HERE / "kernels" / "plain.c", tmp_path / "plain.so")
    with pytest.raises(RuntimeError, match="accel_library_abi_version is missing"):
        cpu_kernel(plain, "kernel")


def other_header(tmp_path, version, *, shorter=False):
    text = (sdk_dir("include") / "accel" / "kernel.h").read_text()
    text, count = re.subn(r"#define ACCEL_ABI_VERSION \d+u", f"#define ACCEL_ABI_VERSION {version}u", text)
    assert count == 1
    if shorter:  # as if `isa` and `threads` had been appended later
        text = re.sub(r".*/\* how many threads parallel_for.*\n", "", text)
        text = re.sub(r".*/\* ACCEL_ISA_ bits \*/\n", "", text)
        text = re.sub(r"static inline int accel_has.*\n", "", text)
    out = tmp_path / "include"
    (out / "accel").mkdir(parents=True)
    (out / "accel" / "kernel.h").write_text(text)
    return out


def test_older_library_keeps_loading(tmp_path):
    source = tmp_path / "basic.c"
    text = (HERE / "kernels" / "basic.c").read_text()
    source.write_text(text[: text.index("/* isa, threads")])
    old = compile_kernel(source, tmp_path / "old.so", other_header(tmp_path, 0, shorter=True))
    x, w = arrays()
    same(bound_matmul(old, mx.array(w))(mx.array(x)), expect(x, w))
    assert native.get().Kernel(str(old), "matmul").abi_version == 0


def test_newer_library_is_refused(tmp_path):
    new = compile_kernel(HERE / "kernels" / "basic.c", tmp_path / "new.so", other_header(tmp_path, 99))
    with pytest.raises(RuntimeError, match=r"version 99 of the kernel ABI.*upgrade mlx-accel"):
        cpu_kernel(new, "matmul")


def test_library_forms(library, monkeypatch, tmp_path):
    x, w = arrays()
    for form in (str(library), library):
        same(bound_matmul(form, mx.array(w))(mx.array(x)), expect(x, w))
    monkeypatch.chdir(library.parent)
    same(bound_matmul("basic.so", mx.array(w))(mx.array(x)), expect(x, w))
    package = tmp_path / "resource_package"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(library, package / "k.so")
    monkeypatch.syspath_prepend(str(tmp_path))
    from importlib.resources import files

    same(bound_matmul(files("resource_package") / "k.so", mx.array(w))(mx.array(x)), expect(x, w))


def test_package_attribute_is_callable(library):
    import backend_core

    assert backend_core.cpu_kernel(library, "matmul").symbol == "matmul"


def test_cxx_library_with_the_cmake_helper(tmp_path):
    cmake = shutil.which("cmake", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("cmake")
    if not cmake or not shutil.which("c++"):
        pytest.skip("needs cmake and a C++ compiler")
    (tmp_path / "a.cpp").write_text(
        textwrap.dedent("""
        #include <accel/kernel.h>
        float twice_avx2(float);
        ACCEL_KERNEL void twice(const accel_call* call) {
          for (int64_t i = 0; i < call->outputs[0]->size; ++i)
            ((float*)call->outputs[0]->data)[i] =
        #if ACCEL_BUILD_AVX2
                accel_has(call, ACCEL_ISA_AVX2) ? twice_avx2(((const float*)call->inputs[0]->data)[i]) :
        #endif
                2 * ((const float*)call->inputs[0]->data)[i];
        }
        """)
    )
    (tmp_path / "b.cpp").write_text(
        "#include <accel/kernel.h>\n"
        "#if !defined(__AVX2__) || defined(__AVX512F__)\n#error wrong flags\n#endif\n"
        "float twice_avx2(float x) { return x + x; }\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(p LANGUAGES NONE)\n"
        "find_package(mlx_accel CONFIG REQUIRED)\n"
        "mlx_accel_add_kernels(plugin SOURCES a.cpp AVX2 b.cpp DESTINATION here)\n"
    )

    def configure(build, *options):
        command = [cmake, "-S", tmp_path, "-B", build, f"-Dmlx_accel_ROOT={sdk_dir('cmake')}", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and "or higher is required" in done.stderr:
            pytest.skip("needs a newer cmake")
        assert done.returncode == 0, done.stderr
        return done.stdout

    configure(tmp_path / "build")
    subprocess.run([cmake, "--build", tmp_path / "build"], check=True, capture_output=True)
    subprocess.run([cmake, "--install", tmp_path / "build", "--prefix", tmp_path / "inst"], check=True)
    built = tmp_path / "inst" / "here" / ("plugin.dylib" if sys.platform == "darwin" else "plugin.so")
    kernel = cpu_kernel(built, "twice")
    same(kernel(inputs=[mx.array([1.5])], output_shapes=[like(0)], output_dtypes=[like(0)])[0], [3.0])
    # Without a compiler nothing is built and nothing fails.
    out = configure(tmp_path / "none", "-DCMAKE_CXX_COMPILER=NOTFOUND")
    assert "plugin is not built" in out
