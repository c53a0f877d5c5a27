"""The probe of the KV cache's update: stock's bits, at any number of new positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import reference
from .errors import VerificationError
from .offers import Offer
from .probe_base import MOST_ROWS, Probe, inputs, require_form
from .report import Report
from .sites import OpSite, itemsize

#: Heads, length and filled part of the cache that is probed.
HEADS, CAPACITY, OFFSET = 2, 128, 37


class Pair(tuple[Any, ...]):
    """The two results of an update, as races want to see them."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self)


class UpdateProbe(Probe):
    """``f(cached_keys, cached_values, keys, values, offset) -> (cached_keys, cached_values)``; rows are positions."""

    buckets = ((1, None),)
    weightless = True
    site: OpSite

    def stock(self, module: Any, *args: Any) -> Any:
        import mlx.core as mx

        cached_keys, cached_values, keys, values, offset = args
        end = offset + keys.shape[2]
        # Assignment changes the array object, which belongs to the caller.
        cached_keys, cached_values = mx.stop_gradient(cached_keys), mx.stop_gradient(cached_values)
        cached_keys[..., offset:end, :] = keys
        cached_values[..., offset:end, :] = values
        return Pair((cached_keys, cached_values))

    def args(self, rows: int) -> tuple[Any, ...]:
        import mlx.core as mx

        s = self.site

        def heads(length: int, dtype: str, seed: int) -> Any:
            parts = [inputs(max(length, MOST_ROWS), s.dims, dtype, seed=seed + h)[0][:length] for h in range(HEADS)]
            # As models have them: heads are the second axis of what was computed position by position.
            return mx.stack(parts, axis=1)[None].transpose(0, 2, 1, 3)

        capacity = CAPACITY + rows
        caches = (mx.contiguous(heads(capacity, s.out_dtype, seed)) for seed in (300, 310))
        return *caches, heads(rows, s.x_dtype, 320), heads(rows, s.x_dtype, 330), OFFSET

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        for rows, y in results:
            if type(y) is not tuple or len(y) != 2:
                raise VerificationError("result is not a pair of arrays")
            args = self.args(rows)
            for mine, stock, cached in zip(y, self.stock(module, *args), args, strict=False):
                require_form(mine, tuple(cached.shape), self.site.out_dtype)
                if reference.as_numpy(mine).tobytes() != reference.as_numpy(stock).tobytes():
                    raise VerificationError(f"does not have stock's bits at {rows} rows")

    def result_bytes(self, rows: int) -> int:
        return 2 * HEADS * (CAPACITY + rows) * self.site.dims * itemsize(self.site.out_dtype)

    def empty(self, x: Any, *rest: Any) -> Any:
        return Pair((x, rest[0]))

    def variant(self, module: Any, x_dtype: str) -> None:
        return None


class UpdateSlot:
    """The chosen callable of a cache's update."""

    def __init__(self, report: Report, probe: UpdateProbe, function: Callable[..., Any] | None) -> None:
        self.report, self.probe, self.function = report, probe, function

    def call(self, module: Any, *args: Any) -> Any:
        return self.probe.stock(module, *args) if self.function is None else Pair(self.function(*args))
