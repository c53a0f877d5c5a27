"""The reference itself, against mlx in float32 and against closed forms."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from host_ops import reference as ref

RNG = np.random.default_rng(0)
X = RNG.normal(0, 2, (3, 40)).astype(np.float32)
W, B = RNG.normal(size=(2, 40)).astype(np.float32)


def close(result, theirs, much=1e-5):
    assert np.abs(result[0] - np.array(theirs)).max() < much
    assert (result[1] > 0).all() and result[1].max() < 1e-4


@pytest.mark.parametrize("weight", [None, W])
@pytest.mark.parametrize("bias", [None, B])
def test_norms_agree_with_mlx(weight, bias):
    w, b = (None if a is None else mx.array(a) for a in (weight, bias))
    close(ref.rms_norm(X, weight, 1e-5, "float32"), mx.fast.rms_norm(mx.array(X), w, 1e-5))
    close(ref.layer_norm(X, weight, bias, 1e-5, "float32"), mx.fast.layer_norm(mx.array(X), w, b, 1e-5))


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_agrees_with_mlx(traditional):
    x = RNG.normal(size=(2, 3, 4, 20)).astype(np.float32)
    for offset in (0, 9, np.array([3, 8])):
        theirs = mx.fast.rope(
            mx.array(x), 16, traditional=traditional, base=1e4, scale=0.5,
            offset=offset if isinstance(offset, int) else mx.array(offset),
        )  # fmt: skip
        close(ref.rope(x, 16, traditional, 1e4, 0.5, offset, "float32"), theirs)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_approx", "gelu_fast_approx"])
def test_activations_agree_with_mlx(name):
    close(getattr(ref, name)(X, "float32"), getattr(nn, name)(mx.array(X)))
    if name != "gelu_fast_approx":
        y = RNG.normal(size=X.shape).astype(np.float32)
        close(getattr(ref, name)(X, "float32", y), getattr(nn, name)(mx.array(X)) * mx.array(y))


def test_logits_agree_with_mlx():
    close(ref.logsumexp(X, "float32"), mx.logsumexp(mx.array(X), axis=-1, keepdims=True))
    close(ref.softmax(X, "float32"), mx.softmax(mx.array(X), axis=-1))
    close(ref.softcap(X, 3.0, "float32"), mx.tanh(mx.array(X) / 3.0) * 3.0)


def test_argmax_agrees_with_mlx_on_ties_and_nan():
    nan = math.nan
    for row in ([1, 3, 3], [nan, 1, nan, 9], [1, nan, 2, nan], [-0.0, 0.0], [-math.inf] * 3, [1] * 20 + [nan, 5]):
        x = np.array([row], np.float32)
        assert ref.argmax(x)[0] == mx.argmax(mx.array(x), axis=-1).item()


def test_ulp():
    for dtype, one in (("float32", -23), ("float16", -10), ("bfloat16", -7)):
        assert ref.ulp(np.array([1.0]), dtype) == 2.0**one
    assert ref.ulp(np.array([0.0, np.nan, np.inf]), "float16").max() == 2.0**-24


def test_errors():
    y64, allowed = np.array([1.0, np.nan, np.inf, 65519.0, 65530.0, 1e6]), np.full(6, 32.0)
    good = np.array([33.0, np.nan, np.inf, np.inf, np.inf, np.inf])
    assert (ref.errors(good, (y64, allowed), "float16") <= 1).all()
    bad = np.array([40.0, 1.0, 65504.0, np.nan, -np.inf, 65504.0])
    assert (ref.errors(bad, (y64, allowed), "float16") > 1).all()
