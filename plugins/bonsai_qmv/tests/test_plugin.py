"""The plugin inside mlx: offers, laziness, compilation, gradients, stock's dtypes."""

import os
import subprocess
import sys
import types

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bonsai_qmv import plugin, reference

from backend_core.sites import LinearSite

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def layer(n, k, bits=4, group=64, dtype=mx.float32, bias=True, seed=0):
    made = nn.QuantizedLinear(k, n, bias=bias, group_size=group, bits=bits)
    w = mx.random.normal((n, k), key=mx.random.key(seed)) * 0.1
    made.weight, made.scales, made.biases = mx.quantize(w.astype(dtype), group, bits)
    if bias:
        made.bias = mx.random.normal((n,), key=mx.random.key(seed + 1)).astype(dtype)
    mx.eval(made.parameters())
    return made


def site(**facts):
    affine = {
        "mode": "affine",
        "bits": 4,
        "group_size": 64,
        "weight_dtype": "uint32",
        "scales_dtype": "float16",
    }
    return LinearSite(**({"path": "p", "n": 64, "k": 128} | affine | facts))


def built(module, bits=4, group=64):
    return plugin.build(module, bits=bits, group_size=group, n=module.scales.shape[0])


def test_offer():
    offer = plugin.select_linear(site())
    assert offer.name == "affine" and offer.rows == (1, None) and offer.row_invariant
    assert offer.exactness == "rounding" and offer.copies == 0
    assert offer.bytes_moved == 64 * 128 // 2 + 2 * 64 * 2 * 2 + 4 * 128 + 4 * 64


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "switch"},
        {"kind": "multi"},
        {"mode": "mxfp4"},
        {"mode": "dense", "bits": 0},
        {"bits": 7},
        {"group_size": 16},
        {"x_dtype": "float64"},
    ],
)
def test_declines(facts):
    assert plugin.select_linear(site(**facts)) is None


