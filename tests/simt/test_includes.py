"""Functions that a kernel file takes from another one."""

from __future__ import annotations

import pytest

from backend_core.simt import text_of

HELPERS = """// What both share.
#include "more.metal"

METAL_FUNC int twice(int v) {
  return two() * v;
}
"""
MORE = "METAL_FUNC int two() {\n  return 2;\n}\n\n// --- kernel other ---\ny[0] = two();\n"
KERNEL = """// A kernel.
#include "helpers.h"
#include "more.metal"

METAL_FUNC int four() {
  return twice(2);
}
// --- kernel fours ---
y[0] = four();
"""


def write(folder, **texts) -> None:
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)


def test_functions_of_included_files_come_first_and_once_with_their_own_lines(tmp_path) -> None:
    write(tmp_path, helpers_h=HELPERS, more_metal=MORE, kernel_metal=KERNEL)
    header = text_of(tmp_path / "kernel.metal", "fours", "metal").header
    assert header == (
        '#line 1 "more.metal"\nMETAL_FUNC int two() {\nreturn 2;\n}\n'
        '#line 4 "helpers.h"\nMETAL_FUNC int twice(int v) {\nreturn two() * v;\n}\n'
        '#line 5 "kernel.metal"\nMETAL_FUNC int four() {\nreturn twice(2);\n}\n'
    )
    cuda = text_of(tmp_path / "kernel.metal", "fours", "cuda").header
    assert cuda.endswith(header) and "#include" not in cuda


def test_files_beside_the_preludes_are_found(tmp_path) -> None:
    write(tmp_path, kernel_metal='#include "tiles_simdgroup.h"\n// --- kernel k ---\ny[0] = TILE_DEEP;\n')
    header = text_of(tmp_path / "kernel.metal", "k", "metal").header
    assert "TILE_COLUMNS = 64, TILE_DEEP = 32;" in header


def test_a_file_that_is_nowhere_is_named(tmp_path) -> None:
    write(tmp_path, kernel_metal='#include "nothing.h"\n// --- kernel k ---\ny[0] = 1;\n')
    with pytest.raises(ValueError, match=r"kernel.metal includes 'nothing.h', which is neither beside it nor"):
        text_of(tmp_path / "kernel.metal", "k", "metal")


def test_files_are_read_again_when_they_have_changed(tmp_path) -> None:
    write(tmp_path, helpers_h=HELPERS, more_metal=MORE, kernel_metal=KERNEL)
    before = text_of(tmp_path / "kernel.metal", "fours", "metal")
    assert text_of(tmp_path / "kernel.metal", "fours", "metal") is before
    assert before.files == (("more.metal", MORE), ("helpers.h", HELPERS), ("kernel.metal", KERNEL))
    write(tmp_path, more_metal=MORE.replace("2", "3"))
    header = text_of(tmp_path / "kernel.metal", "fours", "metal").header
    assert header == before.header.replace("return 2", "return 3")
    write(tmp_path, kernel_metal=KERNEL.replace("y[0]", "y[1]"))
    assert text_of(tmp_path / "kernel.metal", "fours", "metal").source.endswith("y[1] = four();\n")
