"""How mlx starts its kernels for products with quantized matrices: one table for affine and microscaling formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Geometry:
    """Threadgroups along x, y and z for m rows of x and n of the matrix, given the kernel's further template arguments.

    with_rows: the kernel takes the number of rows of x behind n.
    """

    groups: Callable[[int, int, str], tuple[int, int, int]]
    threads: tuple[int, int, int] = (32, 2, 1)
    with_rows: bool = False

    def grid(self, m: int, n: int, more: str = "", layers: int = 1) -> tuple[int, int, int]:
        """Threads along each axis; `layers` of threadgroups along z, one of which does all the work."""
        x, y, _ = (g * t for g, t in zip(self.groups(m, n, more), self.threads, strict=True))
        return x, y, layers * self.threads[2]


def _wide(m: int, n: int, more: str) -> tuple[int, int, int]:
    """`more` begins with the rows of x that are done together and the lanes that share a row of the matrix."""
    together, lanes = (int(v) for v in more.split(",")[:2])
    return _ceil(m, together), _ceil(n, 2 * 32 // lanes), 1


_ROWS_OF_8 = Geometry(lambda m, n, more: (m, _ceil(n, 8), 1))
_TILES = Geometry(lambda m, n, more: (_ceil(n, 32), _ceil(m, 32), 1), (32, 2, 2), with_rows=True)
GEOMETRIES = {
    "affine_qmv_fast": _ROWS_OF_8,
    "affine_qmv": _ROWS_OF_8,
    "affine_qmv_wide": Geometry(_wide, with_rows=True),
    "affine_qmv_quad": Geometry(lambda m, n, more: (m, _ceil(n, 64), 1), (32, 1, 1)),
    "affine_qmm_t": _TILES,
    "affine_qmm_n": _TILES,
    "affine_qvm": Geometry(lambda m, n, more: (m, _ceil(n, 64), 1)),
    "fp_qmv_fast": _ROWS_OF_8,
    "fp_qmv": _ROWS_OF_8,
    "fp_qmv_wide": Geometry(_wide, with_rows=True),
    "fp_qmm_t": _TILES,
}
