"""The test kernels as registry entries."""

from __future__ import annotations

from pathlib import Path

from backend_core.simt import Launch, SimtKernel

SOURCE = Path(__file__).parent / "rows.metal"


def _geometry(*, rows, groups, dtype, twice=False):
    template = (("T", dtype), ("GROUPS", groups), ("TWICE", twice))
    return Launch(template, (32 * groups * rows, 1, 1), (32 * groups, 1, 1))


ROW_SUMS = SimtKernel(
    name="row_sums",
    source=SOURCE,
    inputs=("x",),
    outputs=("y",),
    template=("T", "GROUPS", "TWICE"),
    geometry=_geometry,
    threadgroup_bytes=lambda launch: 4 * launch.value("GROUPS"),
    eligible=lambda *, rows, **_: "" if rows < 1000 else f"{rows} rows",
)
COPIED = SimtKernel("copied", SOURCE, ("x",), ("y",), (), lambda *, n: Launch((), (n, 1, 1), (n, 1, 1)))
