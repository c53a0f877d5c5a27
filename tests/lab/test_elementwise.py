"""Functions of integers and floats for scalars and vectors of every width, against Python's integers and float64.

Each function is called at one value of 64 and at vectors of 2, 3 and 4 neighbours; edges stand in all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from backend_core.testing import lab

pytestmark = pytest.mark.lab

COUNT = 64
HEAD = """#include <metal_stdlib>
using namespace metal;
#define AT(p, k) p[(i + k) % 64]
#define V1(p) AT(p, 0)
#define V2(p) vec<T, 2>(AT(p, 0), AT(p, 1))
#define V3(p) vec<T, 3>(AT(p, 0), AT(p, 1), AT(p, 2))
#define V4(p) vec<T, 4>(AT(p, 0), AT(p, 1), AT(p, 2), AT(p, 3))
template <typename T, typename V> void put(device T* o, uint i, V v) { o[i] = T(v); }
template <typename T, typename V, int N> void put(device T* o, uint i, vec<V, N> v) {
    for (int k = 0; k < N; k++) o[((N - 1) * 4 + k) * 64 + i] = T(v[k]);
}
#define CALL(W, f) { auto x = V##W(a), y = V##W(b), z = V##W(c); put(p, i, f); }
"""
ARGUMENTS = "device const T* a, device const T* b, device const T* c, device T* o, uint i [[thread_position_in_grid]]"


def neighbours(values: Any, widths: tuple[int, ...]) -> Any:
    """What `put` writes of a function with these values: element k of width w in [w - 1][k]."""
    out = np.zeros((4, 4, COUNT), np.asarray(values).dtype)
    for width in widths:
        for k in range(width):
            out[width - 1, k] = np.roll(values, -k)
    return out


def widths(k: int) -> tuple[int, int]:
    """A scalar, and one width of vectors."""
    return 1, 2 + k % 3


def called(functions: Iterable[str], inputs: list[Any], name: str) -> Any:
    """The results of these calls, (functions, 4, 4, COUNT)."""
    calls = [
        f"{{ device T* p = o + {k} * 1024; CALL(1, ({f})) CALL({widths(k)[1]}, ({f})) }}"
        for k, f in enumerate(functions)
    ]
    text = f"{HEAD}template <typename T> kernel void f({ARGUMENTS}) {{\n" + "\n".join(calls) + "\n}\n"
    zeros: Any = np.zeros((len(calls), 4, 4, COUNT), inputs[0].dtype)
    zeros = lab.to_bfloat16(zeros.astype(np.float32)) if name == "bfloat" else zeros
    buffers = {**dict(enumerate(inputs)), 3: zeros}
    return lab.run_msl(text, f"f<{name}>", buffers, (COUNT, 1, 1), (COUNT, 1, 1)).check().outputs[0]


INTEGERS = {
    "char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16, "int": np.int32, "uint": np.uint32,
    "long": np.int64, "ulong": np.uint64,
}  # fmt: skip


class Integers:
    """The functions in Python's integers, for one type."""

    def __init__(self, dtype: Any) -> None:
        info = np.iinfo(dtype)
        self.lo, self.hi, self.bits = int(info.min), int(info.max), info.bits

    def wrap(self, v: int) -> int:
        v &= 2**self.bits - 1
        return v - 2**self.bits if v > self.hi else v

    def unsigned(self, v: int) -> int:
        return v & (2**self.bits - 1)

    def saturated(self, v: int) -> int:
        return min(max(v, self.lo), self.hi)

    def rotated(self, v: int, n: int) -> int:
        v, n = self.unsigned(v), self.unsigned(n) % self.bits
        return self.wrap(v << n | v >> (self.bits - n))

    def extracted(self, v: int, offset: int, bits: int) -> int:
        field = self.unsigned(v) >> offset & (2**bits - 1)
        return field - 2**bits if self.lo < 0 and bits and field >> (bits - 1) else field

    def inserted(self, base: int, insert: int, offset: int, bits: int) -> int:
        mask = (2**bits - 1) << offset
        return self.wrap(self.unsigned(base) & ~mask | self.unsigned(insert) << offset & mask)

    def functions(self) -> dict[str, Callable[[int, int, int], int]]:
        """By the text of a call."""
        text = f"{{:0{self.bits}b}}"
        half, n = self.bits // 2, self.bits
        return {
            "abs(x)": lambda x, y, z: self.wrap(abs(x)),
            "popcount(x)": lambda x, y, z: self.unsigned(x).bit_count(),
            "clz(x)": lambda x, y, z: n - self.unsigned(x).bit_length(),
            "ctz(x)": lambda x, y, z: (self.unsigned(x) & -self.unsigned(x)).bit_length() - 1 if x else n,
            "reverse_bits(x)": lambda x, y, z: self.wrap(int(text.format(self.unsigned(x))[::-1], 2)),
            "min(x, y)": lambda x, y, z: min(x, y),
            "max(x, y)": lambda x, y, z: max(x, y),
            "rotate(x, y)": lambda x, y, z: self.rotated(x, y),
            "mulhi(x, y)": lambda x, y, z: self.wrap(x * y >> n),
            "addsat(x, y)": lambda x, y, z: self.saturated(x + y),
            "subsat(x, y)": lambda x, y, z: self.saturated(x - y),
            "absdiff(x, y)": lambda x, y, z: self.wrap(abs(x - y)),
            "hadd(x, y)": lambda x, y, z: (x + y) >> 1,
            "rhadd(x, y)": lambda x, y, z: (x + y + 1) >> 1,
            "min3(x, y, z)": lambda x, y, z: min(x, y, z),
            "max3(x, y, z)": lambda x, y, z: max(x, y, z),
            "median3(x, y, z)": lambda x, y, z: sorted((x, y, z))[1],
            "madhi(x, y, z)": lambda x, y, z: self.wrap((x * y >> n) + z),
            "madsat(x, y, z)": lambda x, y, z: self.saturated(x * y + z),
            "clamp(x, min(y, z), max(y, z))": lambda x, y, z: sorted((x, y, z))[1],
            f"extract_bits(x, 1, {half})": lambda x, y, z: self.extracted(x, 1, half),
            f"extract_bits(x, 0, {n})": lambda x, y, z: x,
            "extract_bits(x, 3, 0)": lambda x, y, z: 0,
            f"insert_bits(x, y, 2, {half})": lambda x, y, z: self.inserted(x, y, 2, half),
            f"insert_bits(x, y, 0, {n})": lambda x, y, z: y,
            "insert_bits(x, y, 3, 0)": lambda x, y, z: x,
        }


