"""The operations inside mlx: laziness, result dtypes, compilation, gradients, views, instruction sets."""

import os
import subprocess
import sys

import host_ops_cases as cases
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from host_ops import ops
from host_ops import reference as ref

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
N = 40


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


W, B = normal(N, seed=1), normal(N, seed=2)
EPS = 1e-5


def positions(traditional):
    rotate = ops.rope(32, traditional, 1e4, 0.5)

    def stock(x):
        return mx.fast.rope(x, 32, traditional=traditional, base=1e4, scale=0.5, offset=7)

    return lambda x: rotate(x, offset=7), stock, 1


#: name -> (ours, stock, number of arrays)
PAIRS = {
    "rms_norm": (ops.rms_norm(W, EPS), lambda x: mx.fast.rms_norm(x, W, EPS), 1),
    "rms_norm, no weight": (ops.rms_norm(None, EPS), lambda x: mx.fast.rms_norm(x, None, EPS), 1),
    "layer_norm": (ops.layer_norm(W, B, EPS), lambda x: mx.fast.layer_norm(x, W, B, EPS), 1),
    "layer_norm, weight": (ops.layer_norm(W, None, EPS), lambda x: mx.fast.layer_norm(x, W, None, EPS), 1),
    "layer_norm, bias": (ops.layer_norm(None, B, EPS), lambda x: mx.fast.layer_norm(x, None, B, EPS), 1),
    "layer_norm, plain": (ops.layer_norm(None, None, EPS), lambda x: mx.fast.layer_norm(x, None, None, EPS), 1),
    "residual_rms_norm, sum": (
        lambda x, y: ops.residual_rms_norm(W, EPS)(x, y)[0],
        lambda x, y: x + y,
        2,
    ),
    "residual_rms_norm": (
        lambda x, y: ops.residual_rms_norm(W, EPS)(x, y)[1],
        lambda x, y: mx.fast.rms_norm(x + y, W, EPS),
        2,
    ),
    "rope": positions(False),
    "rope, traditional": positions(True),
    **{name: (ops.activation(name), stock, arrays) for name, (arrays, stock) in ops.ACTIVATIONS.items()},
    "softcap": (ops.softcap(2.0), lambda x: mx.tanh(x / 2.0) * 2.0, 1),
    "logit_softcap": (lambda x: ops.logit_softcap()(2.0, x), lambda x: mx.tanh(x / 2.0) * 2.0, 1),
    "residual": (ops.residual(), lambda x, y: x + y, 2),
    "logsumexp": (ops.logsumexp(), lambda x: mx.logsumexp(x, axis=-1, keepdims=True), 1),
    "softmax": (ops.softmax(), lambda x: mx.softmax(x, axis=-1), 1),
    "argmax": (ops.argmax(), lambda x: mx.argmax(x, axis=-1), 1),
}


