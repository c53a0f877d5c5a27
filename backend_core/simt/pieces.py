"""How kernels with ``kernels/simt/pieces.h`` are started: few rows on CUDA, pieces of weights fetched ahead.

A threadgroup makes tiles of 16 columns, a piece is 1024 values of k (an octet of groups of 128) of a tile. Its SIMD
groups take pieces in turns, and each has memory for some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .kernel import Launch

#: Multiprocessors that launches fill, an H200's; others take more or fewer turns.
MULTIPROCESSORS = 132
#: Columns of a tile.
COLUMNS = 16
#: Values of k of a piece.
DEEP = 1024
#: Pieces at a time, at most, where a row has no more.
MOST_PIECES = 64


class Shape(NamedTuple):
    """What a threadgroup has memory for.

    rows
        Of x in one pass over the weights; 0 if not even one has room.
    simd_groups
        Of the threadgroup.
    depth
        Pieces that each of them has memory for.
    items
        Pieces at a time, whole tiles of them: those of which there are sums.
    """

    rows: int = 0
    simd_groups: int = 0
    depth: int = 0
    items: int = 0


def octets(k: int) -> int:
    """Pieces of a tile."""
    return -(-k // DEEP)


def shape_that_fits(rows: int, k: int, shapes: Iterable[tuple[int, int]], at_once: Sequence[int],
                    fits: Callable[[Shape], bool]) -> Shape:  # fmt: skip
    """The shape for `rows` rows of x.

    shapes
        (SIMD groups, depth), the fastest first.
    at_once
        Rows in one pass that there are kernels for.
    fits
        Whether there is memory for a shape; if so, also for one with fewer items.
    """
    pieces, best = octets(k), Shape()
    for groups, depth in shapes:
        most = max((r for r in at_once if r < 2 * rows and fits(Shape(r, groups, depth, pieces))), default=0)
        # Fewer passes over the weights are worth fewer SIMD groups if there are many, down to eight.
        if most > best.rows and (not best.rows or (rows > 2 and groups >= 8)):
            # Many tiles at once, as far as there is room for their sums; not as N asks, to compile less.
            made = (Shape(most, groups, depth, t * pieces) for t in range(max(MOST_PIECES // pieces, 1), 0, -1))
            best = next(filter(fits, made))
    return best


def pieces_launch(template: tuple[tuple[str, str | int | bool], ...], shape: Shape, rows: int, n: int,
                  blocks: int = 0) -> Launch:  # fmt: skip
    """The launch for `rows` rows and `n` columns; blocks: threadgroups of a pass, as many as run at once if 0."""
    if not shape.rows:
        raise ValueError("no such launch has room in threadgroup memory")
    passes, lanes = -(-rows // shape.rows), 32 * shape.simd_groups
    blocks = blocks or min(-(-n // COLUMNS), max(MULTIPROCESSORS // passes, 1))
    return Launch(template, (lanes * blocks, passes, 1), (lanes, 1, 1))
