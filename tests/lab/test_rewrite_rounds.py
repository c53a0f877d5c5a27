"""Loops that count their rounds: which are rewritten, and that they run as before."""

from __future__ import annotations

import numpy as np
import pytest

from backend_core.testing import lab
from backend_core.testing.lab.rewrite import rewrite

pytestmark = pytest.mark.lab

COUNTS = "for (lab_rounds lab_r; lab_r.once();) "
ROUND = "if (lab_r.next()) ; else "


def rewritten(body: str, functions: str = "") -> str:
    return rewrite(f"{functions}void f(device float* o) {{ {body} }}").text.partition("void f")[2]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for (;;) x = simd_sum(x);", f"{COUNTS}for (;;) {ROUND}x = simd_sum(x);"),
        ("while (simd_any(x)) { x--; }", f"{COUNTS}while (simd_any(x)) {ROUND}{{ x--; }}"),
        ("do { g(x); } while (x);", f"{COUNTS}do {ROUND}{{ g(x); }} while (x);"),
        ("do if (x) g(x); else y(); while (x); z();", f"{COUNTS}do {ROUND}if (x) g(x); else y(); while (x); z();"),
        ("for (;;) while (x) g(x);", f"{COUNTS}for (;;) {ROUND}{COUNTS}while (x) {ROUND}g(x);"),
        ("for (;;) x++; threadgroup_barrier(n);", "for (;;) x++; threadgroup_barrier(n);"),
        ("while (x) simd_lane++;", "while (x) simd_lane++;"),
        ("for (;;) other(x);", "for (;;) other(x);"),
    ],
)
def test_loops_in_which_lanes_wait(body: str, expected: str) -> None:
    functions = "void h(int x) { quad_sum(x); } void g(int x) const { h(x); } void other(int x) { x++; } "
    assert expected in rewritten(body, functions)


def test_they_run_as_before() -> None:
    text = """
    inline int three() { for (int k = 0;; k++) if (simd_sum(k) == 96) return k; }
    kernel void f(device int* o, uint i [[thread_position_in_threadgroup]]) {
        int n = 0, k = 0;
        if (n) for (int j = 0; j < 2; j++) if (j) n += simd_sum(1); else n = 5; else n = three();
        do { if (++k == 2) continue; if (k == 4) break; n += 10 * simd_max(k); } while (k < 9);
        #pragma unroll
        for (int j = 0; j < 2; j++)
            while (simd_all(k > 2 - j)) k--, n += 1000;
        o[i] = n;
    }"""
    buffers = {0: np.zeros(32, np.int32)}
    head = "#include <metal_stdlib>\nusing namespace metal;\n"
    result = lab.run_msl(head + text, "f", buffers, (32, 1, 1), (32, 1, 1), outputs=[0]).check()
    assert (result.outputs[0] == 3 + 10 * (1 + 3) + 1000 * 3).all()