def integers(name: str) -> list[Any]:
    """64 values for each of three arguments: all pairs of seven edges for the first two, then random ones."""
    dtype = INTEGERS[name]
    info = np.iinfo(dtype)
    edges = [0, 1, info.max, info.max - 1, info.min, info.min + 1, -1 if info.min < 0 else info.max // 2 + 1]
    rng = np.random.default_rng(info.bits)
    pairs = [[x, y] for x in edges for y in edges]
    pairs += rng.integers(info.min, info.max, (COUNT - len(pairs), 2), dtype, endpoint=True).tolist()
    third = [edges[k] for k in rng.integers(0, 7, COUNT)]
    x, y = zip(*pairs, strict=True)
    return [np.array(v, dtype) for v in (x, y, third)]


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    dtype, inputs = INTEGERS[name], integers(name)
    functions = Integers(dtype).functions()
    got = called(functions, inputs, name)
    for k, (call, reference) in enumerate(functions.items()):
        bits = [
            reference(*(int(v) for v in row)) & (2 ** np.iinfo(dtype).bits - 1) for row in zip(*inputs, strict=True)
        ]
        want = np.array(bits, np.dtype(f"u{np.dtype(dtype).itemsize}")).view(dtype)
        np.testing.assert_array_equal(got[k], neighbours(want, widths(k)), err_msg=call)


@pytest.mark.parametrize("name", ["int", "uint"])
def test_24_bits(name: str) -> None:
    low, high = (-(2**23), 2**23) if name == "int" else (0, 2**24)
    rng = np.random.default_rng(24)
    x, y = (rng.integers(low, high, COUNT, np.int64) for _ in range(2))
    x[:4], y[:4] = (low, low, high - 1, high - 1), (low, high - 1, low, high - 1)
    dtype = INTEGERS[name]
    inputs = [x.astype(dtype), y.astype(dtype), np.full(COUNT, 7, dtype)]
    functions = {"mul24(x, y)": x * y, "mad24(x, y, z)": x * y + 7}
    got = called(functions, inputs, name)
    for k, (call, want) in enumerate(functions.items()):
        wrapped = (want % 2**32).astype(np.uint32).view(dtype)
        np.testing.assert_array_equal(got[k], neighbours(wrapped, widths(k)), err_msg=call)


FLOATS = {"float": (np.float32, 2.0**-22), "half": (np.float16, 2.0**-10), "bfloat": (np.uint16, 2.0**-7)}
INF, NAN = np.inf, np.nan


def floats(name: str) -> tuple[list[Any], list[Any]]:
    """Three arguments as the lab's arrays, and in float64."""
    rng = np.random.default_rng(3)
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, INF, -INF, NAN, 2.0**-14, 2.0**-15, -1000.5, 3.25]
    arrays = []
    for _ in range(3):
        v = rng.uniform(-4, 4, COUNT).astype(np.float32)
        v[rng.permutation(COUNT)[: len(edges)]] = edges
        arrays.append(lab.to_bfloat16(v) if name == "bfloat" else v.astype(FLOATS[name][0]))
    return arrays, [lab.to_float32(v).astype(np.float64) for v in arrays]


