"""The reference itself: against its definition written out in loops, and against stock."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from cider_sdpa import reference as ref


def written_out(q, k, v, scale, mask, sinks):
    b, hq, rows, _ = q.shape
    keys = k.shape[2]
    y = np.zeros((b, hq, rows, v.shape[3]))
    for n, h, i in itertools.product(range(b), range(hq), range(rows)):
        g = h // (hq // k.shape[1])
        scores, hidden = [], []
        for j in range(keys):
            s = scale * sum(float(a) * float(c) for a, c in zip(q[n, h, i], k[n, g, j], strict=True))
            gone = False
            if isinstance(mask, str):
                gone = j > keys - rows + i
            elif mask is not None:
                m = np.broadcast_to(mask, (b, hq, rows, keys))[n, h, i, j]
                gone = m.dtype == bool and not m
                s += 0 if m.dtype == bool else float(m)
            scores.append(s)
            hidden.append(gone)
        if all(hidden) and sinks is None:
            scores, hidden = [0.0] * keys, [False] * keys
        weights = [0.0 if gone else np.exp(s) for s, gone in zip(scores, hidden, strict=True)]
        total = sum(weights) + (0.0 if sinks is None else np.exp(float(sinks[h])))
        y[n, h, i] = sum(w * v[n, g, j] for j, w in enumerate(weights)) / total
    return y


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("sinks", [False, True])
def test_definition(mask, sinks):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 4)))
    arrays = {"none": None, "bool": rng.random((4, 3, 6)) < 0.5, "additive": rng.random((3, 6))}
    array = arrays.get(mask, mask)
    if mask == "bool":
        array[1, 1] = False
    s = rng.standard_normal(4) if sinks else None
    got = ref.attention64(q, k, v, 0.4, array, s)
    assert np.abs(got - written_out(q, k, v, 0.4, array, s)).max() < 1e-12


def test_stock_in_float32_is_within_the_bound():
    for seed, mask in enumerate((None, "causal", "bool", "additive")):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 6, 5, 64), (1, 2, 90, 64), (1, 2, 90, 64)))
        array = {"bool": rng.random((5, 90)) < 0.5, "additive": rng.standard_normal((5, 90)).astype(np.float32)}.get(
            mask, mask
        )
        y = mx.fast.scaled_dot_product_attention(
            mx.array(q), mx.array(k), mx.array(v), scale=0.125,
            mask=mx.array(array) if isinstance(array, np.ndarray) else array,
        )  # fmt: skip
        y64, allowed = ref.bound(q, k, v, 0.125, array)
        assert (np.abs(np.array(y) - y64) <= allowed).all()


def test_the_bound_is_not_loose():
    """A tenth off one key of 300, or half precision inside, does not pass."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((1, 1, 1, 64), (1, 1, 300, 64), (1, 1, 300, 8)))
    y64, allowed = ref.bound(q, k, v, 0.125)
    assert allowed.max() < 3e-5
    for lost in (k.copy(), v.copy()):
        lost[0, 0, 17] *= 1.1
        other = ref.attention64(q, lost if lost.shape == k.shape else k, lost if lost.shape == v.shape else v, 0.125)
        assert (np.abs(other - y64) > allowed).any()
    half = ref.attention64(q.astype(np.float16), k, v, 0.125)
    assert (np.abs(half - y64) > allowed).any()


def test_no_keys():
    y64, allowed = ref.bound(np.ones((1, 2, 3, 4)), np.ones((1, 1, 0, 4)), np.ones((1, 1, 0, 5)), 1.0)
    assert y64.shape == (1, 2, 3, 5) and not y64.any() and allowed.max() < 1e-40


def test_masks_have_names():
    with pytest.raises(ValueError, match="'casual'"):
        ref.attention64(np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2)), 1.0, "casual")