def test_importing_and_asking_is_cheap():
    code = (
        "import sys, bonsai_qmv.plugin as p; from backend_core.sites import LinearSite;"
        "assert p.select_linear(LinearSite(path='a', mode='dense')) is None;"
        "assert 'mlx.core' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registered_kernel_exists():
    from backend_core.kernels_registry import Registry

    registry = Registry("bonsai_qmv")
    plugin.register_kernels(registry)
    assert [k.symbol for k in registry.kernels if k.device == "cpu"] == [plugin.SYMBOL]
    assert {k.device for k in registry.kernels} == {"cpu", "metal", "cuda"}


def test_manifest_is_accepted():
    from backend_core import manifest

    facts = manifest.read(manifest.find("bonsai_qmv"))
    assert facts.hooks == ("register_kernels", "select_linear")
    assert not facts.unmet(("cpu",), ("portable",)) and not facts.unmet(("cpu", "metal"), ())


@pytest.mark.parametrize("bits", reference.BITS)
def test_close_to_stock(bits):
    module = layer(40, 192, bits, 64)
    f = built(module, bits)
    for shape in ((192,), (1, 192), (2, 1, 192), (1, 5, 192), (3, 7, 192), (0, 192)):
        x = mx.random.normal(shape, key=mx.random.key(len(shape)))
        ours, stock = f(x), module(x)
        assert ours.shape == stock.shape and ours.dtype == stock.dtype
        assert ours.size == 0 or mx.abs(ours - stock).max().item() < 1e-5


def test_result_dtypes_are_stocks():
    for xd in FLOATS:
        for sd in FLOATS:
            for bd in (*FLOATS, None):
                module = layer(8, 64, dtype=sd, bias=bd is not None)
                if bd is not None:
                    module.bias = module.bias.astype(bd)
                x = mx.ones((2, 64), dtype=xd)
                ours, stock = built(module)(x), module(x)
                assert ours.dtype == stock.dtype
                assert mx.abs(ours.astype(mx.float32) - stock.astype(mx.float32)).max().item() < 0.1


def test_embedding_as_output_projection():
    module = nn.QuantizedEmbedding(96, 64, group_size=32, bits=4)
    offer = plugin.select_linear(site(kind="embedding", n=96, k=64, group_size=32, scales_dtype="float32"))
    f = offer.build(module)
    x = mx.random.normal((1, 3, 64), key=mx.random.key(1))
    assert mx.abs(f(x) - module.as_linear(x)).max().item() < 1e-5


def test_build_names_what_does_not_fit():
    module = layer(8, 64)
    with pytest.raises(ValueError, match="weight is"):
        plugin.build(module, bits=8, group_size=64, n=8)
    with pytest.raises(ValueError, match="scales"):
        broken = {"weight": module.weight, "scales": module.scales, "biases": module.biases[:4]}
        plugin.build(broken, bits=4, group_size=64, n=8)


def test_lazy_inputs_views_and_transposes():
    module = layer(24, 128)
    f = built(module)
    x = mx.random.normal((6, 4, 256), key=mx.random.key(3))
    for view in (
        x[:, 1, :128],
        x[..., ::2],
        x.transpose(1, 0, 2)[..., 128:],
        mx.broadcast_to(x[:1, :, :128], (5, 4, 128)),
        x[:, :, 0:128] * 2 + 1,
    ):
        assert mx.abs(f(view) - module(view)).max().item() < 1e-5


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile(shapeless):
    module = layer(24, 128)
    f = built(module)
    compiled = mx.compile(lambda x: mx.tanh(f(x * 2)) + 1, shapeless=shapeless)
    for rows in (1, 3, 20):
        x = mx.random.normal((rows, 128), key=mx.random.key(rows))
        want = mx.tanh(module(x * 2)) + 1
        got = compiled(x)
        assert got.shape == want.shape and mx.abs(got - want).max().item() < 1e-5


def test_rows_are_equal_bits_in_mlx_too():
    f = built(layer(40, 576, dtype=mx.float16))
    x = mx.random.normal((16, 576), key=mx.random.key(9)).astype(mx.float16)
    alone = mx.concatenate([f(x[i : i + 1]) for i in range(16)])
    for rows in (2, 5, 16):
        assert mx.array_equal(f(x[:rows]), alone[:rows])
    assert mx.array_equal(f(x[:, None])[:, 0], alone)


def test_gradients_are_stocks():
    module = layer(24, 128)
    params = [module.scales, module.biases, module.bias]

    def ours(x, scales, biases, bias):
        parts = {"weight": module.weight, "scales": scales, "biases": biases, "bias": bias}
        return (plugin.build(parts, bits=4, group_size=64, n=24)(x) ** 2).sum()

    def stock(x, scales, biases, bias):
        return ((mx.quantized_matmul(x, module.weight, scales, biases, True, 64, 4) + bias) ** 2).sum()

    x = mx.random.normal((2, 3, 128), key=mx.random.key(4))
    every = (0, 1, 2, 3)
    for argnums in ((0,), every):
        got = mx.grad(ours, argnums=argnums)(x, *params)
        want = mx.grad(stock, argnums=argnums)(x, *params)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and mx.abs(a - b).max().item() <= 1e-4 * mx.abs(b).max().item()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_isa_can_be_limited(isa):
    """MLX_ACCEL_ISA reaches the kernel; every variant keeps the bound."""
    from backend_core import machine

    if isa not in machine.isa_names():
        pytest.skip(f"no {isa} here")
    code = """
import numpy as np, mlx.core as mx
from bonsai_qmv import plugin, reference
w, s, b = mx.quantize(mx.random.normal((40, 320), key=mx.random.key(0)), 64, 4)
f = plugin.build({"weight": w, "scales": s, "biases": b}, bits=4, group_size=64, n=40)
for rows in (1, 9, 33):
    x = mx.random.normal((rows, 320), key=mx.random.key(rows))
    w64 = reference.dequantize64(np.array(w), np.array(s), np.array(b), 4)
    y64, allowed = reference.bound(np.array(x), w64)
    assert (abs(np.array(f(x)) - y64) <= allowed).all(), rows
"""
    env = {**os.environ, "MLX_ACCEL_ISA": isa}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_any_mapping_will_do():
    """`build` needs item access only, so that it can be tested without a module."""
    module = layer(8, 64, bias=False)
    f = plugin.build(types.MappingProxyType(dict(module)), bits=4, group_size=64, n=8)
    assert np.isfinite(np.array(f(mx.ones((1, 64))))).all()
