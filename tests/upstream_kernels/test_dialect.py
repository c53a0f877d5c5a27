"""What other people's Metal text does that the lab's own kernels do not."""

from __future__ import annotations

import numpy as np
import pytest

from backend_core.testing import lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_compiler")]

#: `constant` is const whether the text says so or not, so both kinds of reference bind to both.
CONSTANT = """
struct Log {
  constexpr Log(constant char*) constant {}
  template <typename... Args> void say(constant char*, Args...) const constant {}
  template <typename... Args> void say(constant char*, Args...) const thread {}
};
struct Pair { int a; int b; int sum() const constant { return a + b; } };
static constant constexpr const int ONE = 1;
constant int TABLE[2] = {3, 4};
inline int plain(constant int& n, constant int* more) { return n + more[1] + TABLE[1]; }
template <typename T> inline T same(const constant T& n) { return n; }
kernel void f(const constant int& n [[buffer(0)]], constant Pair* pairs [[buffer(1)]],
              device int* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  constant Pair& mine = pairs[i];
  out[i] = plain(n, &mine.a) + same(n) + mine.sum() + ONE;
}
"""


def test_constant_is_const() -> None:
    pairs = np.array([[10, 20], [30, 40]], dtype=np.int32)
    result = lab.run_msl(
        CONSTANT, "f", {0: 5, 1: pairs, 2: np.zeros(2, np.int32)}, grid=(2, 1, 1), threadgroup=(2, 1, 1), outputs=[2]
    ).check()
    assert list(result.outputs[0]) == [5 + 20 + 4 + 5 + 30 + 1, 5 + 40 + 4 + 5 + 70 + 1]


def test_a_store_to_constant_does_not_compile() -> None:
    text = "kernel void f(constant int* n [[buffer(0)]], uint i [[thread_position_in_grid]]) {\n  n[i] = 1;\n}"
    with pytest.raises(lab.LabError, match=r"kernel\.metal:2: error:.*read-only"):
        lab.run_msl(text, "f", {0: np.zeros(1, np.int32)}, grid=(1, 1, 1), threadgroup=(1, 1, 1))


def test_less_than_in_the_value_of_a_member() -> None:
    text = """
    template <int A, int B> struct Steps {
      static constant constexpr const int n = A < B ? 1 : A / B;
      static constant constexpr const int last = n < 2 ? B : n;
    };
    kernel void f(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      out[i] = Steps<8, 2>::n + 10 * Steps<1, 7>::last;
    }"""
    result = lab.run_msl(text, "f", {0: np.zeros(1, np.int32)}, grid=(1, 1, 1), threadgroup=(1, 1, 1), outputs=[0])
    assert list(result.check().outputs[0]) == [4 + 70]
