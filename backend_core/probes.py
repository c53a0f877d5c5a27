"""Probes of linear sites: ``linear``, ``embedding``, ``switch`` and ``multi``."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

from . import native, reference
from .errors import VerificationError
from .offers import Offer
from .probe_base import MOST_ROWS, Probe, compare, inputs, live_class, require_form, require_same_rows, sequences
from .sites import LinearSite, itemsize

#: Columns compared at several rows (the end of the matrix is where edge handling goes wrong).
LAST_COLUMNS = 64
#: The rows compared there, counted from the end: first and last of the inputs, and around the sizes of tiles.
SAMPLED_ROWS = (-20, -19, -17, -16, -13, -12, -8, -5, -4, -2)
#: How many of them are compared on a layer of a large group whose offer is known.
FEW_ROWS = 3
#: Columns compared at the last row where numpy does the work and the offer was compared in full on such a layer.
SAMPLED_COLUMNS = 2048


class LinearProbe(Probe):
    """Kinds ``linear`` and ``embedding``: ``f(x)``."""

    sliceable = True
    proportional = True
    site: LinearSite

    def __init__(self, site: LinearSite) -> None:
        super().__init__(site)
        self._turn = 0
        self.row_elements = site.k
        self.last_dimension = None if site.kind == "multi" else site.k

    def stock(self, module: Any, *args: Any) -> Any:
        if self.site.kind == "embedding":
            return live_class(module).as_linear(module, *args)
        return live_class(module).__call__(module, *args)

    def args(self, rows: int) -> tuple[Any, ...]:
        return (sequences(rows, self.site.k, self.site.x_dtype),)

    def result_bytes(self, rows: int) -> int:
        return abs(rows) * max(self.site.n, self.site.k) * itemsize(self.site.out_dtype)

    def empty(self, x: Any, *rest: Any) -> Any:
        # Stock divides by zero here on the CPU; an empty result needs no kernel.
        import mlx.core as mx

        return mx.zeros((*x.shape[:-1], self.site.n), getattr(mx, self.site.out_dtype))

    def variant(self, module: Any, x_dtype: str) -> LinearSite | None:
        from .walk import linear_facts

        facts = linear_facts(module, self.site.kind, x_dtype)
        return None if facts is None else dataclasses.replace(self.site, **facts)

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        """Every output at the last row, and a sample of the others that includes the last 64 columns."""
        site = self.site
        ref = reference.Reference(dict(module), site.mode, site.bits, site.group_size)
        tail_begin = max(0, site.n - LAST_COLUMNS)
        # One float64 pass serves all verification rows, whose inputs end alike.
        most = max(rows for rows, _ in results)
        sampled = [r for r in SAMPLED_ROWS if -r <= most]
        if len(results) < 3:
            sampled = sampled[:: -(-len(sampled) // FEW_ROWS)] if sampled else []
        _, x64 = inputs(max(MOST_ROWS, most), site.k, site.x_dtype)
        parts = self._columns()
        products = [ref.product(x64[-1:], part.start, part.stop) for part in parts]
        last = tuple(np.concatenate(made, axis=1) for made in zip(*products, strict=True))
        tail = ref.product(x64[sampled], tail_begin, site.n)
        arrays = []
        for rows, y in results:
            require_form(y, (*self.args(rows)[0].shape[:-1], site.n), site.out_dtype)
            arrays.append(reference.as_numpy(y).reshape(rows, site.n))
        heres = [[i for i, r in enumerate(sampled) if -r <= rows] for rows, _ in results]
        # All at once, since there are hundreds of layers; one by one only to say what is wrong.
        ends = np.concatenate([np.concatenate([y[-1:, part] for part in parts], axis=1) for y in arrays])
        tails = [y[[sampled[i] for i in here], tail_begin:] for y, here in zip(arrays, heres, strict=True)]
        at = [i for here in heres for i in here]
        fine = offer.exactness != "lossy" and (
            self._fine(ends, *last) and self._fine(np.concatenate(tails), tail[0][at], tail[1][at])
        )
        single = None
        of = "" if len(parts) == 1 else f", {SAMPLED_COLUMNS} columns of {site.n}"
        for i, ((rows, _), y, here, sample) in enumerate(zip(results, arrays, heres, tails, strict=True)):
            if not fine:
                compare(offer, ends[i : i + 1], *self._expected(*last), site.out_dtype, f"rows {rows}, last row{of}")
                if here:
                    where = f"rows {rows}, last {site.n - tail_begin} columns"
                    expected = self._expected(tail[0][here], tail[1][here])
                    compare(offer, sample, *expected, site.out_dtype, where)
            require_same_rows(single, y, rows, offer)
            if rows == 1:
                single = y
        if offer.exactness == "bitwise":
            self._check_bits(module, results)

    def _columns(self) -> list[slice]:
        """Which columns of the last row are compared: all, or their begin, a place in the middle, and their end."""
        n = self.site.n
        if self.thorough or n <= SAMPLED_COLUMNS or native.available():
            return [slice(0, n)]
        quarter = SAMPLED_COLUMNS // 4
        # Another one for each layer.
        self._turn = zlib.crc32(self._turn.to_bytes(4, "little"))
        middle = self._turn % (n - 4 * quarter + 1) + quarter
        return [slice(0, quarter), slice(middle, middle + 2 * quarter), slice(n - quarter, n)]

    def _fine(self, y: np.ndarray, y64: np.ndarray, magnitude: np.ndarray) -> bool:
        """Whether results are within the bound; most are so without its ulp, which takes longest to compute."""
        with np.errstate(invalid="ignore"):
            if (np.abs(y - y64) <= 4.0 * np.sqrt(self.site.k) * 2.0**-24 * magnitude).all():
                return True
        return reference.worst_ratio(y, *self._expected(y64, magnitude), self.site.out_dtype) <= 1.0

    def _expected(self, y64: np.ndarray, magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(result, bound)."""
        return y64, reference.rounding_bound(y64, magnitude, self.site.k, self.site.out_dtype)

    def _check_bits(self, module: Any, results: list[tuple[int, Any]]) -> None:
        # Stock is slow in half precision on the CPU: the first and last columns at few rows.
        for rows, y in results:
            if rows <= 5:
                for begin, end in {(0, min(64, self.site.n)), (max(0, self.site.n - 64), self.site.n)}:
                    want = reference.as_numpy(self.stock(sliced(module, begin, end), *self.args(rows)))
                    have = reference.as_numpy(y[..., begin:end])
                    if want.tobytes() != have.tobytes():
                        raise VerificationError(
                            f"claims stock's bits; rows {rows}, columns {begin}..{end} differ from stock"
                        )


