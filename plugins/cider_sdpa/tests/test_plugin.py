"""The plugin in mlx: offers, stock's meaning and dtypes, refusals, compile, gradients, instruction sets."""

import itertools
import os
import subprocess
import sys
import types

import mlx.core as mx
import numpy as np
import pytest
from cider_sdpa import plugin

from backend_core.sites import AttentionSite

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
SCALE = 0.17


def site(**facts):
    known = {"n_heads": 9, "n_kv_heads": 3, "head_dim": 64, "value_dim": 64, "mask": "causal", "cache": "KVCache"}
    return AttentionSite(**({"path": "attention"} | known | facts))


def arrays(b=1, hq=6, hkv=2, rows=3, keys=40, d=32, dv=None, dtypes=(mx.float32,) * 3, seed=0):
    shapes = ((b, hq, rows, d), (b, hkv, keys, d), (b, hkv, keys, dv or d))
    made = [
        mx.random.normal(s, key=k).astype(t)
        for s, k, t in zip(shapes, mx.random.split(mx.random.key(seed), 3), dtypes, strict=True)
    ]
    mx.eval(made)
    return made


def stock(q, k, v, mask=None, sinks=None, scale=SCALE):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def ours(q, k, v, mask=None, sinks=None, scale=SCALE):
    return plugin.build()(q, k, v, None, scale, mask, sinks)


def close(a, b, tolerance=1e-5):
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    return a.shape == b.shape and np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_offer():
    served = ({}, {"kv_dtype": "float16"}, {"q_dtype": "bfloat16", "has_sinks": True}, {"q_len": 1, "mask": "none"})
    for facts in served:
        offer = plugin.select_attention(site(**facts))
        assert offer.name == "cpu" and offer.rows == (1, None) and offer.row_invariant
        assert offer.exactness == "rounding" and offer.copies == 0


@pytest.mark.parametrize(
    "facts",
    [{"device": "metal"}, {"kv_bits": 8}, {"q_dtype": "float64"}, {"kv_dtype": "int8"}, {"n_heads": 10}],
)
def test_declines(facts):
    assert plugin.select_attention(site(**facts)) is None


