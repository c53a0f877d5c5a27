"""Metal text as C++: what is rewritten, what is left alone, and that lines stay where they are."""

from __future__ import annotations

import numpy as np
import pytest

from backend_core.testing import lab
from backend_core.testing.lab.rewrite import rewrite

pytestmark = pytest.mark.lab


def test_swizzles_and_variables_of_the_same_name() -> None:
    text = """kernel void f(device float* o) {
        float4 v = float4(1, 2, 3, 4);
        float2 xy = v.xy, zw(v.zw);
        o[0] = xy.y + zw.x + v.wzyx.w;
    }"""
    (o,) = lab.run_msl(text, "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1), outputs=[0]).check().outputs
    assert o[0] == 2 + 3 + 1
    members = """struct S { float xy; float get(float2 zw) const { return xy + zw.x; } };
    kernel void f(device float* o) {
        S s;
        s.xy = 5;
        o[0] = s.xy + s.get(float4(1, 2, 3, 4).zw);
    }"""
    (o,) = lab.run_msl(members, "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1), outputs=[0]).check().outputs
    assert o[0] == 5 + 5 + 3


def test_names_that_later_cpp_keeps_for_itself() -> None:
    text = """kernel void w(device float* o) {
        int requires = 1, concept = 2, co_await = 3;
        o[0] = requires + concept + co_await;
    }"""
    (o,) = lab.run_msl(text, "w", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1), outputs=[0]).check().outputs
    assert o[0] == 6


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_kernels_and_their_parameters() -> None:
    found = rewrite("""
        struct P { int n; };
        template <typename T, int N = 4>
        [[kernel, max_total_threads_per_threadgroup(64)]] void first(
            const device T* a [[buffer(0)]], constant P& p [[buffer(3), function_constant(has_p)]],
            threadgroup float* shared [[threadgroup(1)]], uint3 at [[thread_position_in_grid]]) {}
        kernel void second(device float* o) {}
        void no_kernel(device float* o) {}
        template [[host_name("first" "_half")]] [[kernel]] decltype(first<half, 2>) first<half, 2>;
        template [[host_name("old")]] kernel void first<float, (1 > 2 ? 3 : 4)>(const device float*, constant P&,
            threadgroup float*, uint3);
    """)
    assert set(found.kernels) == {"first", "second"}
    first = found.kernels["first"]
    assert first.template and not found.kernels["second"].template
    assert [(p.name, p.attributes, p.space) for p in first.params] == [
        ("a", [("buffer", "0")], "device"),
        ("p", [("buffer", "3"), ("function_constant", "has_p")], "constant"),
        ("shared", [("threadgroup", "1")], "threadgroup"),
        ("at", [("thread_position_in_grid", "")], ""),
    ]
    assert found.host_names == {"first_half": "first<half, 2>", "old": "first<float, (1 > 2 ? 3 : 4)>"}
    assert "[[" not in found.text and "decltype" not in found.text


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("threadgroup float a[4];", ["a"]),
        ("threadgroup float a[4], b, c[2][N + 1];", ["a", "b", "c"]),
        ("threadgroup metal::vec<T, 4> a[4]; threadgroup S s;", ["a", "s"]),
        ("threadgroup alignas(16) half a[4];", ["a"]),
        ("if (x) { threadgroup unsigned int a[4]; }", ["a"]),
        ("threadgroup float* a = s;", []),
        ("const threadgroup float* a = s;", []),
        ("f((threadgroup float*)a);", []),
        ("threadgroup float& a = s[0];", []),
    ],
)
def test_threadgroup_variables(text: str, shared: list[str]) -> None:
    out = rewrite(f"void f() {{ {text} }}").text
    assert [n for n in ("a", "b", "c", "s") if f"lab_type_{n}& {n} =" in out] == shared
    if not shared:
        assert text in out


def test_swizzles_and_members_of_that_name() -> None:
    out = rewrite("void f() { v.xy = w->zyx; v.rgba += 1; a = v.x + s.length; b = v.xz == c; }").text
    assert "v.template lab_swizzle_assign<0, 1>() = w->template lab_swizzle<2, 1, 0>()" in out
    assert "v.template lab_swizzle_assign<0, 1, 2, 3>() += 1" in out
    assert "v.x + s.length" in out and "v.template lab_swizzle<0, 2>() == c" in out
    assert "s.ab = 1" in rewrite("struct S { int ab; }; void f() { s.ab = 1; }").text


def test_declarations_that_differ_in_address_spaces() -> None:
    out = rewrite("""
        struct S {
            S(int v) thread : v_(v) {}
            int get() const device { return v_; }
            int get() const threadgroup { return v_; }
            int other() const device { return 1; }
            int v_;
        };
        template <typename T> struct E {};
        template <typename T> struct E<device T*> { using type = T; };
        template <typename T> struct E<constant T*> { using type = T; };
        float f(device float* p);
        float f(device float* p) { return p[0]; }
        float f(threadgroup float* p) { return p[0]; }
        float g(device int* p) { return p[0]; }
    """).text
    assert out.count("int get()") == 1 and out.count("int other()") == 1
    assert out.count("struct E<") == 1
    assert out.count("float f(device float* p)") == 2 and "f(threadgroup" not in out
    assert "float g(device int* p)" in out


def test_lines_stay_where_they_are() -> None:
    text = """[[kernel]] void f(
    device float* o [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  threadgroup float
      a[4],
      b;
  a[i] = b;
}
template
[[host_name("x")]] [[kernel]]
decltype(f) f<>;
int last;
"""
    out = rewrite(text).text
    assert out.count("\n") == text.count("\n")
    assert out.splitlines()[5].strip() == "" and "a[i] = b;" in out.splitlines()[6]
    assert out.splitlines()[11] == "int last;"


def test_brackets_that_are_never_closed_are_an_error() -> None:
    with pytest.raises(lab.LabError, match="never closed"):
        lab.run_msl("kernel void f(device float* o { o[0] = 1; }", "f", {0: np.zeros(1)}, (1, 1, 1), (1, 1, 1))


def test_names_of_the_host_do_not_clash() -> None:
    """select, exp and friends are Metal's; a kernel may call its own functions as it likes."""
    text = """
        #include <metal_stdlib>
        using namespace metal;
        float read(device const float* a, uint i) { return a[i]; }
        float write(float x) { return select(x, -x, x > 2.0f); }
        namespace own { float exp(float x) { return x + 1; } }
        kernel void open(device const float* a, device float* o, uint i [[thread_position_in_grid]]) {
            float4 index = float4(write(read(a, i)), own::exp(a[i]), exp(0.0f), abs(-1));
            o[i] = index.x + index.y + index.z + index.w;
        }
    """
    a = np.arange(4, dtype=np.float32)
    result = lab.run_msl(text, "open", {0: a, 1: np.zeros(4, np.float32)}, (4, 1, 1), (4, 1, 1), outputs=[1]).check()
    assert (result.outputs[0] == np.where(a > 2, -a, a) + a + 1 + 1 + 1).all()
