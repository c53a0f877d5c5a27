"""The float64 reference agrees with mlx on every format, and its bound lets nothing else pass."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_core import native, reference
from backend_core.reference import Reference, as_numpy, decode, rounding_bound, ulp, unpack, worst_excess

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
MICROSCALING = (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SETTINGS = settings(max_examples=50, deadline=None)


def weights(n, k, seed=0):
    """Random rows, the last one with much larger values, and one group of zeros."""
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    w[-1] *= 300.0
    w[0, :32] = 0.0
    return mx.array(w)


def quantized(mode, bits, group_size, w, dtype="float32"):
    q, scales, *biases = mx.quantize(w.astype(DTYPES[dtype]), group_size=group_size, bits=bits, mode=mode)
    arrays = {"weight": q, "scales": scales}
    if biases:
        arrays["biases"] = biases[0]
    return arrays


def decoded(mode, bits, group_size, arrays):
    scales, biases = arrays["scales"], arrays.get("biases")
    return decode(mode, bits, group_size, as_numpy(arrays["weight"]), as_numpy(scales),
                  None if biases is None else as_numpy(biases))  # fmt: skip


# Codes


def packed(codes, bits):
    """Codes as a little-endian bit stream, written bit by bit."""
    value = 0
    for i, code in enumerate(codes):
        value |= int(code) << (i * bits)
    words = len(codes) * bits // 32
    return [(value >> (32 * j)) & 0xFFFFFFFF for j in range(words)]


@SETTINGS
@given(st.sampled_from(BITS), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_unpack_reads_a_little_endian_bit_stream(bits, rows, groups, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, groups * 32)).astype(np.uint8)
    words = np.array([packed(row, bits) for row in codes], dtype=np.uint32)
    got = unpack(words, bits, codes.shape[1])
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, codes)


def test_unpack_takes_slices_and_fewer_codes():
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) % 8
    words = np.array([packed(row, 3) for row in codes], dtype=np.uint32)
    wide = np.repeat(words, 2, axis=0)[::2]  # not contiguous
    np.testing.assert_array_equal(unpack(wide, 3, 10), codes[:, :10])


# Weights of every format


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_weights_are_scale_times_code_plus_bias(bits, group_size, dtype):
    w = weights(5, 256)
    arrays = quantized("affine", bits, group_size, w, dtype)
    got = decoded("affine", bits, group_size, arrays)
    assert got.dtype == np.float64 and got.shape == (5, 256)
    # mlx computes the same in float32: one rounding of the product and one of the sum.
    wide = {k: v.astype(mx.float32) if v.dtype != mx.uint32 else v for k, v in arrays.items()}
    want = np.array(mx.dequantize(wide["weight"], wide["scales"], wide["biases"], group_size=group_size, bits=bits))
    codes = 2**bits - 1
    room = 2.0**-23 * (np.abs(as_numpy(arrays["scales"])) * codes + np.abs(as_numpy(arrays["biases"])))
    assert (np.abs(got - want) <= np.repeat(room, group_size, axis=1)).all()
    # And the format does what it is for: no further than half a step (plus what half precision rounds).
    if dtype == "float32" and bits > 1:
        step = np.repeat(np.abs(as_numpy(arrays["scales"])), group_size, axis=1)
        assert (np.abs(got - np.array(w)) <= 1.01 * step).all()


@pytest.mark.parametrize("mode,bits,group_size", MICROSCALING)
def test_microscaling_weights_are_mlx_s_to_the_bit(mode, bits, group_size):
    arrays = quantized(mode, bits, group_size, weights(6, 192))
    want = mx.dequantize(arrays["weight"], arrays["scales"], group_size=group_size, bits=bits, mode=mode,
                         dtype=mx.float32)  # fmt: skip
    np.testing.assert_array_equal(decoded(mode, bits, group_size, arrays), np.array(want).astype(np.float64))


@pytest.mark.parametrize("mode,bits,group_size", MICROSCALING)
def test_every_code_and_every_scale_of_the_microscaling_formats(mode, bits, group_size):
    """All element codes under a scale of one, then one element under all scales."""
    one = 127 if mode != "nvfp4" else 0x38  # E8M0 2^0; E4M3 1.0
    codes = np.arange(256 if bits == 8 else 32, dtype=np.uint32) % 2**bits
    words = np.array([packed(codes, bits)], dtype=np.uint32)
    got = decode(mode, bits, group_size, words, np.full((1, len(codes) // group_size), one, np.uint8), None)[0]
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    if bits == 4:  # noqa: SIM108
        want = np.array([*e2m1, *(-v for v in e2m1)] * 2)
    else:
        want = np.array([e4m3(c) for c in range(256)])
    np.testing.assert_array_equal(got, want)

    unit = np.zeros(group_size, np.uint32)
    unit[0] = 0x38 if bits == 8 else 2  # 1.0
    words = np.tile(np.array(packed(unit, bits), np.uint32), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    got = decode(mode, bits, group_size, words, scales, None)[:, 0]
    want = np.array([e4m3(s) if mode == "nvfp4" else np.nan if s == 255 else 2.0 ** (s - 127) for s in range(256)])
    np.testing.assert_array_equal(got, want)


def e4m3(code):
    """OCP 8-bit float, bias 7, no infinity, NaN where all exponent and mantissa bits are set."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return np.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_dense_weights_are_themselves():
    w = np.array([[1.5, -2.25]], dtype=np.float32)
    np.testing.assert_array_equal(decode("dense", 0, 0, w, None, None), [[1.5, -2.25]])


