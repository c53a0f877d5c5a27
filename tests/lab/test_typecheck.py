"""The type check refuses what Metal's compiler refuses, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from backend_core.testing import lab

pytestmark = pytest.mark.lab

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def type_checker() -> Iterator[None]:
    try:
        lab.find_type_checker()
    except lab.CompilerMissing as e:
        pytest.skip(str(e))
    yield


def test_good_files_pass() -> None:
    assert lab.check_msl(HERE / "functions.metal") == ()
    (found,) = lab.check_msl(HERE / "faults.metal")  # whose other faults are no matter of types
    assert found.message == "function 'down' calls itself: recursion"


def test_template_instances_are_checked() -> None:
    text = """
        #include <metal_stdlib>
        using namespace metal;
        template <typename T> T twice(T x) { return x.none; }
        template <typename T> kernel void f(device T* o) { o[0] = twice(o[0]); }
    """
    assert lab.check_msl(text) == ()
    (found,) = lab.check_msl(text, ["f<float>"])
    assert "twice" in found.source and found.line == 4


FAULTS = {
    "constant to device": (
        "float first(device const float* p) { return p[0]; }\n"
        "kernel void f(constant float* a, device float* o) { o[0] = first(a); }",
        2, "no matching function",
    ),
    "threadgroup to device": (
        "kernel void f(device float* o) { threadgroup float s[4]; device float* p = s; o[0] = p[0]; }",
        1, "__local",
    ),
    "write to constant": ("kernel void f(constant float* a) { a[0] = 1; }", 1, "constant"),
    "threadgroup outside of a kernel": (
        "float g(uint i) {\n  threadgroup float s[4];\n  return s[i];\n}\n"
        "kernel void f(device float* o) { o[0] = g(1); }",
        2, "outside of a kernel",
    ),
    "double": ("kernel void f(device float* o) {\n  double d = 1;\n  o[0] = d;\n}", 2, "double"),
    "half and float": (
        "kernel void f(device half* h, device float* o) {\n  o[0] = max(h[0], o[0]);\n}", 2, "ambiguous"
    ),
    "integer in exp": ("kernel void f(device float* o) { o[0] = exp(1); }", 1, "ambiguous"),
    "no address space": ("void g(float* p) { p[0] = 1; }\nkernel void f(device float* o) { }", 1, "without an address"),
    "no address space for a reference": (
        "struct S { float v; };\nfloat g(const S& s) { return s.v; }\nkernel void f(device float* o) { }",
        2, "reference without",
    ),
    "function pointer": (
        "float g(float x) { return x; }\nkernel void f(device float* o) { float (*p)(float) = g; o[0] = p(1); }",
        2, "pointers to functions",
    ),
    "virtual": ("struct S { virtual int v(); };\nkernel void f(device float* o) { }", 1, "virtual"),
    "exceptions": ("kernel void f(device float* o) { try { o[0] = 1; } catch (...) { } }", 1, "exceptions"),
    "standard library": ("kernel void f(device float* o) { o[0] = std::max(1, 2); }", 1, "std"),
    "vector of half as float": (
        "kernel void f(device half4* h, device float4* o) { float4 v = h[0]; o[0] = v; }", 1, "half4"
    ),
    "integer functions of floats": (
        "kernel void f(device float4* o) {\n  o[0] = rotate(o[0], o[1]);\n}", 2, "no matching function",
    ),
    "functions of two kinds of vectors": (
        "kernel void f(device half4* h, device float4* o) {\n  o[0] = max(o[0], h[0]);\n}", 2, "no matching function",
    ),
    "global": ("const float g = 1;\nkernel void f(device float* o) { o[0] = g; }", 1, "'g' at program scope"),
    "global of a template": (
        "template <typename T> constexpr T one = T(1);\nkernel void f(device float* o) { o[0] = one<float>; }",
        1, "'one' at program scope",
    ),
    "static": ("kernel void f(device float* o) {\n  static int n = 0;\n  o[0] = n++;\n}", 2, "static variable 'n'"),
    "static member": (
        "struct S {\n  static constexpr int n = 3;\n};\nkernel void f(device float* o) { o[0] = S::n; }",
        2, "static variable 'n'",
    ),
    "pointer variable": (
        "kernel void f(device float* o) {\n  float v = 1;\n  const float* p = &v;\n  o[0] = *p;\n}",
        3, "'p' is a pointer without",
    ),
    "reference variable": ("kernel void f(device float* o) { float v = 1; float& r = v; o[0] = r; }", 1, "'r' is a"),
    "pointer member": ("struct S { float* p; };\nkernel void f(device float* o) { }", 1, "'p' is a pointer without"),
    "pointer as a result": (
        "float* g(device float* p) { return p; }\nkernel void f(device float* o) { }", 1, "'g' returns a pointer"
    ),
    "cast": ("kernel void f(device float* o) { o[0] = *(const float*)(o + 1); }", 1, "a cast to a pointer"),
    "recursion": (
        "float g(float x) { return x < 1 ? 1 : x * g(x - 1); }\nkernel void f(device float* o) { o[0] = g(3); }",
        1, "'g' calls itself",
    ),
    "recursion of two": (
        "float h(float x);\nfloat g(float x) { return h(x - 1); }\nfloat h(float x) { return x < 1 ? 1 : g(x); }\n"
        "kernel void f(device float* o) { o[0] = g(3); }",
        3, "'h' calls itself",
    ),
    "goto": ("kernel void f(device float* o) {\n a: o[0] += 1;\n if (o[0] < 1) goto a;\n}", 3, "goto"),
    "long long": ("kernel void f(device float* o) { long long d = 1; o[0] = d; }", 1, "long long"),
    "assembler": ("kernel void f(device float* o) { asm(\"nop\"); o[0] = 1; }", 1, "assembler"),
    "one index twice": (
        "kernel void f(device float* o [[buffer(0)]],\n  device float* p [[buffer(0)]]) { o[0] = p[1]; }",
        1, "have [[buffer(0)]]",
    ),
    "kernel with a value": ("kernel float f(device float* o) { return o[0]; }", 1, "'f' returns a value"),
    "order of an atomic": (
        "kernel void f(device atomic_uint* o) { atomic_fetch_add_explicit(o, 1u, memory_order_seq_cst); }",
        1, "memory_order_relaxed only",
    ),
    "too few parts": ("kernel void f(device float4* o) {\n  o[0] = float4(o[0].xy, 1.0f);\n}", 2, "float4"),
}  # fmt: skip

NEAR_MISSES = {
    "constant by a template": (
        "template <typename P> float first(P p) { return p[0]; }\n"
        "kernel void f(constant float* a, device float* o) { o[0] = first(a) + first(o); }"
    ),
    "threadgroup in a kernel": (
        "float g(threadgroup float* s, uint i) { return s[i]; }\n"
        "kernel void f(device float* o) { threadgroup float s[4], t; s[0] = t = 1; o[0] = g(s, 0); }"
    ),
    "half and float": (
        "kernel void f(device half* h, device float* o) { o[0] = max(float(h[0]), o[0]) * h[1] + 1.0; h[0] = 1.0h; }"
    ),
    "thread pointers": (
        "void g(thread float* p, const thread float& x) { p[0] = x; }\n"
        "kernel void f(device float* o) { float v[2]; g(v, 2.0f); o[0] = v[0]; }"
    ),
    "vectors": (
        "kernel void f(device half4* h, device float4* o, constant float4& c) {\n"
        "  float4 v = float4(h[0]) * c.wzyx; v.xy = float2(1, 2);\n"
        "  o[0] = fma(v, float4(2.0f), vec<float, 4>(v.xy, v.zw)); }"
    ),
    "bfloat": "kernel void f(device bfloat* b, device float* o) { o[0] = b[0] * 2.0f; b[1] = bfloat(o[0]) + 1.0bf; }",
    "functions of vectors": (
        "kernel void f(device packed_float3* p, device float3* o, device int4* n, device half2* h) {\n"
        "  float3 v = p[0], t; int3 e; int k; half d; half2 g;\n"
        "  o[0] = max(0.5f, v) + min(p[1], v) + pow(v, 2) + clamp(v, -1.0f, v + 1) + fma(v, 2, p[0]);\n"
        "  o[1] = frexp(v, e) + modf(v, t) + sincos(v, t) + ldexp(v, e) + ldexp(v, 2) + float3(ilogb(v));\n"
        "  o[5] = mix(v, t, 0.5f); h[0] = frexp(h[0].x, k) + modf(h[1], g) + modf(h[0].y, d) + max(g, 0.0h);\n"
        "  o[2] = reflect(v, t) + refract(v, t, 0.5f) + faceforward(v, t, v) * distance_squared(v, t);\n"
        "  o[3] = fast::normalize(v) * precise::distance(v, t) + fast::clamp(v, 0.0f, fast::min(v.x, 2.0f));\n"
        "  if (any(isnan(v)) || all(isordered(v, t))) o[4] = select(v, 0.0f, v > 1);\n"
        "  n[0] = rotate(n[0], 3) + mulhi(n[0], n[1]) + abs(n[0]) + median3(n[0], 1, 2) + mad24(n[0], n[1], 3);\n"
        "  n[1] = insert_bits(extract_bits(n[0], 1, 2), n[1], 2, 3) + reverse_bits(n[0]) + int4(absdiff(n[0], n[1]));\n"
        "  quad_vote q = quad_ballot(k > 1); k = quad_prefix_inclusive_sum(k) + quad_shuffle_and_fill_up(k, k, 1);\n"
        "  if (q.all() || quad_active_threads_mask().any()) n[2] = (quad_vote::vote_t)q + abs(k) - 10; }"
    ),
    "constants": (
        "constant float a = 1; static constant constexpr const int n[2] = {1, 2};\n"
        "template <typename T> constexpr constant T two = T(2); enum Kind { first, second };\n"
        "struct S { static constant constexpr int n = 3; int m; static int g(int x) { return x; } };\n"
        "kernel void f(device float* o) { constexpr int k = 3; static constant constexpr int z = 1;\n"
        "  o[0] = a + n[1] + S::n + k + z + second + S::g(1) + two<float>; }"
    ),
    "pointers": (
        "struct S { device float* p; thread const float& r; };\n"
        "device float* next(device float* p) { return p + 1; }\n"
        "kernel void f(device float* o, device float* q, constant int& n) {\n"
        "  device float* p = next(o); const device float* const d = p;\n"
        "  float v[2]; thread float* t = v; auto u = &v[1];\n"
        "  float a = 2, b = 3, c; c = a * b; t[0] = a * t[1] + (a) * b; int m = n & 1;\n"
        "  bool small = n < 1; if (a < b) c = small ? a * b : a * *u; \n"
        "  o[0] = *(device float*)(d + 1) + c + *(thread int*)t + m + sizeof(device float*); }"
    ),
    "no recursion": (
        "float g(float x) { return x; }\nhalf g(half x) { return half(g(float(x))); }\n"
        "template <int N> float sum(float x) { if constexpr (N > 0) return x + sum<N - 1>(x); else return x; }\n"
        "float later(float x);\nfloat h(float later) { float h = later; return h * (2); }\n"
        "float later(float x) { return h(x); }\n"
        "kernel void f(device float* o) { o[0] = sum<3>(g(o[1])) + later(1); }"
    ),
    "one index of two constants": (
        "constant bool yes [[function_constant(0)]];\nconstant bool no = !yes;\n"
        "kernel void f(device float* o [[buffer(0), function_constant(yes)]],\n"
        "  device half* p [[buffer(0), function_constant(no)]], device uint* q [[buffer(1)]],\n"
        "  threadgroup float* s [[threadgroup(0)]]) { q[0] = 1; }"
    ),
    "members in brackets": (
        "struct S { int a, b; S(int x, int y, int z) : a(x), b(x + y * z) {} };\n"
        "kernel void f(device float* o) { S s(1, 2, 3); o[0] = s.a + s.b; }"
    ),
    "names of OpenCL": "kernel void f(device float* o, uint local) { uint global = local; o[global] = 1; }",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    text, line, message = FAULTS[name]
    found = lab.check_msl("#include <metal_stdlib>\nusing namespace metal;\n" + text)
    assert found, "nothing found"
    assert any(f.line == line + 2 and message in str(f) for f in found), [str(f) for f in found]


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_pass(name: str) -> None:
    found = lab.check_msl("#include <metal_stdlib>\nusing namespace metal;\n" + NEAR_MISSES[name])
    assert found == (), [str(f) for f in found]


def test_every_input_is_also_checked_as_constant() -> None:
    header = "inline float first(const device half* p, uint i) { return p[i]; }\n"
    source = "uint i = thread_position_in_grid.x;\no[i] = T(first(scales, i) * x[i]);"
    bad = lab.metal_kernel("scaled", ["scales", "x"], ["o"], source, header)
    scales, x = np.zeros(8, np.float16), np.zeros(64, np.float16)
    call = {"inputs": [scales, x], "output_dtypes": [lab.float16], "template": [("T", lab.float16)]}
    found = lab.check_types(bad, **call)
    assert found and {f.variant for f in found} == {"'scales' in constant"}
    assert (found[0].file, found[0].line) == ("scaled.metal", 2)
    assert "no matching function for call to 'first'" in str(found[0])
    good = lab.metal_kernel(
        "scaled", ["scales", "x"], ["o"], source,
        "template <typename P> inline float first(P p, uint i) { return p[i]; }\n",
    )  # fmt: skip
    assert lab.check_types(good, **call) == ()
    small = lab.check_types(
        bad, inputs=[np.zeros(7, np.float16), x], output_dtypes=[lab.float16], template=call["template"]
    )
    assert {f.variant for f in small} == {"as given"}


def test_bfloat_maths_exist_only_behind_mlx() -> None:
    body = "o[thread_position_in_grid.x] = exp(a[thread_position_in_grid.x]);"
    kernel = lab.metal_kernel("exponents", ["a"], ["o"], body)
    facts = lab.InputFacts("a", lab.bfloat16, 64, 1)
    assert lab.check_types(kernel, inputs=[facts], output_dtypes=[lab.bfloat16]) == ()


def test_without_a_checker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    from backend_core.testing.lab import typecheck

    typecheck.find_type_checker.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(lab.CompilerMissing, match="pip install ziglang"):
        lab.find_type_checker()
    typecheck.find_type_checker.cache_clear()


def test_vectors_that_are_initialised_in_brackets() -> None:
    text = """#include <metal_stdlib>
    using namespace metal;
    float4 twice(float4 v);
    kernel void f(device float* o, uint i [[thread_position_in_grid]]) {
        float4 v(1, 2, 3, 4);
        half3 h(v.xy, 1);
        vec<float, 2> w(i);
        packed_float3 p(v.xyz);
        for (uint2 k(0, 1); k.x < 2; k += 1) o[i] += v.x + h.z + w.y + p.x;
    }"""
    assert lab.check_msl(text) == ()
    found = lab.check_msl(text.replace("v(1, 2, 3, 4)", "v(1, 2, 3)"))
    assert [f.line for f in found] == [5]


def test_parts_of_what_a_thread_refers_to_are_the_thread_s() -> None:
    header = """
    struct Parts { uint codes[2][4]; };
    inline void put(thread uint* to, int v) { to[0] = v; }
    inline void fill(thread Parts& parts, int h) { put(parts.codes[h] + 1, h); }
    inline int sum(thread const int& a, const thread int& b) { return a + b; }
    """
    kernel = lab.metal_kernel(
        name="k", input_names=["a"], output_names=["o"], header=header,
        source="Parts parts; fill(parts, 1); o[0] = a[0] + sum(1, 2);",
    )  # fmt: skip
    assert lab.check_types(kernel, inputs=[np.zeros(64, np.float32)], output_dtypes=[lab.float32]) == ()


def test_inputs_of_one_size_are_constant_together() -> None:
    kernel = lab.metal_kernel(
        name="k", input_names=["a", "b"], output_names=["o"], source="o[0] = first(a, b);",
        header="template <typename P> float first(P a, P b) { return a[0] + b[0]; }",
    )  # fmt: skip
    inputs = [np.zeros(64, np.float32), np.zeros(64, np.float32)]
    found = lab.check_types(kernel, inputs=inputs, output_dtypes=[lab.float32])
    assert [f.variant for f in found] == ["'a' in constant", "'b' in constant"][: len(found)] and found
    assert lab.check_types(kernel, inputs=inputs, output_dtypes=[lab.float32], together=[("a", "b")]) == ()


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
LANE = "uint i [[thread_position_in_grid]]"


def test_complex_numbers_of_mlx() -> None:
    root = Path(str(mx.__file__)).parent / "include"
    if not (root / "mlx/backend/metal/kernels/complex.h").is_file():
        pytest.skip("this mlx comes without the text of its Metal kernels")
    text = f"""{HEAD}#include "mlx/backend/metal/kernels/complex.h"
    kernel void f(device complex64_t* o, device const float* x, {LANE}) {{
        complex64_t a(x[i], 1), b = a * a + complex64_t(2.0f);
        o[i] = b;
        if (a == b) o[0] = -a;
    }}"""
    assert lab.check_msl(text, include_dirs=[root]) == ()
    found = lab.check_msl(text.replace("o[0] = -a", "o[0] = &o[0]"), include_dirs=[root])
    assert [f.line for f in found] == [7]


def test_constructors_with_lists_of_members() -> None:
    text = f"""{HEAD}
    struct Parts {{
        float4 a, c; vec<uint, 2> b;
        Parts(float x, uint y) thread : a(x), c(a.xy, x, x), b(y, y) {{}}
        Parts() : a(0), c(a), b(1, 2) {{}}
    }};
    Parts made(float x) {{ return Parts(x, 1); }}
    kernel void f(device float* o, {LANE}) {{ Parts p(1, i), q; o[i] = p.a.x + q.c.y + made(2).b.x; }}"""
    assert lab.check_msl(text) == ()
    assert [f.line for f in lab.check_msl(text.replace("b(y, y)", "b(y, y, y)"))] == [6]


def test_vectors_of_bools() -> None:
    text = f"""{HEAD}
    kernel void f(device float* o, {LANE}) {{
        vec<bool, 4> m = vec<bool, 4>(true, false, true, i == 1), k = float4(1) < float4(o[i]);
        if (any(m) && all(k)) o[i] = select(float4(1), float4(2), m).x;
    }}"""
    assert lab.check_msl(text) == ()
    assert [f.line for f in lab.check_msl(text.replace("i == 1)", "i == 1, true)"))] == [5]


def test_arrays_keep_the_address_space_of_their_elements() -> None:
    text = f"""{HEAD}
    inline void put(thread float* to) {{ *to = 1; }}
    kernel void f(device array<float, 4>* o, constant metal::array<float, 2>& c, {LANE}) {{
        array<float, 4> a = {{1, 2, 3, 4}};
        put(&a[1]);
        const array<int, 2> d = {{1, 2}};
        for (uint k = 0; k < a.size(); k++) o[i][k] = a[k] + c[1] + d[0];
    }}"""
    assert lab.check_msl(text) == ()
    assert [f.line for f in lab.check_msl(text.replace("put(&a[1])", "put(&o[i][1])"))] == [7]
    assert [f.line for f in lab.check_msl(text.replace("put(&a[1])", "c[0] = 1"))] == [7]


def test_the_type_of_a_variable_as_that_of_a_field() -> None:
    header = """
    template <typename P> struct Parts { P from; };
    template <typename P> P same(P p) { decltype(p) q = p; return q; }
    """
    source = "Parts<decltype(a)> parts; decltype(parts) copy; copy.from = parts.from = a; o[0] = same(copy).from[0];"
    call = {"inputs": [np.zeros(64, np.float32)], "output_dtypes": [lab.float32]}
    assert lab.check_types(lab.metal_kernel("k", ["a"], ["o"], source, header), **call) == ()
    found = lab.check_types(lab.metal_kernel("k", ["a"], ["o"], source.replace("from = a", "from = o"), header), **call)
    assert [f.variant for f in found] == ["'a' in constant"] and "address space" in found[0].message
