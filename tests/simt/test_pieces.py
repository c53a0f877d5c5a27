"""The search for a launch that fits: order of shapes, rows in one pass, sums of several tiles."""

from __future__ import annotations

import pytest

from backend_core.simt.pieces import MULTIPROCESSORS, Shape, pieces_launch, shape_that_fits

SHAPES = [(16, 2), (8, 2), (4, 2)]


def within(most: int):
    """Memory of 100 units for each row, one for each row and item, 10 for each piece of a SIMD group."""
    return lambda s: s.rows * (100 + s.items) + 10 * s.simd_groups * s.depth <= most


def found(rows: int, most: int, k: int = 4096) -> Shape:
    return shape_that_fits(rows, k, SHAPES, (1, 2, 4, 8), within(most))


def test_the_first_shape_that_has_room_for_all_rows_with_as_many_whole_tiles_as_fit() -> None:
    assert found(1, 10000) == Shape(1, 16, 2, 64)
    # 100 + 320 of 431 are taken: eleven items, of which two tiles of four are whole.
    assert found(1, 431) == Shape(1, 16, 2, 8)
    assert found(3, 10000) == Shape(4, 16, 2, 64)
    # A row of more pieces than there are at a time otherwise.
    assert found(1, 10000, 1024 * 70 + 1) == Shape(1, 16, 2, 71)


def test_fewer_passes_are_worth_fewer_simd_groups_down_to_eight() -> None:
    # Sixteen SIMD groups leave room for one row, eight for two, four for three.
    assert found(8, 496) == Shape(2, 8, 2, 64)
    assert found(2, 496) == Shape(1, 16, 2, 64)
    # Where sixteen leave room for none, the next that leave room for any; four are too few to take their place.
    assert found(8, 288) == found(2, 288) == Shape(1, 8, 2, 28)
    assert found(8, 8 * 104 + 160) == Shape(8, 8, 2, 4)


def test_no_room_is_no_rows() -> None:
    assert found(1, 180).rows == 0


@pytest.mark.parametrize(("rows", "n", "blocks", "grid"), [
    (1, 40, 0, (3, 1)), (1, 1 << 20, 0, (MULTIPROCESSORS, 1)), (16, 1 << 20, 0, (MULTIPROCESSORS // 4, 4)),
    (3, 40, 2, (2, 1)),
])  # fmt: skip
def test_threadgroups_are_as_many_as_run_at_once(rows, n, blocks, grid) -> None:
    launch = pieces_launch((("ROWS", 4),), Shape(4, 8, 2, 64), rows, n, blocks)
    assert launch.grid == (256 * grid[0], grid[1], 1) and launch.threadgroup == (256, 1, 1)