def test_an_unknown_mode_is_refused():
    words, scales = np.zeros((1, 4), np.uint32), np.zeros((1, 1), np.uint8)
    with pytest.raises(ValueError, match="unknown quantization mode 'q4_k'"):
        decode("q4_k", 4, 32, words, scales, None)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_tensor_scale_of_nvfp4(shape):
    w = weights(4, 64)
    largest = mx.max(mx.abs(w))
    q, scales = mx.quantize(w, group_size=16, bits=4, mode="nvfp4", global_scale=largest)
    ref = Reference({"weight": q, "scales": scales, "global_scale": largest.reshape(shape)}, "nvfp4", 4, 16)
    want = mx.dequantize(q, scales, group_size=16, bits=4, mode="nvfp4", global_scale=largest, dtype=mx.float32)
    np.testing.assert_allclose(ref.weights(), np.array(want), rtol=1e-6)
    assert np.abs(ref.weights() - np.array(w)).max() < 0.3 * np.abs(np.array(w)).max()


# Products


def layer(mode="affine", bits=4, group_size=64, n=70, k=128, dtype="float32", bias=True):
    arrays = quantized(mode, bits, group_size, weights(n, k), dtype) if mode != "dense" else {
        "weight": weights(n, k).astype(DTYPES[dtype])}  # fmt: skip
    if bias:
        arrays["bias"] = mx.arange(n).astype(DTYPES[dtype]) - 7
    return arrays


def plain(ref, x):
    """The product written out: no slices, no BLAS."""
    w = ref.weights()
    bias = np.zeros(len(w)) if ref.bias is None else ref.bias
    y = np.array([[np.sum(row * r) for r in w] for row in x]) + bias
    magnitude = np.array([[np.sum(np.abs(row * r)) for r in w] for row in x]) + np.abs(bias)
    return y, magnitude


PRODUCTS = [("affine", b, g) for b in BITS for g in GROUPS] + list(MICROSCALING) + [("dense", 0, 0)]


