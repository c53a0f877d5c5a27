"""The reference itself: against mlx's own formats, and its parts against their definitions."""

import mlx.core as mx
import numpy as np
import pytest
from host_linear import plugin
from host_linear import reference as ref
from hypothesis import given
from hypothesis import strategies as st


@given(st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
def test_pack_and_unpack(bits, n, blocks, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, 8 * blocks))
    assert np.array_equal(ref.unpack(ref.pack(codes, bits), bits), codes)


@given(st.sampled_from([4, 8]), st.integers(0, 31), st.integers(0, 255))
def test_each_code_lies_where_the_definition_says(bits, j, code):
    code %= 1 << bits
    codes = np.zeros((1, 32), np.uint8)
    codes[0, j] = code
    whole = sum(int(word) << (32 * i) for i, word in enumerate(ref.pack(codes, bits)[0]))
    assert whole == code << (j * bits)


@pytest.mark.parametrize("mode", ref.MODES)
def test_dequantize_agrees_with_mlx(mode):
    w = mx.random.normal((6, 96), key=mx.random.key(1)) * 20
    words, scales = mx.quantize(w, mode=mode)
    theirs = np.array(mx.dequantize(words, scales, mode=mode, dtype=mx.float32))
    assert np.array_equal(ref.dequantize64(np.array(words), np.array(scales), mode), theirs)


@pytest.mark.parametrize("mode", ref.MODES)
def test_every_code_and_scale_agrees_with_mlx(mode):
    bits, group = ref.MODES[mode]
    codes = np.resize(np.arange(1 << bits), (256 << max(0, bits - 5), group))
    scales = np.resize(np.arange(256), (len(codes), 1)).astype(np.uint8)
    words = ref.pack(codes if bits == 4 else np.arange(codes.size).reshape(codes.shape) % 256, bits)
    theirs = np.array(mx.dequantize(mx.array(words), mx.array(scales), mode=mode, dtype=mx.float32))
    with np.errstate(over="ignore"):
        ours = ref.dequantize64(words, scales, mode).astype(np.float32)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_plugin_and_reference_know_the_same_modes():
    assert plugin.MODES == ref.MODES and set(plugin.FORMATS) == {"dense", *ref.MODES}


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="multiple of 8"):
        ref.pack(np.zeros((1, 31), np.uint8), 4)
    with pytest.raises(ValueError, match="fit"):
        ref.pack(np.full((1, 32), 16), 4)


def test_known_values():
    assert list(ref.e2m1(np.arange(8))) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert list(ref.e4m3(np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE]))) == [0, 2.0**-9, 2.0**-6, 1, 448, -448]
    assert np.isnan(ref.e4m3(np.array([0x7F, 0xFF]))).all()
    assert list(ref.e8m0(np.array([0, 127, 254, 255]))) == [2.0**-127, 1, 2.0**127, np.inf]


def test_ulp():
    assert ref.ulp(np.array([1.0]), "float32") == 2.0**-23
    assert ref.ulp(np.array([1.0]), "float16") == 2.0**-10
    assert ref.ulp(np.array([3.0]), "bfloat16") == 2.0**-6
    assert ref.ulp(np.array([0.0]), "float16") == 2.0**-24
