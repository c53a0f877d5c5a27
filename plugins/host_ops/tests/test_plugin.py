"""The hooks: what is offered, what is declined, and what is built."""

import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from host_ops import plugin

from backend_core.sites import OpSite


def site(op, **facts):
    return OpSite(**({"path": "p", "op": op, "dims": 64} | facts))


def x(*shape):
    return mx.random.normal(shape, key=mx.random.key(3))


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and mx.abs(a - b).max().item() < 1e-5


@pytest.mark.parametrize("x_dtype", plugin.FLOATS)
@pytest.mark.parametrize(
    "facts",
    [
        {"op": "rms_norm", "weight_dtype": "float32"},
        {"op": "rms_norm", "variant": "one_plus", "weight_dtype": "bfloat16"},
        {"op": "activation", "variant": "precise_swiglu"},
        {"op": "layer_norm", "weight_dtype": "float16"},
        {"op": "layer_norm"},
        {"op": "rope", "rope_dims": 64, "rope_base": 1e4},
        {"op": "softcap", "variant": "30.0"},
        {"op": "softcap"},
        {"op": "residual"},
        *({"op": "activation", "variant": v} for v in plugin.ACTIVATIONS),
        *({"op": "logits", "variant": v} for v in plugin.LOGITS),
        {"op": "lookup", "variant": "affine", "weight_dtype": "float16", "out_dtype": "float32"},
    ],
)
def test_offers(facts, x_dtype):
    offer = plugin.select_op(site(**facts, x_dtype=x_dtype))
    assert offer.name == "native" and offer.rows == (1, None) and offer.row_invariant
    assert offer.exactness == ("bitwise" if facts["op"] == "lookup" else "rounding")
    assert offer.bytes_moved >= 64 * (4 if x_dtype == "float32" else 2)


@pytest.mark.parametrize(
    "facts",
    [
        {"op": "rms_norm", "device": "metal"},
        {"op": "rms_norm", "variant": "two_plus"},
        {"op": "rms_norm", "x_dtype": "float64"},
        {"op": "rms_norm", "weight_dtype": "int8"},
        {"op": "activation", "variant": "relu"},
        {"op": "activation"},
        {"op": "logits", "variant": "topk"},
        {"op": "rope", "rope_dims": 7},
        {"op": "rope"},
        {"op": "softcap", "variant": "many"},
        {"op": "softcap", "variant": "-1"},
        {"op": "lookup"},
        {"op": "lookup", "variant": "affine", "weight_dtype": "float16", "out_dtype": "bfloat16"},
        {"op": "something"},
    ],
)
def test_declines(facts):
    assert plugin.select_op(site(**facts)) is None


def test_bytes_moved():
    assert plugin.select_op(site("rms_norm", weight_dtype="float16")).bytes_moved == 2 * 64 * 4 + 64 * 2
    assert plugin.select_op(site("activation", variant="swiglu")).bytes_moved == 3 * 64 * 4
    assert plugin.select_op(site("logits", variant="argmax")).bytes_moved == 64 * 4
    assert plugin.select_op(site("rope", rope_dims=64)).copies == 256


def test_built_callables_do_what_modules_do():
    for module, facts in (
        (nn.RMSNorm(64), {"op": "rms_norm"}),
        (nn.LayerNorm(64), {"op": "layer_norm"}),
        (nn.LayerNorm(64, affine=False), {"op": "layer_norm"}),
    ):
        f = plugin.select_op(site(**facts)).build(module)
        assert same(f(x(2, 3, 64)), module(x(2, 3, 64)))
    rope = nn.RoPE(64, base=1e5)
    f = plugin.select_op(site("rope", rope_dims=64)).build(rope)
    assert same(f(x(1, 9, 2, 64), offset=12), rope(x(1, 9, 2, 64), offset=12))
    assert same(f(x(1, 9, 2, 64)), rope(x(1, 9, 2, 64)))


class Weighted(dict):
    eps = 1e-5

    def __init__(self):
        self["weight"] = (mx.arange(64) / 64 - 0.5).astype(mx.float16)


def test_built_functions():
    y = x(3, 64)
    for variant, stock in (("swiglu", nn.silu), ("geglu", nn.gelu), ("geglu_approx", nn.gelu_approx)):
        f = plugin.select_op(site("activation", variant=variant)).build(None)
        assert same(f(y, y + 1), stock(y) * (y + 1))
    assert same(plugin.select_op(site("activation", variant="silu")).build(None)(y), nn.silu(y))
    precise = plugin.select_op(site("activation", variant="precise_swiglu")).build(None)
    half = y.astype(mx.float16)
    for h, gate, z in ((y, y, y + 1), (half, y, y + 1), (half, half, half)):
        assert precise(h, gate, z).dtype == h.dtype
        assert mx.abs(precise(h, gate, z) - (nn.silu(gate.astype(mx.float32)) * z).astype(h.dtype)).max() < 4e-3
    norm = plugin.select_op(site("rms_norm", variant="one_plus", out_dtype="float16")).build(Weighted())
    assert norm(half).dtype == mx.float16
    assert mx.abs(norm(half) - mx.fast.rms_norm(half, 1 + Weighted()["weight"], 1e-5)).max() < 4e-3
    assert same(plugin.select_op(site("softcap", variant="2.5")).build(None)(y), mx.tanh(y / 2.5) * 2.5)
    assert same(plugin.select_op(site("softcap")).build(None)(2.5, y), mx.tanh(y / 2.5) * 2.5)
    assert same(plugin.select_op(site("residual")).build(None)(y, y), y + y)
    largest = plugin.select_op(site("logits", variant="argmax")).build(None)(y)
    assert largest.dtype == mx.uint32 and mx.array_equal(largest, mx.argmax(y, axis=-1))
    assert same(plugin.select_op(site("logits", variant="softmax")).build(None)(y), mx.softmax(y, axis=-1))


def test_importing_and_asking_is_cheap():
    code = (
        "import sys, host_ops.plugin as p; from backend_core.sites import OpSite;"
        "assert p.select_op(OpSite(path='a', op='other')) is None;"
        "assert p.select_op(OpSite(path='a', op='rms_norm')) is not None;"
        "assert 'mlx.core' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registered_kernels_exist():
    import ctypes

    from backend_core.kernels_registry import Registry

    registry = Registry("host_ops")
    plugin.register_kernels(registry)
    library = ctypes.CDLL(str(plugin.library()))
    for name in plugin.KERNELS:
        assert getattr(library, f"host_ops_{name}")


def test_what_is_built_is_freed():
    import gc
    import weakref

    weight = nn.RMSNorm(64)
    gone = weakref.ref(weight)
    f = plugin.select_op(site("rms_norm")).build(weight)
    f(x(1, 64))
    del f, weight
    gc.collect()
    assert gone() is None
