"""What every probe has in common: inputs with fixed seeds, calls at several rows, comparison with float64.

A probe knows, for one kind of site, what arguments its layer takes at a number of rows, how stock is called,
and how a result is compared with float64. Inputs come from numpy generators with fixed seeds: mlx's random
state is the user's and is never touched.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import reference
from .errors import VerificationError
from .offers import Offer
from .walk import stock_class

#: The most rows of a verification input. Inputs with fewer rows are its last ones, so that one float64 pass
#: serves all of them.
MOST_ROWS = 20


def inputs(rows: int, k: int, dtype: str, seed: int = 0, most: int = MOST_ROWS) -> tuple[Any, np.ndarray]:
    """(mlx array (rows, k), the same values as float64): normal values, some exact zeros, some outliers.

    Inputs with one `most` end alike.
    """
    array, wide = _pool(max(most, rows), k, dtype, seed)
    return array[-rows:], wide[-rows:]


@functools.lru_cache(maxsize=256)
def _pool(rows: int, k: int, dtype: str, seed: int) -> tuple[Any, np.ndarray]:
    import mlx.core as mx

    rng = np.random.default_rng(1234 + seed)
    x = rng.standard_normal((rows, k), dtype=np.float32)
    x[:, rng.integers(0, k, max(1, k // 64))] *= 12.0
    x[:, rng.integers(0, k, max(1, k // 32))] = 0.0
    array = mx.array(x).astype(getattr(mx, dtype))
    mx.eval(array)
    return array, np.array(array.astype(mx.float32)).astype(np.float64)


@functools.lru_cache(maxsize=64)
def sequences(rows: int, k: int, dtype: str) -> Any:
    """Inputs as layers get them: odd numbers of rows up to 15 are a batch of single tokens, the others one sequence."""
    x, _ = inputs(rows, k, dtype)
    return x.reshape(rows, 1, -1) if rows % 2 and rows < 16 else x.reshape(1, rows, -1)


def forget_inputs() -> None:
    """Free the memory of all inputs."""
    _pool.cache_clear()
    sequences.cache_clear()


class Probe:
    """Base of all probes.

    site
        The site.
    buckets
        Ranges of rows that are decided separately.
    row_elements
        Elements of the first argument that make one row.
    last_dimension
        Length of the first argument's last axis, None if that is not fixed.
    weightless
        True if the layers hold no arrays, so that one of a signature stands for all.
    sliceable
        True if stock can be timed on the first output features alone.
    proportional
        True if stock's time on the CPU is proportional to the rows, so that it can be extrapolated.
    thorough
        False while layers are checked whose offer was checked in full on another layer, or by another process.
    """

    buckets: tuple[tuple[int, int | None], ...] = ((1, 16), (17, None))
    last_dimension: int | None = None
    weightless = False
    sliceable = False
    proportional = False
    thorough = True

    def __init__(self, site: Any) -> None:
        self.site = site
        self.row_elements = 1

    def stock(self, module: Any, *args: Any) -> Any:
        """The stock layer's result, also where the instance is accelerated."""
        return live_class(module).__call__(module, *args)

    def args(self, rows: int) -> tuple[Any, ...]:
        """Arguments of a call at `rows` rows."""
        raise NotImplementedError

    def cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        """(rows, args) of every verification call of layer number `index`, within the offer's range.

        One row, a verification block whose length goes through 2..16 from layer to layer, and a prompt.
        """
        lo, hi = offer.rows
        wanted = [m for m in (1, 2 + (3 + 7 * index) % 15, MOST_ROWS) if m >= lo and (hi is None or m <= hi)]
        return [(m, self.args(m)) for m in wanted or [lo]]

    def brief_cases(self, offer: Offer, index: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Fewer calls, for groups of many layers whose offer was verified in full by an earlier process.

        One row on every layer, and the other two lengths in turn from layer to layer.
        """
        cases = self.cases(offer, index)
        return cases if len(cases) != 3 else [cases[0], cases[1 + index % 2]]

    def check(self, offer: Offer, module: Any, results: list[tuple[int, Any]]) -> None:
        """Compare results (rows, y) with float64. Raises VerificationError naming the worst difference."""
        raise NotImplementedError

    def result_bytes(self, rows: int) -> int:
        """Bytes of the result of a verification call."""
        raise NotImplementedError

    def empty(self, x: Any, *rest: Any) -> Any:
        """The result for an input without elements."""
        raise NotImplementedError

    def variant(self, module: Any, x_dtype: str) -> Any:
        """The same site for other activations, None if there is none."""
        raise NotImplementedError


def live_class(module: Any) -> Any:
    """The stock class of a module, as Any."""
    return stock_class(module)


def require_form(y: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raise VerificationError unless y has stock's shape and dtype."""
    if tuple(y.shape) != tuple(shape):
        raise VerificationError(f"result has shape {tuple(y.shape)}, stock's is {tuple(shape)}")
    if not str(y.dtype).endswith(f".{dtype}"):
        raise VerificationError(f"result has dtype {y.dtype}, stock's is {dtype}")


def compare(offer: Offer, y: np.ndarray, y64: np.ndarray, bound: np.ndarray, dtype: str, where: str) -> None:
    """Raise VerificationError unless |y - y64| <= bound (or the offer's tolerance, if it is lossy)."""
    if offer.exactness == "lossy":
        error = float(np.linalg.norm(y - y64) / max(float(np.linalg.norm(y64)), 1e-30))
        if not error <= offer.tolerance:
            raise VerificationError(f"{where}: relative error {error:.3g}, allowed {offer.tolerance:.3g}")
        return
    excess = reference.worst_ratio(y, y64, bound, dtype)
    if excess > 1.0:
        off = np.abs(y.astype(np.float64) - y64) / bound
        at = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), y.shape)
        raise VerificationError(
            f"wrong result ({where}): {excess:.3g} times the rounding bound; e.g. row {at[0]}, column {at[-1]}: "
            f"{y[at]:.6g} instead of {y64[at]:.6g}"
        )


def require_same_rows(single: np.ndarray | None, y: np.ndarray, rows: int, offer: Offer) -> None:
    """Raise VerificationError if the last of several rows has other bits than that row alone."""
    if single is not None and 1 < rows <= 16 and offer.row_invariant and y[-1].tobytes() != single[0].tobytes():
        raise VerificationError(f"claims to be row-invariant, but the last of {rows} rows differs from that row alone")
