"""How kernels with ``kernels/simt/tiles_simdgroup.h`` are started: many rows on Metal, in tiles.

A threadgroup of 128 lanes makes a tile of 32 or 64 rows and 64 columns. Row tiles follow each other in the grid, so
that threadgroups that run together take the same weights.
"""

from __future__ import annotations

from .kernel import Launch

COLUMNS, FEW_ROWS, ROWS, LANES = 64, 32, 64, 128
#: Values of k that lie in threadgroup memory at a time.
DEEP = 32


def tile_rows(rows: int) -> int:
    """Rows of a tile where there are `rows` in all."""
    return FEW_ROWS if rows <= FEW_ROWS else ROWS


def rows_of_tiles(rows: int) -> int:
    """Rows of the tiles that make `rows` rows; launches for as many serve them."""
    return -(-rows // tile_rows(rows)) * tile_rows(rows)


def tiles_launch(template: tuple[tuple[str, str | int | bool], ...], rows: int, n: int) -> Launch:
    """The launch for `rows` rows of `n` columns."""
    return Launch(template, (LANES * (rows_of_tiles(rows) // tile_rows(rows)), -(-n // COLUMNS), 1), (LANES, 1, 1))


def tiles_bytes(rows: int, dtype: str) -> int:
    """Threadgroup memory of both operands, in tiles of `rows` rows of `dtype`: ``"float16"``."""
    return (rows + COLUMNS) * DEEP * (4 if dtype == "float32" else 2)
