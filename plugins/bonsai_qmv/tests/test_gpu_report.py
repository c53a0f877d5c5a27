"""The lab's report of the GPU kernels: nothing of it is wrong."""

from __future__ import annotations

import pytest
from bonsai_qmv import lab_cases
from bonsai_qmv.gpu_kernels import KERNELS

from backend_core.testing.lab.report_command import lines, run

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_case_keeps_the_contract(kernel) -> None:
    found = [run(kernel, case) for case in lab_cases.cases(kernel)]
    # One serves 1 bit alone.
    assert len(found) >= (2 if kernel.name == "affine_bits" else 7)
    assert not [text for f in found for text in f.wrong]
    assert all(f.contract["w"] > 0 and f.races == 0 for f in found)
    assert any(f.contract["biases"] == 0 for f in found)
    assert sum(line.startswith("  ") for line in lines(found)) > 8 * len(found)