def test_importing_and_asking_is_cheap():
    code = (
        "import sys, cider_sdpa.plugin as p; from backend_core.sites import AttentionSite;"
        "assert p.select_attention(AttentionSite(path='a', device='cuda')) is None;"
        "assert 'mlx.core' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registered_kernel_exists():
    from backend_core.kernels_registry import Registry

    registry = Registry("cider_sdpa")
    plugin.register_kernels(registry)
    assert [k.symbol for k in registry.kernels] == [plugin.SYMBOL, "cider_quantized_attention", "cider_cache_write"]


def test_manifest_is_accepted():
    from backend_core import manifest

    facts = manifest.read(manifest.find("cider_sdpa"))
    assert facts.hooks == ("register_kernels", "select_attention", "select_op")
    assert not facts.unmet(("cpu",), ("portable",)) and facts.unmet(("metal",), ())


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_close_to_stock(rows):
    bools = mx.random.uniform(shape=(rows, 40), key=mx.random.key(1)) < 0.6
    added = mx.random.normal((1, 6, rows, 40), key=mx.random.key(2))
    sinks = mx.random.normal((6,), key=mx.random.key(3))
    nothing = mx.where(mx.arange(rows)[:, None] == rows - 1, False, bools)
    for b, mask, s in itertools.product((1, 2), (None, "causal", bools, added, nothing), (None, sinks)):
        q, k, v = arrays(b, rows=rows, dv=24)
        got = ours(q, k, v, mask, s)
        assert got.dtype == mx.float32 and close(got, stock(q, k, v, mask, s))
    assert close(ours(*arrays(rows=rows), mx.full((rows, 40), -float("inf"))), mx.full((1, 6, rows, 32), float("nan")))


@pytest.mark.parametrize("rows", [1, 18])
def test_result_dtypes_are_stocks(rows):
    for dtypes in itertools.product(FLOATS, repeat=3):
        q, k, v = arrays(rows=rows, keys=20, dtypes=dtypes)
        got, want = ours(q, k, v), stock(q, k, v)
        assert got.dtype == want.dtype and close(got, want, 0.05)


def test_edges_are_stocks():
    for facts in ({"keys": 0}, {"rows": 0}, {"b": 0}, {"keys": 2, "rows": 5}, {"keys": 1, "rows": 1, "d": 1}):
        q, k, v = arrays(**facts)
        for mask in (None, "causal"):
            got, want = ours(q, k, v, mask), stock(q, k, v, mask)
            assert got.shape == want.shape and close(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_stocks(value):
    for i, rows in itertools.product(range(3), (2, 17)):
        parts = arrays(rows=rows)
        parts[i][0, 0, 1, 2] = value
        got, want = (np.array(f(*parts)) for f in (ours, stock))
        assert np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(np.isinf(got), np.isinf(want))


def test_what_is_not_served():
    f = plugin.build()
    q, k, v = arrays()
    h = mx.float16
    half = [a.astype(h) for a in (q, k, v)]
    triple = mx.quantize(k, group_size=32, bits=8)
    bits = types.SimpleNamespace(bits=8, group_size=32)
    for arguments in (
        (q, triple, triple, bits, SCALE, None),
        (q, triple, triple, None, SCALE, None),
        (q, k, v, bits, SCALE, None),
        (q.astype(mx.int32), k, v, None, SCALE, None),
        (q, k.astype(mx.int32), v, None, SCALE, None),
        (q[0], k, v, None, SCALE, None),
        (q, k, v[:, :, :-1], None, SCALE, None),
        (q, k[..., :-1], v, None, SCALE, None),
        (q[:, :5], k, v, None, SCALE, None),
        (mx.concatenate([q, q]), k, v, None, SCALE, None),
        (q, k, v, None, SCALE, "casual"),
        (q, k, v, None, SCALE, mx.ones((3, 41), dtype=mx.bool_)),
        (q, k, v, None, SCALE, mx.ones((1, 1, 1, 3, 40), dtype=mx.bool_)),
        (q, k, v, None, SCALE, mx.ones((3, 40), dtype=mx.int32)),
        (q, k, v, None, SCALE, np.ones((3, 40), bool)),
        (*half, None, SCALE, mx.ones((3, 40))),
        (*half, None, SCALE, None, mx.ones((6,))),
        (q, k, v, None, SCALE, None, mx.ones((5,))),
        (q, k, v, None, SCALE, None, mx.ones((6,), dtype=mx.int32)),
    ):
        assert f(*arguments) is NotImplemented
    assert close(f(q, k, v, object(), SCALE, None, None), stock(q, k, v))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_cache_slices_and_lazy_inputs(rows):
    q, k, v = arrays(rows=rows, keys=256)
    buffer_k, buffer_v = (mx.concatenate([a, a], axis=2) for a in (k, v))
    for n in (rows, 65, 256, 300):
        part = buffer_k[:, :, :n], buffer_v[:, :, :n]
        assert close(ours(q, *part, "causal"), stock(q, *part, "causal"))
    turned = [mx.transpose(a.transpose(0, 2, 1, 3) * 1, (0, 2, 1, 3)) for a in (q, k, v)]
    assert close(ours(*turned), stock(q, k, v))
    apart = [a.swapaxes(2, 3) * 1 for a in (k, v)]
    assert close(ours(q, *(a.swapaxes(2, 3) for a in apart)), stock(q, k, v))
    assert close(ours(q * 2 + 1, k * 2, v - 1), stock(q * 2 + 1, k * 2, v - 1))


def test_rows_are_equal_bits_in_mlx_too():
    q, k, v = arrays(hq=9, hkv=3, rows=6, keys=200, d=64, dtypes=(mx.float32, mx.float16, mx.float16))
    together = ours(q, k, v, "causal")
    for i in range(6):
        n = 200 - 6 + i + 1
        assert mx.array_equal(ours(q[:, :, i : i + 1], k[:, :, :n], v[:, :, :n]), together[:, :, i : i + 1])


@pytest.mark.parametrize("shapeless", [False, True])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_compile(shapeless, mask):
    f = plugin.build()
    compiled = mx.compile(lambda q, k, v: mx.tanh(f(q * 2, k, v, None, SCALE, mask)) + 1, shapeless=shapeless)
    for rows, keys in ((1, 20), (3, 21), (20, 60)):
        q, k, v = arrays(rows=rows, keys=keys, dv=16)
        got, want = compiled(q, k, v), mx.tanh(stock(q * 2, k, v, mask)) + 1
        assert close(got, want)


@pytest.mark.parametrize("mask", [None, "causal", "added", "bool"])
def test_gradients_are_stocks(mask):
    q, k, v = arrays(rows=3, keys=10)
    sinks = mx.random.normal((6,), key=mx.random.key(3))
    array = {
        "added": mx.random.normal((3, 10), key=mx.random.key(4)),
        "bool": mx.random.uniform(shape=(3, 10), key=mx.random.key(5)) < 0.7,
    }.get(mask, mask)

    def loss(f, m=array):
        return lambda q, k, v, s: (f(q, k, v, m, s) ** 2).sum()

    for argnums in ((0,), (0, 1, 2), (0, 1, 2, 3)):
        got = mx.grad(loss(ours), argnums=argnums)(q, k, v, sinks)
        want = mx.grad(loss(stock), argnums=argnums)(q, k, v, sinks)
        for a, b in zip(got, want, strict=True):
            assert close(a, b, 1e-4)
    if mask == "added":
        got, want = (mx.grad(lambda m, f=f: (f(q, k, v, m) ** 2).sum())(array) for f in (ours, stock))
        assert close(got, want, 1e-4)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_isa_can_be_limited(isa):
    """MLX_ACCEL_ISA reaches the kernel; every variant keeps the bound."""
    from backend_core import machine

    if isa not in machine.isa_names():
        pytest.skip(f"no {isa} here")
    code = """
import numpy as np, mlx.core as mx
from cider_sdpa import plugin, reference
f = plugin.build()
for rows in (1, 9, 33):
    q, k, v = (mx.random.normal(s, key=mx.random.key(rows)) for s in ((1, 6, rows, 64), (1, 2, 99, 64), (1, 2, 99, 48)))
    y64, allowed = reference.bound(np.array(q), np.array(k), np.array(v), 0.125, "causal")
    assert (abs(np.array(f(q, k, v, None, 0.125, "causal", None)) - y64) <= allowed).all(), rows
"""
    env = {**os.environ, "MLX_ACCEL_ISA": isa}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
