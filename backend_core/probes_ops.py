"""Probes of op sites that are modules: norms and rotary embeddings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from . import reference, reference_ops
from .errors import VerificationError
from .offers import Offer
from .probe_base import MOST_ROWS, Probe, compare, inputs, require_form, require_same_rows, sequences
from .rope import rotation_of
from .sites import OpSite, itemsize

#: Heads and position at which rotary embeddings are probed.
HEADS, OFFSET = 3, 1021


class OpProbe(Probe):
    """What ops have in common: one bucket for any number of rows, results shaped like the input."""

    buckets = ((1, None),)
    site: OpSite

    def __init__(self, site: OpSite) -> None:
        super().__init__(site)
        self.row_elements = max(site.dims, 1)

    def args(self, rows: int) -> tuple[Any, ...]:
        return (sequences(rows, self.site.dims, self.site.x_dtype),)

    def result_bytes(self, rows: int) -> int:
        return rows * self.site.dims * itemsize("float32")

    def empty(self, x: Any, *rest: Any) -> Any:
        import mlx.core as mx

        return mx.zeros(x.shape, getattr(mx, self.site.out_dtype))

    def variant(self, module: Any, x_dtype: str) -> OpSite:
        return dataclasses.replace(self.site, x_dtype=x_dtype)

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        single = None
        self.start(module, max(MOST_ROWS, *(rows for rows, _ in results)))
        for rows, y in results:
            args = self.args(rows)
            require_form(y, tuple(args[0].shape), self.site.out_dtype)
            y64, bound = self.expected_from(module, args)
            y = reference.as_numpy(y)
            compare(offer, y, y64, bound, self.site.out_dtype, f"rows {rows}")
            by_rows = self.by_rows(y, rows)
            require_same_rows(single, by_rows, rows, offer)
            if rows == 1:
                single = by_rows
            if offer.exactness == "bitwise":
                stock = reference.as_numpy(self.stock(module, *args))
                if stock.tobytes() != y.tobytes():
                    raise VerificationError(f"claims stock's bits; rows {rows} differ from stock")

    def expected_from(self, module: Any, args: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(float64 result, bound) of a call."""
        return self.expected(module, reference.as_numpy(args[0]).astype(np.float64))

    def start(self, module: Any, rows: int) -> None:
        """Called before the results of one layer, of up to `rows` rows, are checked."""

    def expected(self, module: Any, x64: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(float64 result, bound) for an input in float64."""
        raise NotImplementedError

    def by_rows(self, y: np.ndarray, rows: int) -> np.ndarray:
        """The result as (rows, elements of a row)."""
        return y.reshape(rows, -1)


class NormProbe(OpProbe):
    """Norms with a weight, whose length is the width."""

    def __init__(self, site: OpSite) -> None:
        super().__init__(site)
        self.last_dimension = site.dims
        self._all: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))

    def start(self, module: Any, rows: int) -> None:
        # Rows do not depend on each other, and all inputs are the last rows of one.
        _, x64 = inputs(rows, self.site.dims, self.site.x_dtype)
        self._all = self.expected(module, x64)

    def expected_from(self, module: Any, args: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        shape = args[0].shape
        rows = args[0].size // self.site.dims
        y64, bound = (a[-rows:].reshape(shape) for a in self._all)
        return y64, bound


class RMSNormProbe(NormProbe):
    """``nn.RMSNorm``: ``f(x)``."""

    def expected(self, module: Any, x64: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weight = _weight(module, "weight")
        if weight is not None and self.site.variant == "one_plus":
            weight = 1.0 + weight
        y64 = reference_ops.rms_norm(x64, weight, self.site.eps)
        return y64, reference_ops.rms_norm_bound(y64, self.site.out_dtype)


class LayerNormProbe(NormProbe):
    """``nn.LayerNorm``: ``f(x)``."""

    def expected(self, module: Any, x64: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weight, bias = _weight(module, "weight"), _weight(module, "bias")
        y64 = reference_ops.layer_norm(x64, weight, bias, self.site.eps)
        return y64, reference_ops.layer_norm_bound(x64, weight, bias, self.site.eps, y64, self.site.out_dtype)


class RopeProbe(OpProbe):
    """Rotary embeddings: ``f(x, offset)`` with x (batch, heads, rows, features)."""

    weightless = True  # equal frequencies are part of the signature

    def args(self, rows: int) -> tuple[Any, ...]:
        import mlx.core as mx

        # More features than are rotated, as models with partial rotary embeddings have.
        features = self.site.rope_dims + 8
        x = mx.stack([inputs(rows, features, self.site.x_dtype, seed=h)[0] for h in range(HEADS)])[None]
        # Every input ends at the same position, so that its last row is the same in all of them.
        return x, OFFSET - rows

    def result_bytes(self, rows: int) -> int:
        return rows * HEADS * (self.site.rope_dims + 8) * itemsize("float32")

    def expected(self, module: Any, x64: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s = self.site
        offset = OFFSET - x64.shape[-2]
        if not s.rope_freqs:
            y64 = reference_ops.rope(x64, s.rope_dims, s.rope_traditional, s.rope_base, s.rope_scale, offset)
            return y64, reference_ops.rope_bound(x64, y64, s.rope_dims, s.rope_traditional, s.out_dtype)
        r = rotation_of(module)
        if r is None:
            raise VerificationError("its frequencies cannot be read")
        y64 = reference_ops.rope_by_frequencies(x64, r.frequencies, r.factor, r.traditional, offset)
        return y64, reference_ops.rope_bound(x64, y64, r.dims, r.traditional, s.out_dtype, r.factor)

    def by_rows(self, y: np.ndarray, rows: int) -> np.ndarray:
        return np.ascontiguousarray(y[0].transpose(1, 0, 2)).reshape(rows, -1)


class FunctionProbe(OpProbe):
    """A gated activation of a host that models hold by name: ``f(gate, x)``; its site has no module."""

    def stock(self, module: Any, *args: Any) -> Any:
        from .integrations.functions import stock_call

        return stock_call(self.site.host, self.site.path)(*args)

    def args(self, rows: int) -> tuple[Any, ...]:
        pair = [inputs(rows, self.site.dims, self.site.x_dtype, seed=s)[0] for s in (0, 1)]
        gate, x = (x.reshape(1, rows, -1) for x in pair)
        # The first argument of precise_swiglu gives the result's dtype.
        return (x, gate, x) if self.site.variant == "precise_swiglu" else (gate, x)

    def variant(self, module: Any, x_dtype: str) -> Any:
        return None

    def expected_from(self, module: Any, args: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        gate, x = (reference.as_numpy(a).astype(np.float64) for a in args[-2:])
        expect, bound = _GATED[self.site.variant]
        y64 = expect(gate, x)
        return y64, bound(gate, y64, self.site.out_dtype)


_GATED: dict[str, tuple[Any, Any]] = {
    "swiglu": (reference_ops.swiglu, reference_ops.swiglu_bound),
    "precise_swiglu": (reference_ops.swiglu, reference_ops.swiglu_bound),
    "swiglu_oai": (reference_ops.swiglu_oai, reference_ops.swiglu_oai_bound),
    "geglu": (reference_ops.geglu, reference_ops.geglu_bound),
    "geglu_approx": (reference_ops.geglu_approx, reference_ops.geglu_approx_bound),
}


class SoftcapProbe(FunctionProbe):
    """A function ``f(cap, x)`` of a host."""

    CAP = 30.0

    def args(self, rows: int) -> tuple[Any, ...]:
        x, _ = inputs(rows, min(self.site.dims, LogitsProbe.MANY_ROWS_COLUMNS), self.site.x_dtype)
        return self.CAP, 8 * x.reshape(1, rows, -1)

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        single = None
        for rows, y in results:
            _, x = self.args(rows)
            require_form(y, tuple(x.shape), self.site.out_dtype)
            y64 = reference_ops.softcap(self.CAP, reference.as_numpy(x).astype(np.float64))
            y = reference.as_numpy(y)
            compare(offer, y, y64, reference_ops.softcap_bound(y64, self.site.out_dtype), self.site.out_dtype,
                    f"rows {rows}")  # fmt: skip
            by_rows = self.by_rows(y, rows)
            require_same_rows(single, by_rows, rows, offer)
            single = by_rows if rows == 1 else single


class LogitsProbe(OpProbe):
    """``mx.logsumexp(x, axis=-1, keepdims=True)`` or ``mx.argmax(x, axis=-1)``: ``f(x)``; its site has no module."""

    #: Columns of inputs with more than a few rows, which are rare and would cost memory.
    MANY_ROWS_COLUMNS = 8192

    def stock(self, module: Any, *args: Any) -> Any:
        import mlx.core as mx

        if self.site.variant == "argmax":
            return mx.argmax(args[0], axis=-1)
        return mx.logsumexp(args[0], axis=-1, keepdims=True)

    def args(self, rows: int) -> tuple[Any, ...]:
        width = self.site.dims if rows <= 4 else min(self.site.dims, self.MANY_ROWS_COLUMNS)
        x, _ = inputs(rows, width, self.site.x_dtype, most=4)
        return (x,)

    def cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        return [(m, self.args(m)) for m in (1, 3, MOST_ROWS)]

    def variant(self, module: Any, x_dtype: str) -> Any:
        return None

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        single = None
        for rows, y in results:
            (x,) = self.args(rows)
            if self.site.variant == "argmax":
                require_form(y, (rows,), "uint32")
                want = np.argmax(reference.as_numpy(x), axis=-1)
                if not np.array_equal(np.array(y), want):
                    raise VerificationError(f"wrong result (rows {rows}): {np.array(y)} instead of {want}")
                continue
            require_form(y, (rows, 1), self.site.out_dtype)
            x64 = reference.as_numpy(x).astype(np.float64)
            y64 = reference_ops.logsumexp(x64)
            bound = reference_ops.logsumexp_bound(y64, x64.shape[-1], self.site.out_dtype)
            y = reference.as_numpy(y)
            compare(offer, y, y64, bound, self.site.out_dtype, f"rows {rows}")
            if x.shape[-1] == self.site.dims:
                require_same_rows(single, y, rows, offer)
                single = y if rows == 1 else single


OP_PROBES: dict[str, type[OpProbe]] = {
    "rms_norm": RMSNormProbe,
    "layer_norm": LayerNormProbe,
    "rope": RopeProbe,
    "activation": FunctionProbe,
    "softcap": SoftcapProbe,
    "logits": LogitsProbe,
}


def _weight(module: Any, name: str) -> np.ndarray | None:
    value = module.get(name)
    return None if value is None else reference.as_numpy(value).astype(np.float64)
