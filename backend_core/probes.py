"""Probe inputs: how each kind of linear site is called, checked and timed.

A probe knows, for one kind of site, what arguments its layer takes at a number of rows, how stock is called,
and how a result is compared with float64. Inputs come from numpy generators with fixed seeds: mlx's random
state is the user's and is never touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import reference
from .errors import VerificationError
from .offers import Offer
from .sites import LinearSite, itemsize
from .walk import stock_class

#: Rows at which an offer is verified. The last row of every input is the same vector, so that one float64
#: pass over the matrix serves all of them.
VERIFY_AT = (1, 5, 33)
#: Columns compared at several rows (the end of the matrix is where edge handling goes wrong).
LAST_COLUMNS = 64
#: The rows compared there, counted from the end: first and last of the inputs, and around multiples of 8 and 16.
SAMPLED_ROWS = (-33, -32, -18, -17, -16, -9, -8, -5, -4, -2)


def stock_call(kind: str) -> Callable[..., Any]:
    """``f(module, *args)`` that runs the stock layer, also where the instance is accelerated."""
    if kind == "embedding":
        return lambda module, x: _stock_class(module).as_linear(module, x)
    return lambda module, *args: _stock_class(module).__call__(module, *args)


def _stock_class(module: Any) -> Any:
    return stock_class(module)


@functools.lru_cache(maxsize=64)
def inputs(rows: int, k: int, dtype: str, seed: int = 0) -> tuple[Any, np.ndarray]:
    """(mlx array (rows, k), the same values as float64): normal values, some exact zeros, some outliers."""
    import mlx.core as mx

    rng = np.random.default_rng(1234 + seed)
    x = rng.standard_normal((max(VERIFY_AT + (rows,)), k)).astype(np.float32)
    x[:, rng.integers(0, k, max(1, k // 64))] *= 12.0
    x[:, rng.integers(0, k, max(1, k // 32))] = 0.0
    array = mx.array(x[-rows:]).astype(getattr(mx, dtype))
    mx.eval(array)
    return array, np.array(array.astype(mx.float32)).astype(np.float64)


class LinearProbe:
    """Kinds ``linear`` and ``embedding``: ``f(x)``."""

    def __init__(self, site: LinearSite) -> None:
        self.site = site
        self.stock = stock_call(site.kind)

    def args(self, rows: int) -> tuple[Any, ...]:
        """Arguments of a call at `rows` rows. rows 5 is a batch of five single tokens."""
        x, _ = inputs(rows, self.site.k, self.site.x_dtype)
        return (x.reshape(rows, 1, -1) if rows == 5 else x.reshape(1, rows, -1),)

    def result_bytes(self, rows: int) -> int:
        """Bytes of the result of a verification call."""
        return abs(rows) * max(self.site.n, self.site.k) * itemsize(self.site.out_dtype) * self._copies()

    def _copies(self) -> int:
        """How many outputs a row of input has."""
        return {"switch": 2, "multi": self.site.batch}.get(self.site.kind, 1)

    def cases(self, offer: Offer) -> list[tuple[int, tuple[Any, ...]]]:
        """(rows, args) of every verification call within the offer's range."""
        lo, hi = offer.rows
        wanted = [m for m in VERIFY_AT if m >= lo and (hi is None or m <= hi)]
        if not wanted:
            wanted = [lo]
        return [(m, self.args(m)) for m in wanted]

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        """Compare results (rows, y) with float64.

        Raises VerificationError naming rows, row and column of the worst difference.
        """
        site = self.site
        ref = reference.Reference(dict(module), site.mode, site.bits, site.group_size)
        tail_begin = max(0, site.n - LAST_COLUMNS)
        known: dict[int, tuple[Any, Any]] = {}  # by size of the input: one pass serves all verification rows
        single = None
        for rows, y in results:
            _require_form(y, (*self.args(rows)[0].shape[:-1], site.n), site.out_dtype)
            y = reference.as_numpy(y).reshape(rows, site.n)
            size = max(rows, *VERIFY_AT)
            if size not in known:
                _, x64 = inputs(size, site.k, site.x_dtype)
                known[size] = ref.product(x64[-1:]), ref.product(x64[list(SAMPLED_ROWS)], tail_begin, site.n)
            (last, last_magnitude), (tail, tail_magnitude) = known[size]
            compare(offer, y[-1:], last, last_magnitude, site.k, site.out_dtype, f"rows {rows}, last row")
            if rows > 1:
                here = [i for i, r in enumerate(SAMPLED_ROWS) if -r <= rows]
                compare(offer, y[[SAMPLED_ROWS[i] for i in here], tail_begin:], tail[here], tail_magnitude[here],
                        site.k, site.out_dtype, f"rows {rows}, last {site.n - tail_begin} columns")  # fmt: skip
            if rows == 1:
                single = y
            elif single is not None and rows <= 16 and offer.row_invariant and (y[-1].tobytes() != single[0].tobytes()):
                raise VerificationError(
                    f"claims to be row-invariant, but the last of {rows} rows differs from that row alone"
                )
        if offer.exactness == "bitwise":
            self._check_bits(module, results)

    def _check_bits(self, module: Any, results: list[tuple[int, Any]]) -> None:
        # Stock is slow in half precision on the CPU: the first and last columns at no more than 5 rows.
        for rows, y in results:
            if rows <= 5:
                for begin, end in {(0, min(64, self.site.n)), (max(0, self.site.n - 64), self.site.n)}:
                    want = reference.as_numpy(self.stock(sliced(module, begin, end), *self.args(rows)))
                    have = reference.as_numpy(y[..., begin:end])
                    if want.tobytes() != have.tobytes():
                        raise VerificationError(f"claims stock's bits; rows {rows}, columns {begin}..{end} differ")


