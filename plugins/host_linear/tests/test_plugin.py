"""The plugin inside mlx: offers, laziness, compilation, gradients, stock's dtypes."""

import os
import subprocess
import sys
import types

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from host_linear import plugin

from backend_core.sites import LinearSite

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MODES = ("dense", *plugin.MODES)


def layer(n, k, mode="dense", dtype=mx.float32, bias=True, seed=0):
    mx.random.seed(seed)
    made = nn.Linear(k, n, bias=bias) if mode == "dense" else nn.QuantizedLinear(k, n, bias=bias, mode=mode)
    if mode == "dense":
        made.weight = made.weight.astype(dtype)
    if bias:
        made.bias = mx.random.normal((n,)).astype(dtype)
    mx.eval(made.parameters())
    return made


def built(module, mode="dense"):
    n = module.weight.shape[0]
    k = module.weight.shape[1] * (1 if mode == "dense" else 32 // plugin.MODES[mode][0])
    return plugin.build(module, mode=mode, n=n, k=k)


def site(**facts):
    return LinearSite(**({"path": "p", "n": 64, "k": 128, "weight_dtype": "float16"} | facts))


def micro(mode, **facts):
    bits, group_size = plugin.MODES[mode]
    packed = {"mode": mode, "bits": bits, "group_size": group_size, "weight_dtype": "uint32", "scales_dtype": "uint8"}
    return site(**(packed | facts))


def test_offers():
    offer = plugin.select_linear(site(has_bias=True))
    assert offer.name == "dense" and offer.rows == (1, None) and offer.row_invariant
    assert offer.exactness == "rounding" and offer.copies == 0
    assert offer.bytes_moved == 64 * 128 * 2 + 64 * 2 + 4 * 128 + 4 * 64
    for mode, weights in (("mxfp4", 4096 + 64 * 4), ("nvfp4", 4096 + 64 * 8), ("mxfp8", 8192 + 64 * 4)):
        offer = plugin.select_linear(micro(mode))
        assert offer.name == mode and offer.bytes_moved == weights + 4 * 128 + 4 * 64


@pytest.mark.parametrize(
    "declined",
    [
        site(device="metal"),
        site(kind="switch"),
        site(kind="multi"),
        site(mode="affine", bits=4, group_size=64, weight_dtype="uint32"),
        site(weight_dtype="int8"),
        site(x_dtype="float64"),
        micro("mxfp4", group_size=16),
        micro("nvfp4", bits=8),
        micro("mxfp8", scales_dtype="float16"),
    ],
)
def test_declines(declined):
    assert plugin.select_linear(declined) is None


def test_importing_and_asking_is_cheap():
    code = (
        "import sys, host_linear.plugin as p; from backend_core.sites import LinearSite;"
        "assert p.select_linear(LinearSite(path='a', mode='affine')) is None;"
        "assert 'mlx.core' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registered_kernel_exists():
    from backend_core.kernels_registry import Registry

    registry = Registry("host_linear")
    plugin.register_kernels(registry)
    assert [k.symbol for k in registry.kernels] == [plugin.SYMBOL]


def test_manifest_is_accepted():
    from backend_core import manifest

    facts = manifest.read(manifest.find("host_linear"))
    assert facts.hooks == ("register_kernels", "select_linear")
    assert not facts.unmet(("cpu",), ("portable",)) and facts.unmet(("metal",), ())


@pytest.mark.parametrize("mode", MODES)
def test_close_to_stock(mode):
    module = layer(40, 192, mode)
    f = built(module, mode)
    for shape in ((192,), (1, 192), (2, 1, 192), (1, 5, 192), (3, 17, 192), (0, 192)):
        x = mx.random.normal(shape, key=mx.random.key(len(shape)))
        ours, stock = f(x), module(x)
        assert ours.shape == stock.shape and ours.dtype == stock.dtype
        assert ours.size == 0 or mx.abs(ours - stock).max().item() < 2e-5


def test_odd_sizes():
    for n, k in ((1, 1), (3, 7), (17, 1), (1, 200)):
        module = layer(n, k)
        for rows in (1, 4, 40):
            x = mx.random.normal((rows, k), key=mx.random.key(rows))
            assert mx.abs(built(module)(x) - module(x)).max().item() < 1e-5


def test_result_dtypes_are_stocks():
    for mode in MODES:
        for xd in FLOATS:
            for wd in FLOATS if mode == "dense" else FLOATS[:1]:
                for bd in (*FLOATS, None):
                    module = layer(8, 64, mode, wd, bias=bd is not None)
                    if bd is not None:
                        module.bias = module.bias.astype(bd)
                    x = mx.ones((2, 64), dtype=xd)
                    ours, stock = built(module, mode)(x), module(x)
                    assert ours.dtype == stock.dtype
                    assert mx.abs(ours.astype(mx.float32) - stock.astype(mx.float32)).max().item() < 0.1


@pytest.mark.parametrize("mode", MODES)
def test_embedding_as_output_projection(mode):
    module = nn.Embedding(96, 64)
    if mode != "dense":
        module = module.to_quantized(mode=mode)
    facts = site() if mode == "dense" else micro(mode)
    offer = plugin.select_linear(LinearSite(**(facts.facts() | {"kind": "embedding", "n": 96, "k": 64, "aliases": ()})))
    f = offer.build(module)
    x = mx.random.normal((1, 3, 64), key=mx.random.key(1))
    assert mx.abs(f(x) - module.as_linear(x)).max().item() < 1e-5


def test_build_names_what_does_not_fit():
    dense, quantized = layer(8, 64), layer(8, 64, "nvfp4")
    with pytest.raises(ValueError, match="weight is"):
        plugin.build(dense, mode="dense", n=8, k=32)
    with pytest.raises(ValueError, match="scales are"):
        plugin.build({"weight": quantized.weight, "scales": quantized.scales[:4]}, mode="nvfp4", n=8, k=64)
    with pytest.raises(ValueError, match="bias is"):
        plugin.build({"weight": dense.weight, "bias": mx.zeros((1,))}, mode="dense", n=8, k=64)
    with pytest.raises(ValueError, match="global_scale"):
        plugin.build({**quantized, "global_scale": mx.array(1.0)}, mode="nvfp4", n=8, k=64)


def test_lazy_inputs_views_and_transposes():
    module = layer(24, 128, dtype=mx.bfloat16)
    f = built(module)
    x = mx.random.normal((6, 4, 256), key=mx.random.key(3))
    for view in (
        x[:, 1, :128],
        x[..., ::2],
        x.transpose(1, 0, 2)[..., 128:],
        mx.broadcast_to(x[:1, :, :128], (5, 4, 128)),
        x[:, :, 0:128] * 2 + 1,
    ):
        assert mx.abs(f(view) - module(view)).max().item() < 1e-4


def test_sliced_and_transposed_weights():
    whole = mx.random.normal((80, 256), key=mx.random.key(5)).astype(mx.float16)
    x = mx.random.normal((3, 40), key=mx.random.key(6))
    for w in (whole[7:50, 11:51], whole[::2, 3:83:2], whole.T[5:30, :40]):
        f = plugin.build({"weight": w}, mode="dense", n=w.shape[0], k=40)
        assert mx.abs(f(x) - x @ w.T).max().item() < 1e-4


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile(shapeless):
    module = layer(24, 128)
    f = built(module)
    compiled = mx.compile(lambda x: mx.tanh(f(x * 2)) + 1, shapeless=shapeless)
    for rows in (1, 3, 40):
        x = mx.random.normal((rows, 128), key=mx.random.key(rows))
        want = mx.tanh(module(x * 2)) + 1
        got = compiled(x)
        assert got.shape == want.shape and mx.abs(got - want).max().item() < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_equal_bits_in_mlx_too(mode):
    f = built(layer(40, 576, mode, mx.float16), mode)
    x = mx.random.normal((16, 576), key=mx.random.key(9)).astype(mx.float16)
    alone = mx.concatenate([f(x[i : i + 1]) for i in range(16)])
    for rows in (2, 5, 16):
        assert mx.array_equal(f(x[:rows]), alone[:rows])
    assert mx.array_equal(f(x[:, None])[:, 0], alone)


def test_gradients_are_stocks():
    module = layer(24, 128)

    def ours(x, weight, bias):
        return (plugin.build({"weight": weight, "bias": bias}, mode="dense", n=24, k=128)(x) ** 2).sum()

    def stock(x, weight, bias):
        return ((x @ weight.T + bias) ** 2).sum()

    x = mx.random.normal((2, 3, 128), key=mx.random.key(4))
    for argnums in ((0,), (0, 1, 2)):
        got = mx.grad(ours, argnums=argnums)(x, module.weight, module.bias)
        want = mx.grad(stock, argnums=argnums)(x, module.weight, module.bias)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and mx.abs(a - b).max().item() <= 1e-4 * mx.abs(b).max().item()


@pytest.mark.parametrize("mode", plugin.MODES)
def test_gradients_through_codes(mode):
    module = layer(24, 64, mode)
    x = mx.random.normal((3, 64), key=mx.random.key(4))
    got = mx.grad(lambda x: (built(module, mode)(x) ** 2).sum())(x)
    want = mx.grad(lambda x: (module(x) ** 2).sum())(x)
    assert mx.abs(got - want).max().item() <= 1e-4 * mx.abs(want).max().item()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_isa_can_be_limited(isa):
    """MLX_ACCEL_ISA reaches the kernel; every variant keeps the bound."""
    from backend_core import machine

    if isa not in machine.isa_names():
        pytest.skip(f"no {isa} here")
    code = """
import numpy as np, mlx.core as mx
from host_linear import plugin, reference
w, s = mx.quantize(mx.random.normal((40, 320), key=mx.random.key(0)), mode="mxfp4")
h = mx.random.normal((40, 320), key=mx.random.key(1)).astype(mx.float16)
w64 = reference.dequantize64(np.array(w), np.array(s), "mxfp4")
for f, w in ((plugin.build({"weight": w, "scales": s}, mode="mxfp4", n=40, k=320), w64),
             (plugin.build({"weight": h}, mode="dense", n=40, k=320), np.array(h))):
    for rows in (1, 9, 40):
        x = mx.random.normal((rows, 320), key=mx.random.key(rows))
        y64, allowed = reference.bound(np.array(x), w)
        assert (abs(np.array(f(x)) - y64) <= allowed).all(), rows
"""
    env = {**os.environ, "MLX_ACCEL_ISA": isa}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_any_mapping_will_do():
    """`build` needs item access only, so that it can be tested without a module."""
    f = plugin.build(types.MappingProxyType(dict(layer(8, 64, bias=False))), mode="dense", n=8, k=64)
    assert np.isfinite(np.array(f(mx.ones((1, 64))))).all()
