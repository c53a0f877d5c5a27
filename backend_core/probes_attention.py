"""The probe of attention call shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from . import reference, reference_ops
from .errors import VerificationError
from .offers import Offer
from .probe_base import MOST_ROWS, Probe, compare, inputs, require_form, require_same_rows
from .sites import AttentionSite, itemsize

#: Keys that are in the cache before the rows of a probe, and the length of the buffer they are a slice of.
CACHED, BUFFER = 95, 256


class AttentionProbe(Probe):
    """``f(queries, keys, values, cache, scale, mask, sinks)``; a row is one position of all heads."""

    site: AttentionSite

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site)
        self.row_elements = site.n_heads * site.head_dim
        #: Keys and values of the last stock call, as they came and widened.
        self._wide: Any = None

    def stock(self, module: Any, *args: Any) -> Any:
        import mlx.core as mx

        from .integrations.attention import stock_function

        queries, keys, values, *rest = args
        if self.site.kv_bits:
            # Stock multiplies the queries in place.
            return stock_function(self.site.host)(mx.stop_gradient(queries), keys, values, *rest)
        return stock_function(self.site.host)(queries, *self._stocks_cache(keys, values), *rest)

    def _stocks_cache(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Keys and values in the dtype in which stock would have cached them: its races are run with those."""
        import mlx.core as mx

        if self.site.kv_dtype == self.site.q_dtype:
            return keys, values
        if self._wide is None or self._wide[0] is not keys or self._wide[1] is not values:
            dtype = getattr(mx, self.site.q_dtype)
            self._wide = keys, values, keys.astype(dtype), values.astype(dtype)
            mx.eval(self._wide[2:])
        return self._wide[2:]

    def args(self, rows: int, mask: str = "") -> tuple[Any, ...]:
        """Arguments at L = rows: the last rows of a sequence of CACHED + MOST_ROWS keys in a larger buffer."""
        import mlx.core as mx

        s = self.site
        total = CACHED + max(rows, MOST_ROWS)
        q = self._heads(s.n_heads, max(rows, MOST_ROWS), s.head_dim, s.q_dtype, 0)[:, :, -rows:]
        buffer = max(BUFFER, total + 7)
        k = self._cached(s.head_dim, 100, buffer, total)
        v = self._cached(s.value_dim, 200, buffer, total)
        form = mask or ("none" if rows == 1 else "causal")
        sinks = None
        if s.has_sinks:
            sinks = mx.array(np.linspace(-1.0, 1.0, s.n_heads, dtype=np.float32)).astype(getattr(mx, s.q_dtype))
        cache = SimpleNamespace(bits=s.kv_bits, group_size=s.kv_group_size) if s.kv_bits else None
        return q, k, v, cache, s.scale, self._mask(form, rows, total), sinks

    def _cached(self, width: int, seed: int, buffer: int, total: int) -> Any:
        """Keys or values as a cache of `buffer` positions hands them out: an array, or codes, scales and biases."""
        import mlx.core as mx

        s = self.site
        whole = self._heads(s.n_kv_heads, buffer, width, s.kv_dtype, seed)
        if not s.kv_bits:
            return whole[:, :, :total]
        parts = mx.quantize(whole, group_size=s.kv_group_size, bits=s.kv_bits)
        return tuple(a[:, :, :total] for a in parts)

    def _heads(self, heads: int, rows: int, width: int, dtype: str, seed: int) -> Any:
        import mlx.core as mx

        return mx.stack([inputs(rows, width, dtype, seed=seed + h)[0] for h in range(heads)])[None]

    def _mask(self, form: str, rows: int, total: int) -> Any:
        import mlx.core as mx

        if form in ("none", "causal"):
            return None if form == "none" else "causal"
        seen = np.tril(np.ones((rows, total), dtype=bool), total - rows)
        seen[:, : total // 3 : 2] = False
        if form == "bool":
            return mx.array(seen)
        bias = np.where(seen, np.linspace(-2, 2, total, dtype=np.float32), -np.inf)
        return mx.array(bias).astype(getattr(mx, self.site.q_dtype))

    def cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        plain = super().cases(offer, index)
        lo, hi = offer.rows
        masked = [m for m in (1, 7, MOST_ROWS) if m >= lo and (hi is None or m <= hi)]
        return [*plain, *((m, self.args(m, form)) for m in masked for form in ("bool", "additive"))]

    def result_bytes(self, rows: int) -> int:
        return rows * self.site.n_heads * self.site.value_dim * itemsize(self.site.q_dtype)

    def empty(self, x: Any, *rest: Any) -> Any:
        import mlx.core as mx

        return mx.zeros((*x.shape[:-1], self.site.value_dim), x.dtype)

    def variant(self, module: Any, x_dtype: str) -> None:
        return None

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        s = self.site
        single = None
        for (rows, args), (_, y) in zip(self._again(offer, results), results, strict=True):
            if y is NotImplemented:
                raise VerificationError(f"does not serve {self._form(args)} masks at {rows} rows")
            require_form(y, (1, s.n_heads, rows, s.value_dim), s.q_dtype)
            q, k, v, _, scale, mask, sinks = args
            q64, k64, v64 = (self._wide64(a) for a in (q, k, v))
            sinks64 = None if sinks is None else reference.as_numpy(sinks).astype(np.float64)
            terms = (self._terms(k), self._terms(v)) if s.kv_bits else None
            y64, bound = reference_ops.attention(q64, k64, v64, float(scale), _as_mask(mask), sinks64, s.q_dtype, terms)
            y = reference.as_numpy(y)
            compare(offer, y, y64, bound, s.q_dtype, f"rows {rows}, mask {self._form(args)}")
            by_rows = np.ascontiguousarray(y[0].transpose(1, 0, 2)).reshape(rows, -1)
            if self._form(args) in ("none", "causal"):
                require_same_rows(single, by_rows, rows, offer)
                if rows == 1:
                    single = by_rows

    def _wide64(self, a: Any) -> np.ndarray:
        """The elements of an array, or of codes with scales and biases, in float64."""
        if not isinstance(a, tuple):
            return reference.as_numpy(a).astype(np.float64)
        codes, scales, biases = (reference.as_numpy(part) for part in a)
        rows = (p.reshape(-1, p.shape[-1]) for p in (codes, scales, biases))
        s = self.site
        return reference.decode("affine", s.kv_bits, s.kv_group_size, *rows).reshape(*codes.shape[:-1], -1)

    def _terms(self, a: tuple[Any, ...]) -> np.ndarray:
        """|scale code| + |bias| of every element."""
        import mlx.core as mx

        codes, scales, biases = a
        return self._wide64((codes, mx.abs(scales), mx.abs(biases)))

    def _again(self, offer: Offer, results: list[tuple[int, Any]]) -> list[tuple[int, tuple[Any, ...]]]:
        """The cases that gave these results."""
        for index in range(15):
            cases = self.cases(offer, index)
            if [rows for rows, _ in cases] == [rows for rows, _ in results]:
                return cases
        raise VerificationError("results do not match the verification calls")

    @staticmethod
    def _form(args: tuple[Any, ...]) -> str:
        mask = args[5]
        if mask is None or isinstance(mask, str):
            return mask or "none"
        return "bool" if str(mask.dtype).endswith("bool_") or str(mask.dtype).endswith("bool") else "additive"


def _as_mask(mask: Any) -> Any:
    if mask is None or isinstance(mask, str):
        return mask
    array = reference.as_numpy(mask)
    return array if array.dtype == bool else array.astype(np.float64)