@pytest.mark.parametrize("with_native", [True, False])
@pytest.mark.parametrize("mode,bits,group_size", PRODUCTS)
def test_products_equal_numpy(monkeypatch, mode, bits, group_size, with_native):
    if with_native and not native.available():
        pytest.skip("no native module")
    if not with_native:
        monkeypatch.setattr(native, "status", lambda: native.Status(False, "off"))
    ref = Reference(layer(mode, bits, group_size, n=9, dtype="float16"), mode, bits, group_size)
    x = np.random.default_rng(1).standard_normal((3, 128))
    y, magnitude = ref.product(x)
    want_y, want_magnitude = plain(ref, x)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-12 * want_magnitude.max())
    np.testing.assert_allclose(magnitude, want_magnitude, rtol=1e-12)


@pytest.mark.parametrize("with_native", [True, False])
@pytest.mark.parametrize("mode,bits,group_size", [("affine", 3, 32), ("mxfp4", 4, 32), ("dense", 0, 0)])
@pytest.mark.parametrize("span", [(0, None), (0, 1), (69, 70), (5, 64), (12, 12), (70, 70)])
def test_parts_are_parts_of_the_whole(monkeypatch, mode, bits, group_size, span, with_native):
    if with_native and not native.available():
        pytest.skip("no native module")
    if not with_native:
        monkeypatch.setattr(native, "status", lambda: native.Status(False, "off"))
    monkeypatch.setattr(reference, "_SLICE", 128 * 16)  # several slices
    ref = Reference(layer(mode, bits, group_size), mode, bits, group_size)
    x = np.random.default_rng(1).standard_normal((2, 128))
    whole_y, whole_magnitude = ref.product(x)
    y, magnitude = ref.product(x, *span)
    assert y.shape == magnitude.shape == whole_y[:, slice(*span)].shape
    np.testing.assert_allclose(y, whole_y[:, slice(*span)], rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(magnitude, whole_magnitude[:, slice(*span)], rtol=1e-12)


@pytest.mark.parametrize("with_native", [True, False])
@pytest.mark.parametrize("mode", ["affine", "dense"])
def test_no_rows_give_no_results(monkeypatch, mode, with_native):
    if not with_native:
        monkeypatch.setattr(native, "status", lambda: native.Status(False, "off"))
    y, magnitude = Reference(layer(mode), mode, 4, 64).product(np.zeros((0, 128)))
    assert y.shape == magnitude.shape == (0, 70)


def test_one_expert_of_many():
    w = mx.stack([weights(6, 64, seed) for seed in range(3)])
    q, scales, biases = mx.quantize(w, group_size=32, bits=4)
    bias = mx.arange(18).reshape(3, 6).astype(mx.float32)
    arrays = {"weight": q, "scales": scales, "biases": biases, "bias": bias}
    x = np.random.default_rng(1).standard_normal((2, 64))
    for expert in range(3):
        one = {k: v[expert] for k, v in arrays.items()}
        y, magnitude = Reference(arrays, "affine", 4, 32, expert).product(x)
        want_y, want_magnitude = Reference(one, "affine", 4, 32).product(x)
        np.testing.assert_array_equal(y, want_y)
        np.testing.assert_array_equal(magnitude, want_magnitude)
    assert not np.array_equal(y, Reference(arrays, "affine", 4, 32, 0).product(x)[0])


def test_the_experts_own_tensor_scale():
    factors = mx.array([3.0, 5.0])
    q, scales = mx.quantize(mx.stack([weights(4, 32), weights(4, 32, 1)]), group_size=16, bits=4, mode="nvfp4")
    arrays = {"weight": q, "scales": scales, "global_scale": factors}
    plain_arrays = {"weight": q, "scales": scales}
    for expert, factor in enumerate((3.0, 5.0)):
        got = Reference(arrays, "nvfp4", 4, 16, expert).weights()
        want = Reference(plain_arrays, "nvfp4", 4, 16, expert).weights() * factor / (448 * 6)
        np.testing.assert_allclose(got, want, rtol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_mlx_keeps_the_bound_in_float32(dtype):
    """Stock in float32 is what the class `rounding` is drawn around."""
    arrays = layer(dtype=dtype, bias=False)
    x = np.random.default_rng(3).standard_normal((4, 128)).astype(np.float32)
    y = mx.quantized_matmul(mx.array(x), arrays["weight"], arrays["scales"].astype(mx.float32),
                            arrays["biases"].astype(mx.float32), group_size=64, bits=4)  # fmt: skip
    y64, magnitude = Reference(arrays, "affine", 4, 64).product(x.astype(np.float64))
    assert worst_excess(np.array(y), y64, magnitude, 128, "float32") <= 1.0
    wrong = np.array(y)
    wrong[2, 3] += 1e-3 * magnitude[2, 3]
    assert worst_excess(wrong, y64, magnitude, 128, "float32") > 1.0


# Arrays


def test_as_numpy_keeps_values_of_every_dtype():
    for dtype in (mx.float32, mx.uint32, mx.uint8, mx.float16, mx.bfloat16):
        a = as_numpy(mx.array([[1, 2], [3, 4]], dtype))
        assert a.tolist() == [[1, 2], [3, 4]] and a.flags.c_contiguous
    assert as_numpy(mx.array([1.5], mx.bfloat16)).dtype == np.float32
    assert as_numpy(mx.array([[1, 2], [3, 4]], mx.float32).T).tolist() == [[1, 3], [2, 4]]
    assert as_numpy(mx.arange(10)[2:8:3]).tolist() == [2, 5]
    assert as_numpy(mx.zeros((0, 4))).shape == (0, 4)


# The bound

#: The numbers of 16-bit formats in order, as float64: neighbours are one ulp apart.
HALVES = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
BFLOATS = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("dtype,numbers", [("float16", HALVES), ("bfloat16", BFLOATS)])
def test_ulp_is_the_distance_to_the_next_number(dtype, numbers):
    gaps = np.diff(numbers)
    np.testing.assert_array_equal(ulp(numbers[:-1], dtype), gaps)
    np.testing.assert_array_equal(ulp(-numbers[:-1], dtype), gaps)
    np.testing.assert_array_equal(ulp(numbers[:-1] + gaps / 2, dtype), gaps)  # constant up to the next


@SETTINGS
@given(st.floats(width=32, allow_nan=False, allow_infinity=False).map(abs))
def test_ulp_of_float32_is_numpy_s(value):
    if value < 3e38:
        assert ulp(np.array(value), "float32") == float(np.spacing(np.float32(value)))


@pytest.mark.parametrize("dtype,want", [("float32", 2.0**-149), ("float16", 2.0**-24), ("bfloat16", 2.0**-133)])
def test_ulp_of_zero_is_the_smallest_step(dtype, want):
    assert ulp(np.array([0.0, -0.0]), dtype).tolist() == [want, want]


def test_the_bound_is_the_documented_one():
    y, magnitude = np.array([1.0, 0.0, -3.0]), np.array([10.0, 0.0, 4.0])
    want = np.array([2.0**-10, 2.0**-24, 2.0**-9]) + 4 * np.sqrt(256) * 2.0**-24 * magnitude
    np.testing.assert_allclose(rounding_bound(y, magnitude, 256, "float16"), want, rtol=1e-15)


def excess(y, y64, magnitude=0.0, dtype="float16", k=1):
    a = np.array([[y]], np.float32)
    return worst_excess(a, np.array([[y64]]), np.array([[magnitude]], np.float64), k, dtype)


@pytest.mark.parametrize(
    "y,y64,want",
    [
        (1.0, 1.0, 0.0), (1.0 + 2**-10, 1.0, 1.0), (1.0 + 3 * 2**-10, 1.0, 3.0), (1.0 - 2**-11, 1.0, 0.5),
        (0.0, 0.0, 0.0), (2.0**-24, 0.0, 1.0), (2.0**-20, 0.0, 16.0),
        (float("nan"), 1.0, np.inf), (1.0, float("nan"), np.inf), (float("nan"), float("nan"), np.inf),
        (float("inf"), 1.0, np.inf), (float("-inf"), 1.0, np.inf), (1.0, float("inf"), np.inf),
        # Beyond 65504 a half can only be infinite, on the right side.
        (float("inf"), 7e4, 0.0), (float("-inf"), -7e4, 0.0), (float("-inf"), 7e4, np.inf),
        (float("inf"), -7e4, np.inf), (float("inf"), 65504.0, 0.0), (float("inf"), 65000.0, np.inf),
        (float("inf"), float("inf"), 0.0), (float("-inf"), float("inf"), np.inf),
    ],
)  # fmt: skip
def test_excess_counts_bounds(y, y64, want):
    assert excess(y, y64) == want


def test_a_finite_result_where_a_half_overflows_is_wrong():
    assert excess(65504.0, 2e5) > 1.0


def test_float32_and_bfloat16_do_not_overflow_where_halves_do():
    assert excess(float("inf"), 7e4, dtype="bfloat16") == np.inf
    assert excess(float("inf"), 7e4, dtype="float32") == np.inf
    assert excess(float("inf"), 1e39, dtype="float32") == 0.0
    assert excess(float("inf"), 1e39, dtype="bfloat16") == 0.0


def test_the_worst_of_many_counts():
    y64 = np.ones((3, 4))
    y = y64.copy()
    assert worst_excess(y, y64, np.zeros((3, 4)), 1, "float16") == 0.0
    y[1, 2] += 2 * 2.0**-10
    y[2, 3] -= 5 * 2.0**-10
    assert worst_excess(y, y64, np.zeros((3, 4)), 1, "float16") == 5.0
    y[0, 0] = np.nan
    assert worst_excess(y, y64, np.zeros((3, 4)), 1, "float16") == np.inf


def test_nothing_is_never_wrong():
    assert worst_excess(np.zeros((0, 5)), np.zeros((0, 5)), np.zeros((0, 5)), 64, "float16") == 0.0


def test_a_row_of_zeros_must_be_answered_with_zeros():
    y64, magnitude = Reference(layer(bias=False), "affine", 4, 64).product(np.zeros((1, 128)))
    assert not y64.any() and not magnitude.any()
    for dtype in DTYPES:
        assert worst_excess(np.zeros((1, 70)), y64, magnitude, 128, dtype) == 0.0
        assert worst_excess(np.full((1, 70), 1e-4), y64, magnitude, 128, dtype) > 1.0


@SETTINGS
@given(
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.lists(st.floats(-6e4, 6e4, allow_subnormal=True), min_size=1, max_size=8),
)
def test_the_nearest_number_of_the_dtype_is_always_allowed(dtype, values):
    y64 = np.array([values])
    y = as_numpy(mx.array(y64.astype(np.float32)).astype(DTYPES[dtype]))
    # Two roundings (to float32, then to the dtype) are half an ulp and a trifle.
    tiny = np.abs(y64) * 2.0**-23
    assert worst_excess(y, y64, tiny, 1, dtype) <= 1.0


def test_on_cuda_the_host_reads_copies_of_the_weights(monkeypatch):
    """mlx moves an array whose memory the host asks for into memory that both share, and leaves it there."""
    layer = nn.QuantizedLinear(64, 8, bias=True, group_size=32, bits=4)
    arrays = dict(layer)
    x = np.random.default_rng(0).standard_normal((2, 64))
    want = Reference(arrays, "affine", 4, 32).product(x)
    read = []
    monkeypatch.setattr(reference, "default_device", lambda: "cuda")
    monkeypatch.setattr(reference, "as_numpy", lambda a: read.append(a) or as_numpy(a))
    have = Reference(arrays, "affine", 4, 32).product(x)
    np.testing.assert_array_equal(have, want)
    assert len(read) == 4 and not any(r is a for r in read for a in arrays.values())
