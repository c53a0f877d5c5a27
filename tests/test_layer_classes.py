"""Layer classes of plugins: found, verified, raced, installed and restored like stock's."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from backend_core import Offer, PluginHost, Policy, accelerate, hookimpl, layer_classes, restore
from backend_core.install import slot_of
from backend_core.layer_classes import LayerFormat, layer_class
from backend_core.reference import Reference
from backend_core.walk import activations_dtype, find_linears

GROUP = 32


def as_affine(weight, scales):
    """Signed bytes times scales, as 8-bit affine codes."""
    words = np.ascontiguousarray((weight.astype(np.int16) + 128).astype(np.uint8)).view(np.uint32)
    return words, scales, scales * -128.0


FORM = LayerFormat("signed_bytes", 8, as_affine)


class _Held(nn.Module):
    def __init__(self, n: int, k: int, seed: int):
        super().__init__()
        self.group_size = GROUP
        self.weight = mx.random.randint(-127, 128, (n, k), key=mx.random.key(seed)).astype(mx.int8)
        self.scales = mx.random.uniform(0.001, 0.01, (n, k // GROUP), key=mx.random.key(seed + 1)).astype(mx.float16)

    def matrix(self):
        n, k = self.weight.shape
        grouped = self.weight.reshape(n, -1, GROUP).astype(mx.float32) * self.scales[..., None].astype(mx.float32)
        return grouped.reshape(n, k)

    def product(self, x):
        return (x @ self.matrix().T).astype(mx.result_type(x, self.scales))


@layer_class("linear", FORM)
class SignedLinear(_Held):
    def __call__(self, x):
        return self.product(x)


@layer_class("embedding", FORM)
class SignedEmbedding(_Held):
    def rows(self, indices, dtype):
        return self.matrix()[indices].astype(dtype)

    def __call__(self, indices):
        return self.rows(indices, self.scales.dtype)

    def as_linear(self, x):
        return self.product(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = SignedEmbedding(96, 64, 1)
        self.up = SignedLinear(128, 64, 3)
        self.down = SignedLinear(64, 128, 5)

    def __call__(self, tokens):
        h = self.embed(tokens)
        return self.embed.as_linear(h + self.down(nn.relu(self.up(h))))


class Plugin:
    """Serves the format with the matrix made once; `factor` is the fault in it."""

    def __init__(self, factor: float = 1.0):
        self.factor = factor

    @hookimpl
    def select_linear(self, site):
        if site.mode != "signed_bytes":
            return None

        def build(module):
            w = (module.matrix() * self.factor).T
            mx.eval(w)

            def product(x):
                # One sum a row, so that rows do not depend on each other.
                y = mx.sum(x[..., None] * w, axis=-2) if x.size <= 16 * x.shape[-1] else x @ w
                return y.astype(mx.result_type(x, module.scales))

            return product

        return Offer("made", build, row_invariant=True)


def host_with(plugin: object, **policy: str) -> PluginHost:
    host = PluginHost(Policy(deterministic=True, activations="model", **policy), devices=("cpu",), entry_points=[])
    host.register(plugin, "signed")
    return host


def test_sites_tell_the_format():
    model = Model()
    sites = {f.site.path: f.site for f in find_linears(model)}
    assert set(sites) == {"embed", "up", "down"}
    assert (sites["up"].mode, sites["up"].bits, sites["up"].group_size) == ("signed_bytes", 8, GROUP)
    assert (sites["up"].n, sites["up"].k, sites["embed"].kind) == (128, 64, "embedding")
    assert activations_dtype(model) == "float16"


def test_the_reference_is_the_formats_own():
    layer = SignedLinear(40, 96, 7)
    x = np.random.default_rng(0).standard_normal((3, 96))
    y, size = Reference(dict(layer), "signed_bytes", 8, GROUP).product(x)
    w = np.array(layer.matrix()).astype(np.float64)
    assert np.abs(y - x @ w.T).max() < 1e-5 and np.abs(size - np.abs(x) @ np.abs(w).T).max() < 1e-4


def test_offers_are_installed_and_taken_back():
    model = Model()
    tokens = mx.array([[1, 5, 90]])
    before = model(tokens)
    host = host_with(Plugin())
    report = accelerate(model, host.policy, host=host)
    assert {d.site.path: d.chosen for d in report.decisions} == dict.fromkeys(("embed", "up", "down"), "signed/made")
    assert isinstance(model.up, SignedLinear) and type(model.up).__name__ == "SignedLinear"
    assert mx.abs(model(tokens).astype(mx.float32) - before.astype(mx.float32)).max().item() < 0.05
    assert restore(model) == 3 and type(model.up) is SignedLinear
    assert mx.array_equal(model(tokens), before)


def test_wrong_offers_are_found_out():
    model = Model()
    host = host_with(Plugin(1.001))
    report = accelerate(model, host.policy, host=host)
    assert all(d.chosen == "stock" and "wrong result" in d.losers[0].reason for d in report.decisions)
    assert slot_of(model.up) is None


def test_float32_activations_start_at_the_embedding():
    model = Model()
    host = PluginHost(Policy(activations="float32", deterministic=True), devices=("cpu",), entry_points=[])
    accelerate(model, host.policy, host=host)
    rows = model.embed(mx.array([3, 4]))
    assert rows.dtype == mx.float32 and mx.array_equal(rows, model.embed.matrix()[mx.array([3, 4])])
    restore(model)
    assert model.embed(mx.array([3])).dtype == mx.float16


def test_refusals():
    with pytest.raises(ValueError, match="'dense' is taken"):
        layer_class("linear", LayerFormat("dense", 8, as_affine))
    with pytest.raises(ValueError, match="'affine' is taken"):
        layer_class("linear", LayerFormat("affine", 8, as_affine))
    with pytest.raises(ValueError, match="'signed_bytes' is taken"):
        layer_class("linear", LayerFormat("signed_bytes", 4, as_affine))
    with pytest.raises(ValueError, match="none of linear"):
        layer_class("matrix", FORM)
    assert layer_classes.format_of(nn.Linear) is None and layer_classes.format_named("affine") is None