def differ(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() if a.size else 0.0


def arrays(count, *shape, dtype=mx.float32):
    return [normal(*shape, seed=10 + i, dtype=dtype) for i in range(count)]


@pytest.mark.parametrize("name", PAIRS)
def test_results_are_stocks(name):
    ours, stock, count = PAIRS[name]
    for shape in ((1, 1, N), (2, 3, N), (1, 3, 5, N), (0, 2, N)):
        x = arrays(count, *shape)
        if 0 in shape and name in cases.REDUCTIONS:
            assert ours(*x).size == 0  # an error in stock
        else:
            assert differ(ours(*x), stock(*x)) < 1e-5


@pytest.mark.parametrize("name", PAIRS)
def test_half_precision_results_have_stocks_dtype(name):
    ours, stock, count = PAIRS[name]
    for dtype in (mx.float16, mx.bfloat16):
        x = arrays(count, 2, 3, N, dtype=dtype)
        if name != "argmax":  # on equal numbers in half precision both take the first
            assert differ(ours(*x), stock(*x)) < 0.1
        if count == 2:
            for other in FLOATS:
                y = [x[0], x[1].astype(other)]
                assert differ(ours(*y), stock(*y)) < 0.1


def test_result_dtypes_of_norms_are_stocks():
    for xd in FLOATS:
        x = normal(2, N, dtype=xd)
        for wd in (*FLOATS, None):
            w = None if wd is None else W.astype(wd)
            assert differ(ops.rms_norm(w, EPS)(x), mx.fast.rms_norm(x, w, EPS)) < 0.1
            total, normed = ops.residual_rms_norm(w, EPS)(x, x)
            assert differ(total, x + x) == 0 and differ(normed, mx.fast.rms_norm(x + x, w, EPS)) < 0.1
            for bd in (*FLOATS, None):
                b = None if bd is None else B.astype(bd)
                assert differ(ops.layer_norm(w, b, EPS)(x), mx.fast.layer_norm(x, w, b, EPS)) < 0.1


@pytest.mark.parametrize("name", PAIRS)
def test_views(name):
    ours, stock, count = PAIRS[name]
    whole = arrays(count, 4, 3, 6, 2 * N)
    for change in (
        lambda a: a[:, 1, :, :N],
        lambda a: a[..., ::2],
        lambda a: a[..., ::-2],
        lambda a: a.transpose(0, 2, 1, 3)[..., N:],
        lambda a: mx.broadcast_to(a[:1, ..., :N], (3, 3, 6, N)),
        lambda a: a[..., :N] * 2 + 1,
    ):
        x = [change(a) for a in whole]
        # Stock compiles some of its functions anew for every layout, which takes seconds.
        assert differ(ours(*x), stock(*(mx.contiguous(a) for a in x))) < 1e-5


@pytest.mark.parametrize("shapeless", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_compile(name, shapeless):
    ours, stock, count = PAIRS[name]
    compiled = mx.compile(lambda *x: ours(*(a * 2 for a in x)) + 1, shapeless=shapeless)
    for rows in (1, 3, 20):
        x = arrays(count, 1, rows, N)
        assert differ(compiled(*x), stock(*(a * 2 for a in x)) + 1) < 1e-5


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "argmax"])
def test_gradients_are_stocks(name):
    ours, stock, count = PAIRS[name]
    x = arrays(count, 2, 3, N)
    cotangent = normal(*stock(*x).shape, seed=5)
    for argnums in ((0,), tuple(range(count))):
        got = mx.grad(lambda *a: (ours(*a) * cotangent).sum(), argnums=argnums)(*x)
        want = mx.grad(lambda *a: (stock(*a) * cotangent).sum(), argnums=argnums)(*x)
        for a, b in zip(got, want, strict=True):
            assert differ(a, b) <= 1e-5 * max(mx.abs(b).max().item(), 1)


def test_gradients_of_parameters_are_stocks():
    x, cotangent = arrays(2, 2, 3, N)
    pairs = [
        (lambda w, b: ops.rms_norm(w, EPS)(x), lambda w, b: mx.fast.rms_norm(x, w, EPS)),
        (lambda w, b: ops.layer_norm(w, b, EPS)(x), lambda w, b: mx.fast.layer_norm(x, w, b, EPS)),
        (lambda w, b: ops.residual_rms_norm(w, EPS)(x, x)[1], lambda w, b: mx.fast.rms_norm(x + x, w, EPS)),
    ]
    for ours, stock in pairs:
        got = mx.grad(lambda w, b, f=ours: (f(w, b) * cotangent).sum(), argnums=(0, 1))(W, B)
        want = mx.grad(lambda w, b, f=stock: (f(w, b) * cotangent).sum(), argnums=(0, 1))(W, B)
        for a, b in zip(got, want, strict=True):
            assert differ(a, b) <= 1e-5 * max(mx.abs(b).max().item(), 1)


def test_compiled_gradients():
    f = ops.rope(32, False, 1e4, 1.0)
    x = normal(1, 2, 3, N)
    step = mx.compile(lambda a: mx.grad(lambda y: (f(y, offset=5) ** 2 * normal(3, N, seed=8)).sum())(a))
    stock = mx.grad(
        lambda y: (
            mx.fast.rope(y, 32, traditional=False, base=1e4, scale=1.0, offset=5) ** 2 * normal(3, N, seed=8)
        ).sum()
    )
    assert differ(step(x), stock(x)) < 1e-4