class SwitchProbe(LinearProbe):
    """Kind ``switch``: ``f(x, indices, sorted_indices)``."""

    def args(self, rows: int) -> tuple[Any, ...]:
        """A few rows as (rows, 1, 1, k) with (rows, top_k) experts; many rows sorted by expert."""
        import mlx.core as mx

        x, _ = inputs(rows, self.site.k, self.site.x_dtype)
        experts = self._experts(rows)
        if rows > 16:
            return x.reshape(rows, 1, -1), mx.array(experts[:, 0]), True
        return x.reshape(rows, 1, 1, -1), mx.array(experts), False

    def _experts(self, rows: int) -> np.ndarray:
        rng = np.random.default_rng(rows)
        top = min(2, self.site.batch)
        chosen = np.stack([rng.permutation(self.site.batch)[:top] for _ in range(rows)]).astype(np.uint32)
        return np.sort(chosen, axis=0) if rows > 16 else chosen

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        site = self.site
        refs = {}
        for rows, y in results:
            _, x64 = inputs(rows, site.k, site.x_dtype)
            experts = self._experts(rows)
            if rows > 16:
                experts = experts[:, :1]
                _require_form(y, (rows, 1, site.n), site.out_dtype)
            else:
                _require_form(y, (rows, experts.shape[1], 1, site.n), site.out_dtype)
            y = reference.as_numpy(y).reshape(rows, experts.shape[1], site.n)
            for expert in np.unique(experts):
                if expert not in refs:
                    refs[expert] = reference.Reference(dict(module), site.mode, site.bits, site.group_size,
                                                       int(expert))  # fmt: skip
                at = np.argwhere(experts == expert)
                y64, magnitude = refs[expert].product(x64[at[:, 0]])
                compare(offer, y[at[:, 0], at[:, 1]], y64, magnitude, site.k, site.out_dtype,
                        f"rows {rows}, expert {expert}")  # fmt: skip


class MultiProbe(LinearProbe):
    """Kind ``multi``: ``f(x, transpose)``."""

    def args(self, rows: int, transpose: bool = True) -> tuple[Any, ...]:
        """x (1, heads, rows, k), or (1, heads, rows, n) for transpose=False."""
        import mlx.core as mx

        parts = [inputs(rows, self.site.k if transpose else self.site.n, self.site.x_dtype, seed=h)[0]
                 for h in range(self.site.batch)]  # fmt: skip
        return mx.stack(parts)[None], transpose

    def cases(self, offer: Offer) -> list[tuple[int, tuple[Any, ...]]]:
        both = []
        for rows, args in super().cases(offer):
            both += [(rows, args), (-rows, self.args(rows, transpose=False))]
        return both

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        site = self.site
        for rows, y in results:
            transpose, m = rows > 0, abs(rows)
            k, n = (site.k, site.n) if transpose else (site.n, site.k)
            _require_form(y, (1, site.batch, m, n), site.out_dtype)
            y = reference.as_numpy(y)
            for head in range(site.batch):
                _, x64 = inputs(m, k, site.x_dtype, seed=head)
                w = reference.Reference(dict(module), site.mode, site.bits, site.group_size, head).weights()
                w = w.T if transpose else w
                compare(offer, y[0, head], x64 @ w, np.abs(x64) @ np.abs(w), k, site.out_dtype,
                        f"rows {m}, head {head}, transpose={transpose}")  # fmt: skip


PROBES: dict[str, type[LinearProbe]] = {
    "linear": LinearProbe, "embedding": LinearProbe, "switch": SwitchProbe, "multi": MultiProbe,
}  # fmt: skip


def probe_for(site: LinearSite) -> LinearProbe:
    return PROBES[site.kind](site)


def sliced(module: Any, begin: int, end: int) -> Any:
    """A stock layer that holds output features [begin, end) of `module`; shares memory."""
    cls = _stock_class(module)
    copy = cls.__new__(cls)
    copy.__dict__.update({k: v for k, v in module.__dict__.items() if k != "_accel"})
    for key, value in module.items():
        dict.__setitem__(copy, key, value[begin:end] if hasattr(value, "shape") and value.ndim else value)
    return copy


def _require_form(y: Any, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(y.shape) != tuple(shape):
        raise VerificationError(f"result has shape {tuple(y.shape)}, stock's is {tuple(shape)}")
    if not str(y.dtype).endswith(f".{dtype}"):
        raise VerificationError(f"result has dtype {y.dtype}, stock's is {dtype}")


def compare(offer: Offer, y: np.ndarray, y64: np.ndarray, magnitude: np.ndarray, k: int, dtype: str,
            where: str) -> None:  # fmt: skip
    """Raise VerificationError unless y keeps the bound of the offer's exactness class."""
    if offer.exactness == "lossy":
        error = float(np.linalg.norm(y - y64) / max(np.linalg.norm(y64), 1e-30))
        if not error <= offer.tolerance:
            raise VerificationError(f"{where}: relative error {error:.3g}, allowed {offer.tolerance:.3g}")
        return
    excess = reference.worst_excess(y, y64, magnitude, k, dtype)
    if excess > 1.0:
        flat = np.abs(y.astype(np.float64) - y64)
        row, column = np.unravel_index(int(np.argmax(np.where(np.isnan(flat), np.inf, flat))), y.shape)
        raise VerificationError(
            f"wrong result ({where}): {excess:.3g} times the rounding bound; e.g. row {row}, column {column}: "
            f"{y[row, column]:.6g} instead of {y64[row, column]:.6g}"
        )
