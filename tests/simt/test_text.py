"""Kernel files as text for Metal and for CUDA."""

from __future__ import annotations

import re

import pytest
from rows import COPIED, ROW_SUMS, SOURCE

from backend_core.simt import preludes, text_of


def test_a_kernel_s_text_is_the_functions_and_its_own_body() -> None:
    text = ROW_SUMS.text("metal")
    assert "row_sum(X x" in text.header and "threadgroup float parts" in text.source
    assert "thread_position_in_grid.x]" not in text.source
    assert COPIED.text("metal").source.endswith("y[thread_position_in_grid.x] = x[thread_position_in_grid.x];\n")


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_comments_and_indentation_are_left_out_and_lines_keep_their_numbers(target) -> None:
    lines = SOURCE.read_text().splitlines()
    for text in (ROW_SUMS.text(target).header, ROW_SUMS.text(target).source, COPIED.text(target).source):
        assert "//" not in text and "/*" not in text and not re.search(r"^\s|\n[ \t\n]", text)
        number = None
        for line in text.splitlines():
            if match := re.fullmatch(r'#line (\d+) "rows.metal"', line):
                number = int(match.group(1))
            elif number is not None:
                if line.startswith("__shared__"):
                    line = line.replace("__shared__", "threadgroup")
                assert re.sub(r"//.*|/\*.*", "", lines[number - 1]).strip() == line.strip()
                number += 1
        assert number is not None


def test_for_cuda_threadgroup_arrays_are_shared_and_positions_are_declared() -> None:
    source = ROW_SUMS.text("cuda").source
    assert "__shared__ float parts[GROUPS];" in source and "threadgroup float" not in source
    declared = re.findall(r"^(?:uint|uint3) (\w+) = ", source, re.M)
    assert set(declared) == {"threadgroup_position_in_grid", "thread_index_in_threadgroup",
                             "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup"}  # fmt: skip


def test_only_the_sections_of_the_prelude_that_are_used_are_taken() -> None:
    used, unused = ROW_SUMS.text("cuda").header, COPIED.text("cuda").header
    assert "float simd_sum(float" in used and "void threadgroup_barrier" in used
    assert "mma" not in used
    # The functions of a file go with each of its kernels, barriers only with those that have some.
    assert "threadgroup_barrier" not in unused


def test_every_section_of_a_prelude_is_named_in_the_other_or_is_metal_s_own() -> None:
    def names(target: str) -> set[str]:
        text = (preludes() / f"prelude_{target}.h").read_text()
        return {word for line in re.findall(r"^//:(.*)$", text, re.M) for word in line.split()}

    metal_s_own = {"INFINITY", "as_type", "popcount", "threadgroup_barrier", "simdgroup_barrier", "mem_flags"}
    missing = {n for n in names("cuda") - names("metal") - metal_s_own if not n.startswith("simd_")}
    assert not missing


def test_unknown_kernels_and_missing_files_are_errors(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"rows.metal has no kernel 'other'; it has row_sums, copied"):
        text_of(SOURCE, "other", "metal")
    with pytest.raises(FileNotFoundError):
        text_of(tmp_path / "none.metal", "other", "metal")