def test_rows_are_equal_bits():
    for name, (ours, _, count) in PAIRS.items():
        if name.startswith("rope"):
            continue
        x = arrays(count, 16, N, dtype=mx.float16)
        alone = mx.concatenate([ours(*(a[i : i + 1] for a in x)) for i in range(16)])
        for rows in (2, 5, 16):
            assert mx.array_equal(ours(*(a[:rows] for a in x)), alone[:rows]), name


def test_offsets_of_every_kind():
    f = ops.rope(16, False, 1e4, 1.0)

    def stock(x, offset):
        return mx.fast.rope(x, 16, traditional=False, base=1e4, scale=1.0, offset=offset)

    x = normal(2, 3, 4, N)
    assert differ(f(x), stock(x, 0)) < 1e-5
    for offset in (
        0, 3, -2, True, np.int64(5), mx.array(5), mx.array([5]), mx.array([5, 9]), mx.array([5, 9], mx.int64),
        mx.array([5, 9], mx.uint32), mx.array([0, 4, 8, 12])[::2],
    ):  # fmt: skip
        theirs = offset if isinstance(offset, mx.array) else int(offset)
        assert differ(f(x, offset), stock(x, theirs)) < 1e-5
        assert differ(f(x, offset=offset), stock(x, theirs)) < 1e-5
    far = f(x, 1_000_000)
    want = cases.ref.rope(np.array(x), 16, False, 1e4, 1.0, 1_000_000, "float32")
    assert cases.ref.errors(np.array(far), want, "float32").max() <= 1


def test_offsets_that_stock_refuses():
    f = ops.rope(16, False, 1e4, 1.0)
    for offset in (mx.array([1.0, 2.0]), mx.array([[1, 2]])):
        with pytest.raises(ValueError):
            f(normal(2, 3, 4, N), offset)
    with pytest.raises(ValueError, match="even"):
        ops.rope(7, False, 1e4, 1.0)


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("traditional", [False, True])
def test_rope_by_frequencies(traditional, factor):
    periods = np.array([1.0, 3.0, 50.0, np.inf, 7.5, 1e4, 2.0, 12.0])
    f = ops.rope_by_frequencies(1 / periods, factor, traditional)
    x = normal(2, 3, 4, N)

    def stock(x, offset):
        x = mx.concatenate([factor * x[..., :16], x[..., 16:]], axis=-1)
        freqs = mx.array(periods.astype(np.float32))
        return mx.fast.rope(x, 16, traditional=traditional, base=None, scale=1.0, offset=offset, freqs=freqs)

    for offset in (0, 3, mx.array([5, 9]), mx.array([5, 9], mx.uint32)):
        assert differ(f(x, offset), stock(x, offset)) < 1e-5
    g, h = (mx.grad(lambda x, f=f: (f(x, 5) ** 2 * normal(4, N, seed=8)).sum())(x) for f in (f, stock))
    assert differ(g, h) < 1e-4
    assert f.way == int(traditional)


def test_rope_needs_frequencies():
    for bad in ([], [[1.0]], 1.0):
        with pytest.raises(ValueError, match="vector"):
            ops.rope_by_frequencies(np.array(bad))


def test_softcap_as_models_call_it():
    f = ops.logit_softcap()
    x = normal(3, N) * 50
    for cap in (30.0, 15, 30.0, mx.array(10.0)):
        assert differ(f(cap, x), mx.tanh(x / cap) * cap) < 1e-4


def test_scalars():
    for name in ("silu", "gelu", "swiglu"):
        ours, stock, count = PAIRS[name]
        x = [mx.array(1.5)] * count
        assert differ(ours(*x), stock(*x)) < 1e-6


