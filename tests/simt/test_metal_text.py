"""What mlx hands to Metal's compiler, compared with a stored file: no Metal is needed to write it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "row_sums.golden.metal"

# While a function is exported mlx writes the kernel's text, and never compiles it.
CODE = """
import sys; sys.path.insert(0, {here!r})
import mlx.core as mx
from rows import ROW_SUMS
from backend_core.simt import arguments
launch = ROW_SUMS.launch(rows={rows}, groups=2, dtype="float16")
def f(x):
    return ROW_SUMS.metal()(inputs=[x], output_shapes=[({rows},)], output_dtypes=[mx.float16], verbose=True,
                            stream=mx.gpu, **arguments(launch, mx))[0]
mx.export_function({path!r}, f, mx.zeros(({rows}, {length}), mx.float32))
"""


def generated(tmp_path, rows: int, length: int) -> str:
    code = CODE.format(here=str(GOLDEN.parent), rows=rows, length=length, path=str(tmp_path / "f.mlxfn"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if "```" not in done.stdout:
        pytest.fail(f"mlx wrote no text: {done.stderr[-500:]}")
    return done.stdout.split("```")[1].lstrip("\n")


def test_the_text_is_the_stored_one(tmp_path) -> None:
    assert generated(tmp_path, 3, 64) == GOLDEN.read_text()


def test_small_inputs_are_constant(tmp_path) -> None:
    assert "const device float* x" in GOLDEN.read_text()
    small = generated(tmp_path, 1, 4)
    assert "const constant float* x" in small and "const device float* x" not in small
