"""Scaled dot-product attention in numpy float64, and the largest error that the class ``rounding`` allows.

    y[r] = sum_j p_j v_j,   p = softmax(s),   s_j = scale * (q[r] . k_j) + mask[r, j]

A key that a boolean (or the causal) mask hides has weight 0; where it hides all keys, all weigh the same, as in stock.
An additive mask of -inf gives weight 0, and NaN where all keys have it. A sink is one more score whose value is 0.

The bound, with u = 2^-24 (float32's unit roundoff), d the head dimension and n the number of keys:

    |y - y64| <= 1 ulp(y's dtype)
                 + u * [ 4 sqrt(n) P + sum_j p_j (|v_j| + P) * (4 sqrt(d) A_j + |s_j - m|) ]
                 + 2^-125 sum_j |v_j|

    A_j = sum_i |scale q_i k_ji| + |mask_j|,   m = max_j s_j (and the sink),   P = sum_j p_j |v_j|

Where it comes from. s_j is a sum of d rounded products: its error is at most about sqrt(d) u A_j for random signs and
d u A_j at worst; 4 sqrt(d) is what ``rounding`` allows for a sum of d terms (the kernel's sums have d/16 + 5 roundings,
which is less for every d up to 4096). Subtracting m rounds once more, by u |s_j - m|; running maxima add up to no more,
since they only grow. An error e in an exponent is a relative error e of p_j, which enters y twice: through p_j v_j, and
through the normalisation, by p_j |y| <= p_j P. The exponential itself, the products and the two sums over n keys (of
positive weights, so that the denominator has no cancellation) are relative errors of the terms: 4 sqrt(n) u P. The
bound holds per element of y, and large scores of keys that carry no weight do not loosen it. The last term allows for
exponentials below e^-87 being taken as 0 (subnormal weights would cost more than the rest of the row).

Plain and slow on purpose; nothing here is used at run time.
"""

from __future__ import annotations

import numpy as np

UNIT = 2.0**-24


def visible(mask: object, shape: tuple[int, ...]) -> np.ndarray | None:
    """Which of the scores of `shape` (..., L, S) a boolean or causal mask lets through; None if it hides none."""
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"mask {mask!r} is not 'causal'")
        rows, keys = shape[-2:]
        return np.broadcast_to(np.arange(keys) <= np.arange(rows)[:, None] + (keys - rows), shape)
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
        return np.broadcast_to(mask, shape)
    return None


def dequantize(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """Elements of quantized rows, float64: scale * code + bias.

    words (..., n) uint32, a little-endian bit stream of codes along the last axis; scales and biases (..., groups).
    """
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    grouped = codes.reshape(*scales.shape, -1).astype(np.float64)
    return (grouped * scales.astype(np.float64)[..., None] + biases.astype(np.float64)[..., None]).reshape(codes.shape)


def ulp(y: np.ndarray, dtype: str) -> np.ndarray:
    """The distance between neighbours of `dtype` ("float32", "float16", "bfloat16") at |y|, float64."""
    digits, smallest = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[dtype]
    y = np.abs(np.asarray(y, np.float64))
    _, exponent = np.frexp(np.where(y > 0, y, 2.0**smallest))
    return np.exp2(np.maximum(exponent - digits, smallest).astype(np.float64))


def attention64(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: np.ndarray | str | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """q (B, Hq, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, Hq, L, Dv) float64.

    mask
        None, ``"causal"`` (row i sees keys up to S - L + i), bool (True: visible) or float (added), which broadcasts
        to (B, Hq, L, S).
    sinks
        (Hq,) or None.
    """
    return _evaluate(q, k, v, scale, mask, sinks)[0]


def bound(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: np.ndarray | str | None = None,
    sinks: np.ndarray | None = None,
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """(y64, largest allowed |y - y64|) of the exactness class ``rounding``, for a result of `dtype`."""
    y, slack = _evaluate(q, k, v, scale, mask, sinks)
    return y, ulp(y, dtype) + UNIT * slack


def _evaluate(q, k, v, scale, mask, sinks):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, repeats, axis=1) for a in (k, v))
    d, n = q.shape[-1], k.shape[2]
    if n == 0:
        zero = np.zeros((*q.shape[:3], v.shape[-1]))
        return zero, zero
    with np.errstate(all="ignore"):
        kt = np.swapaxes(k, -1, -2)
        scores = scale * (q @ kt)
        size = np.abs(scale) * (np.abs(q) @ np.abs(kt))
        shown = visible(mask, scores.shape)
        if shown is not None:
            scores = np.where(shown, scores, -np.inf)
            hidden = ~shown.any(axis=-1, keepdims=True)
            if sinks is None:
                scores = np.where(hidden, 0.0, scores)
        elif mask is not None:
            extra = np.asarray(mask, np.float64)
            scores = scores + extra
            size = size + np.abs(np.where(np.isfinite(extra), extra, 0.0))
        top = scores.max(axis=-1, keepdims=True)
        sink = None if sinks is None else np.asarray(sinks, np.float64).reshape(1, -1, 1, 1)
        if sink is not None:
            top = np.maximum(top, sink)
        p = np.exp(scores - top)
        total = p.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - top)
        p = p / total
        y = p @ v
        reach = p @ np.abs(v)
        spread = np.where(p > 0, p * (4 * np.sqrt(d) * size + np.abs(scores - top)), 0.0)
        slack = 4 * np.sqrt(n) * reach + spread @ np.abs(v) + reach * spread.sum(axis=-1, keepdims=True)
        slack = slack + np.abs(v).sum(axis=2, keepdims=True) * (2.0**-125 / UNIT)
    return y, slack