def ordered(*values: Any) -> Any:
    return ~np.isnan(np.stack(values)).any(0)


def median(x: Any, y: Any, z: Any) -> Any:
    return np.fmax(np.fmin(x, y), np.fmin(np.fmax(x, y), z))


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    (a, b, c), (x, y, z) = floats(name)
    with np.errstate(all="ignore"):
        functions = {
            "fmin3(x, y, z)": np.fmin(np.fmin(x, y), z),
            "fmax3(x, y, z)": np.fmax(np.fmax(x, y), z),
            "fmedian3(x, y, z)": median(x, y, z),
            "median3(x, y, z)": median(x, y, z),
            "select(x, y, isordered(x, y))": np.where(ordered(x, y), y, x),
            "select(x, y, isunordered(x, y))": np.where(ordered(x, y), x, y),
            "ldexp(x, 3)": x * 8,
            "fma(x, y, z)": x * y + z,
            "fmax(x, T(0.25f))": np.fmax(x, 0.25),
            "fmod(x, T(0.75f))": np.fmod(x, 0.75),
            "mix(x, y, T(0.5f))": x + (y - x) * 0.5,
            "clamp(T(0.5f), min(y, z), max(y, z))": np.fmin(np.fmax(0.5, np.fmin(y, z)), np.fmax(y, z)),
            "max(T(0.25f), x)": np.fmax(x, 0.25),
            "fast::min(x, y) + precise::max(x, y)": np.fmin(x, y) + np.fmax(x, y),
        }
    got = lab.to_float32(called(functions, [a, b, c], name)).astype(np.float64)
    near = FLOATS[name][1]
    for k, (call, want) in enumerate(functions.items()):
        np.testing.assert_allclose(got[k], neighbours(want, widths(k)), rtol=near, atol=near, err_msg=call)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_two_results(name: str) -> None:
    (a, _, _), (x, _, _) = floats(name)
    by = np.random.default_rng(4).integers(-3, 4, COUNT).astype(np.int32)
    text = (
        HEAD
        + """
    #define PARTS(W, T_, I_) { \\
        auto x = V##W(a); T_ t; I_ e; \\
        put(o, i, frexp(x, e)); put(n, i, e); \\
        put(o + 1024, i, modf(x, t)); put(o + 2048, i, t); \\
        put(o + 3072, i, sincos(x, t)); put(o + 4096, i, t); \\
        put(n + 1024, i, ilogb(x)); put(o + 5120, i, ldexp(x, -2)); }
    template <typename T> kernel void f(device const T* a, device const int* k, device T* o, device int* n,
                                        uint i [[thread_position_in_grid]]) {
        PARTS(1, T, int)
        PARTS(2, decltype(V2(a)), int2)
        PARTS(3, decltype(V3(a)), int3)
        PARTS(4, decltype(V4(a)), int4)
        put(o + 6144, i, ldexp(V1(a), k[i]));
        put(o + 6144, i, ldexp(V3(a), int3(AT(k, 0), AT(k, 1), AT(k, 2))));
    }
    """
    )
    zeros: Any = np.zeros((7, 4, 4, COUNT), np.float32)
    zeros = lab.to_bfloat16(zeros) if name == "bfloat" else zeros.astype(a.dtype)
    integers = np.zeros((2, 4, 4, COUNT), np.int32)
    launched = lab.run_msl(text, f"f<{name}>", {0: a, 1: by, 2: zeros, 3: integers}, (COUNT, 1, 1), (COUNT, 1, 1))
    got, whole = launched.check().outputs
    got = lab.to_float32(got).astype(np.float64)
    every, near = (1, 2, 3, 4), FLOATS[name][1]
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(x)
        wants = [mantissa, *np.modf(x), np.sin(x), np.cos(x), x / 4]
    for k, want in enumerate(wants):
        np.testing.assert_allclose(got[k], neighbours(want, every), rtol=near, atol=near, err_msg=str(k))
    np.testing.assert_allclose(got[6], neighbours(x * 2.0**by, (1, 3)), rtol=near, atol=near)
    known = neighbours(np.isfinite(x), every)
    np.testing.assert_array_equal(np.where(known, whole[0], 0), np.where(known, neighbours(exponent, every), 0))
    known = neighbours(np.isfinite(x) & (x != 0), every)
    np.testing.assert_array_equal(np.where(known, whole[1], 0), np.where(known, neighbours(exponent - 1, every), 0))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", ["float", "half"])
