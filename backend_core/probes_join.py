"""Probe of joined blocks: the bits of the separate parts, with and without a cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from . import reference
from .errors import VerificationError
from .offers import Offer
from .probe_base import MOST_ROWS, Probe, inputs, require_form, require_same_rows
from .report import Report
from .sites import JoinSite, itemsize

#: Tokens in the cache before the block is called.
CACHED = 5


class JoinProbe(Probe):
    """``f(x)`` for a feed-forward block, ``f(x, mask, cache)`` for attention and layers; x (batch, rows, width).

    What a block computes is known from its code, its parts were compared with float64, and the joined block runs the
    same kernels: it must have the very same bits as the parts.
    """

    site: JoinSite

    def __init__(self, site: JoinSite) -> None:
        super().__init__(site)
        self.row_elements = self.last_dimension = site.width

    def stock(self, module: Any, *args: Any) -> Any:
        """The block in parts, as it runs now."""
        return module(*args)

    def rewind(self, args: tuple[Any, ...]) -> None:
        """Make arguments of a call fit for the next one."""

    def args(self, rows: int) -> tuple[Any, ...]:
        """A batch of single tokens for up to 16 rows, else one sequence; no cache, since races repeat the call."""
        x, _ = inputs(rows, self.site.width, self.site.x_dtype)
        x = x.reshape(rows, 1, -1) if rows <= 16 else x.reshape(1, rows, -1)
        return (x,) if self.site.kind == "mlp" or rows <= 16 else (x, "causal", None)

    def cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        return [(m, self._case(m)) for m in self._lengths(offer, index)]

    def brief_cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        cases = self._lengths(offer, index)
        return [(m, self._case(m)) for m in (cases if index == 0 else cases[:1])]

    def _lengths(self, offer: Offer, index: int) -> list[int]:
        hi = offer.rows[1]
        return [m for m in (1, 2 + (3 + 7 * index) % 15, MOST_ROWS) if hi is None or m <= hi]

    def _case(self, rows: int) -> tuple[Any, ...]:
        """The arguments of a verification call; the same again at every call."""
        args = self.args(rows)
        if self.site.kind == "mlp":
            return args
        # No cache at two lengths, so that both ways through the code are taken.
        return (*args, *(None,) * (3 - len(args)))[:2] + (_cache(self.site, args[0].shape[0]) if rows % 4 else None,)

    def result_bytes(self, rows: int) -> int:
        return 32 * rows * self.site.width * itemsize(self.site.out_dtype)

    def empty(self, x: Any, *rest: Any) -> Any:
        import mlx.core as mx

        return mx.zeros(x.shape, getattr(mx, self.site.out_dtype))

    def variant(self, module: Any, x_dtype: str) -> None:
        return None

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        single = None
        for rows, y in results:
            if y is NotImplemented:
                raise VerificationError(f"declines a call at {rows} rows")
            args = self._case(rows)
            require_form(y, tuple(args[0].shape), self.site.out_dtype)
            want, have = (reference.as_numpy(a) for a in (self.stock(module, *args), y))
            if want.tobytes() != have.tobytes():
                raise VerificationError(f"differs from its parts at {rows} rows, by up to {np.abs(want - have).max()}")
            by_rows = have.reshape(rows, -1)
            # Tokens of one sequence see each other; those of a batch do not, but for a cache of another length.
            if rows <= 16 and (self.site.kind == "mlp" or args[2] is not None):
                require_same_rows(single, by_rows, rows, offer)
                single = by_rows if rows == 1 else single


class StackProbe(JoinProbe):
    """``f(tokens, caches)``: tokens (batch, 1), a cache with a few tokens for every layer."""

    def __init__(self, site: JoinSite) -> None:
        super().__init__(site)
        self.row_elements = self.last_dimension = 1

    def stock(self, module: Any, *args: Any) -> Any:
        self.rewind(args)
        return module(*args)

    def rewind(self, args: tuple[Any, ...]) -> None:
        """Put the caches back to where they were: calls are repeated."""
        for cache in args[1]:
            cache.offset = CACHED

    def args(self, rows: int) -> tuple[Any, ...]:
        import mlx.core as mx

        # The last token is always the same.
        return mx.arange(MOST_ROWS - rows, MOST_ROWS)[:, None], [_cache(self.site, rows) for _ in self.site.parts]

    def cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        return [(m, self.args(m)) for m in (1, 2)]

    brief_cases = cases

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        single = None
        for rows, y in results:
            if y is NotImplemented:
                raise VerificationError(f"declines a call at {rows} rows")
            require_form(y, (rows, 1, self.site.width), self.site.out_dtype)
            want, have = (reference.as_numpy(a) for a in (self.stock(module, *self.args(rows)), y))
            if want.tobytes() != have.tobytes():
                raise VerificationError(f"differs from its layers at {rows} rows")
            require_same_rows(single, have.reshape(rows, -1), rows, offer)
            single = have.reshape(rows, -1) if rows == 1 else single


def _cache(site: JoinSite, batch: int) -> Any:
    """A cache of the host with a few tokens in it."""
    cache = importlib.import_module(f"{site.host}.models.cache").KVCache()
    heads, head_dim = site.kv_heads, site.head_dim
    keys, values = (
        inputs(CACHED * heads, head_dim, site.x_dtype, seed=s)[0].reshape(1, heads, CACHED, head_dim) for s in (5, 6)
    )
    import mlx.core as mx

    shape = (batch, heads, CACHED, head_dim)
    dtype = getattr(mx, site.cached or site.x_dtype)
    cache.update_and_fetch(*(mx.broadcast_to(a, shape).astype(dtype) for a in (keys, values)))
    return cache


class JoinSlot:
    """What is installed for a joined block; a range of rows that lost its race runs in parts."""

    def __init__(self, report: Report, probe: JoinProbe, small: Callable[..., Any] | None,
                 large: Callable[..., Any] | None) -> None:  # fmt: skip
        self.report, self.probe, self.small, self.large = report, probe, small, large

    def call(self, module: Any, x: Any, *rest: Any) -> Any:
        self.probe.rewind((x, *rest))
        function = self.small if x.size <= 16 * self.probe.row_elements else self.large
        y = NotImplemented if function is None else function(x, *rest)
        return self.probe.stock(module, x, *rest) if y is NotImplemented else y

    @property
    def plan(self) -> Any:
        """The joined block as won."""
        function: Any = self.small or self.large
        plan = function.plan
        if self.small is None:
            plan.small = None
        if self.large is None:
            plan.large = None
        return plan
