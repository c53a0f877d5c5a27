"""Rotary embeddings with frequencies of their own: read, verified, installed, joined, restored."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
from test_models import close, snapshot

from backend_core import Policy, accelerate, install, native, reference_ops, restore
from backend_core.report import STOCK
from backend_core.rope import is_rope, rotation_of

POLICY = Policy(deterministic=True, activations="model")
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0,
        "short_factor": [1.0] * 16, "long_factor": [1.0 + i / 8 for i in range(16)]}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def made(kind: str, host: str = "mlx_lm", dims: int = 32):
    utils = importlib.import_module(f"{host}.models.rope_utils")
    if kind == "proportional":
        return utils.ProportionalRoPE(dims, dims // 2, base=1e4, factor=2.0)
    scaling = {"llama3": LLAMA3, "yarn": YARN, "longrope": LONG, "dynamic": DYNAMIC}[kind]
    return utils.initialize_rope(dims, 1e4, kind == "yarn", scaling, max_position_embeddings=256)


KINDS = ("llama3", "yarn", "longrope", "proportional")


@pytest.mark.parametrize("host", ["mlx_lm", "mlx_vlm"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_modules_compute(kind, host):
    pytest.importorskip(host)
    module = made(kind, host)
    rotation = rotation_of(module)
    if (kind, host) == ("longrope", "mlx_vlm"):
        assert rotation is None and not is_rope(type(module))  # its frequencies depend on the length
        return
    assert rotation.dims == 32 and not rotation.plain and is_rope(type(module))
    assert (rotation.factor != 1.0) == (kind in ("yarn", "longrope"))
    x = mx.random.normal((2, 3, 5, 40), key=mx.random.key(0))
    y64 = reference_ops.rope_by_frequencies(
        np.array(x).astype(np.float64), rotation.frequencies, rotation.factor, rotation.traditional, 7
    )
    # Stock's angles are float32.
    assert np.abs(np.array(module(x, offset=7)) - y64).max() < 2e-5
    assert np.array_equal(y64[..., 32:], np.array(x)[..., 32:])


def test_plain_and_unknown_ones():
    rotation = rotation_of(nn.RoPE(16, traditional=True, base=100.0, scale=0.5))
    assert rotation.plain and rotation.traditional and rotation.dims == 16
    assert np.allclose(rotation.frequencies, 0.5 * 100.0 ** (-np.arange(8) / 8))
    assert rotation_of(nn.Linear(4, 4)) is None and rotation_of(made("dynamic")) is None

    class Other(type(made("llama3"))):
        pass

    other = made("llama3")
    other.__class__ = Other
    assert rotation_of(other) is None


def test_equal_frequencies_are_one_signature():
    one, two = rotation_of(made("llama3")), rotation_of(made("llama3"))
    assert one.content == two.content != rotation_of(made("proportional")).content


needs_plugins = [
    pytest.mark.skipif(not native.available(), reason=native.status().reason or "native"),
    pytest.mark.usefixtures("installed_plugins"),
]


@pytest.fixture
def llama():
    pytest.importorskip("host_ops")
    models = []

    def make(**changes):
        models.append(tiny_models.build("llama", bits=4, **{"max_position_embeddings": 256, **changes}))
        return models[-1]

    yield make
    for m in models:
        restore(m)


class TestModels:
    pytestmark = needs_plugins

    @pytest.mark.parametrize("scaling", [LLAMA3, YARN, LONG], ids=lambda s: s["rope_type"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_installed_joined_and_restored(self, llama, scaling, dtype):
        m = llama(rope_scaling=scaling, dtype=dtype)
        before, want = snapshot(m), tiny_models.logits(m)
        report = accelerate(m, POLICY)
        ropes = [d for d in report.decisions if getattr(d.site, "op", "") == "rope"]
        assert len(ropes) == 2 and {d.chosen for d in ropes} == {"host_ops/native"}
        assert len({d.site.signature for d in ropes}) == 1 and ropes[0].site.rope_freqs
        if dtype == "float32":
            close(tiny_models.logits(m), want)
        if importlib.util.find_spec("cider_sdpa"):
            assert "joined: 2 layer" in report.line()
        restore(m)
        assert snapshot(m) == before
        for x, y in zip(tiny_models.logits(m), want, strict=True):
            assert mx.array_equal(x, y)

    def test_frequencies_that_change_stay_stock(self, llama):
        m = llama(rope_scaling=DYNAMIC)
        want = tiny_models.logits(m)
        report = accelerate(m, POLICY)
        assert not [d for d in report.decisions if getattr(d.site, "op", "") == "rope"]
        close(tiny_models.logits(m), want)

    def test_other_ways_to_call_are_stocks(self, llama):
        m = llama(rope_scaling=YARN)
        rope = m.layers[0].self_attn.rope
        x = mx.random.normal((2, 3, 4, 32), key=mx.random.key(0))
        calls = [
            lambda: rope(x, 3, inverse=True),
            lambda: rope(x, offset=3, scale=0.5),
            lambda: rope(x, mx.array([3, 9])),
        ]
        want = [f() for f in calls]
        accelerate(m, POLICY)
        assert install.slot_of(rope) is not None
        for f, y in zip(calls, want, strict=True):
            assert mx.array_equal(f(), y)

    def test_rows_do_not_depend_on_each_other(self, llama):
        m = llama(rope_scaling=LLAMA3)
        accelerate(m, POLICY)
        rope = m.layers[0].self_attn.rope
        x = mx.random.normal((1, 6, 16, 32), key=mx.random.key(0))
        whole = np.array(rope(x, offset=100))
        for i in range(16):
            assert np.array(rope(x[:, :, i : i + 1], offset=100 + i)).tobytes() == whole[:, :, i : i + 1].tobytes()

    def test_replaced_frequencies_run_stock(self, llama):
        m = llama(rope_scaling=LLAMA3)
        rope = m.layers[0].self_attn.rope
        report = accelerate(m, POLICY)
        rope._freqs = rope._freqs * 2
        x = mx.random.normal((1, 2, 3, 32), key=mx.random.key(0))
        want = mx.fast.rope(x, 32, traditional=False, base=None, scale=1.0, offset=4, freqs=rope._freqs)
        assert mx.array_equal(rope(x, offset=4), want)
        assert any("were replaced" in n for n in report.notes)

    def test_gradients_are_stocks(self, llama):
        m = llama(rope_scaling=YARN)
        rope = m.layers[0].self_attn.rope
        x = mx.random.normal((1, 2, 3, 32), key=mx.random.key(0))
        weights = mx.random.normal(x.shape, key=mx.random.key(1))

        def loss(x):
            return (rope(x, offset=5) * weights).sum()

        want = mx.grad(loss)(x)
        accelerate(m, POLICY)
        assert mx.allclose(mx.grad(loss)(x), want, atol=1e-5)

    def test_wrong_ones_stay_stock(self, llama, monkeypatch):
        from host_ops import ops

        right = ops.rope_by_frequencies
        monkeypatch.setattr(ops, "rope_by_frequencies", lambda f, *a: right(f * (1 + 1e-6), *a))
        m = llama(rope_scaling=LLAMA3)
        report = accelerate(m, POLICY)
        [first, _] = [d for d in report.decisions if getattr(d.site, "op", "") == "rope"]
        assert first.chosen == STOCK and any("rounding bound" in loser.reason for loser in first.losers)