def test_geometry(name: str, width: int) -> None:
    rng = np.random.default_rng(width)
    a, b, c = rng.standard_normal((3, COUNT, width))
    a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    dtype, near = FLOATS[name]
    inputs = [v.astype(dtype) for v in (a, b, c)]
    x, y, z = (v.astype(np.float64) for v in inputs)

    def dot(u: Any, v: Any) -> Any:
        return (u * v).sum(1, keepdims=True)

    def refracted(eta: float) -> Any:
        rest = 1 - eta**2 * (1 - dot(y, x) ** 2)
        return np.where(rest < 0, 0, eta * x - (eta * dot(y, x) + np.sqrt(np.maximum(rest, 0))) * y)

    functions = {
        "reflect(x, y)": x - 2 * dot(y, x) * y,
        "refract(x, y, T(0.5f))": refracted(0.5),
        "refract(x, y, T(1.5f))": refracted(1.5),
        "faceforward(x, y, z)": np.where(dot(z, y) < 0, x, -x),
        "fast::normalize(z)": z / np.sqrt(dot(z, z)),
        "x * distance_squared(x, z)": x * dot(x - z, x - z),
        "x * precise::distance(x, z) + fast::length(z)": x * np.sqrt(dot(x - z, x - z)) + np.sqrt(dot(z, z)),
        "x * length_squared(z) + dot(y, z)": x * dot(z, z) + dot(y, z),
    }
    assert {True, False} == set(np.ravel(refracted(1.5) == 0))
    calls = "\n".join(
        f"r = {f}; for (int k = 0; k < W; k++) o[({n} * 64 + i) * W + k] = r[k];" for n, f in enumerate(functions)
    )
    text = f"""{HEAD}template <typename T, int W> kernel void f({ARGUMENTS}) {{
        vec<T, W> x, y, z, r;
        for (int k = 0; k < W; k++) {{ x[k] = a[i * W + k]; y[k] = b[i * W + k]; z[k] = c[i * W + k]; }}
        {calls}
    }}"""
    buffers = {**dict(enumerate(inputs)), 3: np.zeros((len(functions), COUNT, width), dtype)}
    launched = lab.run_msl(text, f"f<{name}, {width}>", buffers, (COUNT, 1, 1), (COUNT, 1, 1))
    for got, (call, want) in zip(launched.check().outputs[0], functions.items(), strict=True):
        # Where it is decided which way light goes, rounding may decide otherwise.
        clear = (np.abs(want).max(1) != 0) == (np.abs(got).max(1) != 0)
        assert clear.mean() > 0.9
        np.testing.assert_allclose(got[clear], want[clear], rtol=16 * near, atol=16 * near, err_msg=call)


def test_scalars_and_packed_vectors_stand_for_vectors() -> None:
    text = f"""{HEAD}
    kernel void f(device const packed_float3* a, device float3* o, uint i [[thread_position_in_grid]]) {{
        packed_float3 p = a[i];
        float3 v = p;
        o[4 * i] = max(0.5f, v) + max(p, 1) + min(p, v) + pow(2, v) + fmod(p, p + 1);
        o[4 * i + 1] = clamp(p, -1.0f, v + 1) + fma(v, 2, p) + mix(p, 1.0f, v) + step(0, p);
        o[4 * i + 2] = select(v, 0.0f, v > 1) + select(0, p, v > 2) + smoothstep(0, 1, p);
        o[4 * i + 3] = float3(max(int3(p), 1)) + float3(rotate(int3(p), 1));
    }}"""
    a = np.random.default_rng(5).uniform(0, 3, (COUNT, 3)).astype(np.float32)
    result = lab.run_msl(text, "f", {0: a, 1: np.zeros((COUNT, 4, 4), np.float32)}, (COUNT, 1, 1), (COUNT, 1, 1))
    got, v = result.check().outputs[0][:, :, :3], a.astype(np.float64)
    s = np.clip(v, 0, 1)
    want = [
        np.maximum(v, 0.5) + np.maximum(v, 1) + v + 2**v + np.fmod(v, v + 1),
        np.clip(v, -1, v + 1) + 3 * v + v + (1 - v) * v + 1,
        np.where(v > 1, 0, v) + np.where(v > 2, v, 0) + s * s * (3 - 2 * s),
        np.maximum(np.trunc(v), 1) + 2 * np.trunc(v),
    ]
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-6, atol=1e-6)