def test_shapes_that_do_not_fit_are_an_error():
    from backend_core import native

    y = ops.activation("swiglu")(normal(2, N), normal(1, N))
    assert mx.isnan(y).all()
    assert any("one shape" in str(e) for e in native.take_errors())


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_isa_can_be_limited(isa):
    """MLX_ACCEL_ISA reaches the kernels; every variant keeps the bound."""
    from backend_core import machine

    if isa not in machine.isa_names():
        pytest.skip(f"no {isa} here")
    code = """
import numpy as np, mlx.core as mx
from host_ops import ops, reference as ref
x = mx.random.normal((3, 77), key=mx.random.key(0)) * 4
n = np.array(x)
for y, want in (
    (ops.rms_norm(x[0], 1e-5)(x), ref.rms_norm(n, n[0], 1e-5, "float32")),
    (ops.activation("gelu")(x), ref.gelu(n, "float32")),
    (ops.logsumexp()(x), ref.logsumexp(n, "float32")),
    (ops.rope(64, False, 1e4, 1.0)(x[None], 9), ref.rope(n[None], 64, False, 1e4, 1.0, 9, "float32")),
):
    assert ref.errors(np.array(y), want, "float32").max() <= 1
"""
    env = {**os.environ, "MLX_ACCEL_ISA": isa}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_modules_of_mlx_nn():
    """What plugins are given: nn modules and their attributes."""
    for module, f in (
        (nn.RMSNorm(N), lambda m: ops.rms_norm(m["weight"], m.eps)),
        (nn.LayerNorm(N), lambda m: ops.layer_norm(m.get("weight"), m.get("bias"), m.eps)),
        (nn.LayerNorm(N, affine=False), lambda m: ops.layer_norm(m.get("weight"), m.get("bias"), m.eps)),
        (nn.LayerNorm(N, bias=False), lambda m: ops.layer_norm(m.get("weight"), m.get("bias"), m.eps)),
        (nn.RoPE(N, traditional=True), lambda m: ops.rope(m.dims, m.traditional, m.base, m.scale)),
    ):
        x = normal(1, 2, 5, N)
        assert differ(f(module)(x), module(x)) < 1e-5


IDS = (
    mx.array([[3, 0, 7], [9, 3, 1]]),
    mx.array([-1, 2, -10], dtype=mx.int64),
    mx.array([5], dtype=mx.uint8),
    mx.array(4, dtype=mx.uint32),
    mx.array([[1, 2, 3], [4, 5, 6]], dtype=mx.int32).T,
    mx.arange(400, dtype=mx.uint16) % 10,
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_lookup_has_the_bits_of_stock(bits, group, dtype):
    w, s, b = mx.quantize(normal(10, 192, seed=bits) * 3, group_size=group, bits=bits)
    s, b = s.astype(dtype), b.astype(dtype)
    for result in {dtype, mx.float32}:
        f = ops.lookup(w, s, b, bits, group, result)
        for ids in IDS:
            rows = ids[None] if ids.ndim == 0 else ids  # stock takes no single row
            scales, biases = s[rows].astype(result), b[rows].astype(result)
            want = mx.dequantize(w[rows], scales, biases, group_size=group, bits=bits)
            y, want = f(ids), want[0] if ids.ndim == 0 else want
            assert y.shape == want.shape and y.dtype == want.dtype == result
            y, want = (np.array(a.view(mx.uint8)) for a in (y, want))
            assert y.tobytes() == want.tobytes()
        assert f(mx.zeros((2, 0), dtype=mx.int32)).shape == (2, 0, 192)


def test_lookup_against_the_reference():
    for dtype in FLOATS:
        w, s, b = mx.quantize(normal(10, 96, seed=1), group_size=32, bits=6)
        s, b = s.astype(dtype), b.astype(dtype)
        y = ops.lookup(w, s, b, 6, 32, dtype)(IDS[0])
        name, wide = str(dtype).rpartition(".")[2], [np.array(a.astype(mx.float32)) for a in (s, b)]
        want = ref.lookup(np.array(IDS[0]), np.array(w), *wide, 6, name)
        assert ref.errors(np.array(y.astype(mx.float32)), want, name).max() <= 1


def test_lookup_outside_of_the_table_is_an_error():
    from backend_core import native

    w, s, b = mx.quantize(normal(10, 64, seed=1), group_size=32, bits=4)
    for bad in (10, -11, 2**40):
        assert mx.isnan(ops.lookup(w, s, b, 4, 32, mx.float32)(mx.array([1, bad], dtype=mx.int64))).all()
        assert any("outside of the table" in e for e in native.take_errors())