class SwitchProbe(LinearProbe):
    """Kind ``switch``: ``f(x, indices, sorted_indices)``."""

    sliceable = False

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
        return np.sort(chosen, axis=0)[:, :1] if rows > 16 else chosen

    def result_bytes(self, rows: int) -> int:
        return 2 * super().result_bytes(rows)

    def empty(self, x: Any, *rest: Any) -> Any:
        import mlx.core as mx

        lead = np.broadcast_shapes(tuple(x.shape[:-2]), tuple(rest[0].shape))
        return mx.zeros((*lead, x.shape[-2], self.site.n), getattr(mx, self.site.out_dtype))

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        site = self.site
        refs: dict[int, reference.Reference] = {}
        for rows, y in results:
            _, x64 = inputs(rows, site.k, site.x_dtype)
            experts = self._experts(rows)
            lead = (rows,) if rows > 16 else experts.shape
            require_form(y, (*lead, 1, site.n), site.out_dtype)
            y = reference.as_numpy(y).reshape(*experts.shape, site.n)
            for expert in map(int, np.unique(experts)):
                if expert not in refs:
                    refs[expert] = reference.Reference(dict(module), site.mode, site.bits, site.group_size, expert)
                at = np.argwhere(experts == expert)
                y64, magnitude = refs[expert].product(x64[at[:, 0]])
                bound = reference.rounding_bound(y64, magnitude, site.k, site.out_dtype)
                compare(offer, y[at[:, 0], at[:, 1]], y64, bound, site.out_dtype, f"rows {rows}, expert {expert}")


class MultiProbe(LinearProbe):
    """Kind ``multi``: ``f(x, transpose)``. Cases with transpose=False carry negative rows."""

    sliceable = False

    def args(self, rows: int) -> tuple[Any, ...]:
        """x (1, heads, rows, k), or (1, heads, -rows, n) for negative rows, which mean transpose=False."""
        import mlx.core as mx

        width = self.site.k if rows > 0 else self.site.n
        parts = [inputs(abs(rows), width, self.site.x_dtype, seed=h)[0] for h in range(self.site.batch)]
        return mx.stack(parts)[None], rows > 0

    def cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        return [(m, self.args(m)) for rows, _ in super().cases(offer, index) for m in (rows, -rows)]

    def result_bytes(self, rows: int) -> int:
        return self.site.batch * super().result_bytes(rows)

    def empty(self, x: Any, *rest: Any) -> Any:
        import mlx.core as mx

        n = self.site.k if rest and not rest[0] else self.site.n
        return mx.zeros((*x.shape[:-1], n), getattr(mx, self.site.out_dtype))

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        site = self.site
        for rows, y in results:
            transpose, m = rows > 0, abs(rows)
            k, n = (site.k, site.n) if transpose else (site.n, site.k)
            require_form(y, (1, site.batch, m, n), site.out_dtype)
            y = reference.as_numpy(y)
            for head in range(site.batch):
                _, x64 = inputs(m, k, site.x_dtype, seed=head)
                w = reference.Reference(dict(module), site.mode, site.bits, site.group_size, head).weights()
                w = w.T if transpose else w
                y64, magnitude = x64 @ w, np.abs(x64) @ np.abs(w)
                bound = reference.rounding_bound(y64, magnitude, k, site.out_dtype)
                where = f"rows {m}, head {head}, transpose={transpose}"
                compare(offer, y[0, head], y64, bound, site.out_dtype, where)


def sliced(module: Any, begin: int, end: int) -> Any:
    """A stock layer that holds output features [begin, end) of `module`; shares memory."""
    cls = live_class(module)
    copy = cls.__new__(cls)
    copy.__dict__.update({k: v for k, v in module.__dict__.items() if k != "_accel"})
    for key, value in module.items():
        dict.__setitem__(copy, key, value[begin:end] if hasattr(value, "shape") and value.ndim else value)
    return copy
