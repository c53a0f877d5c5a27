"""The reference itself: bit stream against its definition and against mlx."""

import mlx.core as mx
import numpy as np
import pytest
from bonsai_qmv import reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ref.BITS), st.integers(0, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverse(bits, n, blocks, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, 32 * blocks), dtype=np.uint8)
    words = ref.pack(codes, bits)
    assert words.shape == (n, blocks * bits) and words.dtype == np.uint32
    assert np.array_equal(ref.unpack(words, bits), codes)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ref.BITS), st.integers(1, 4), st.data())
def test_each_code_lies_where_the_definition_says(bits, blocks, data):
    k = 32 * blocks
    j = data.draw(st.integers(0, k - 1))
    code = data.draw(st.integers(0, (1 << bits) - 1))
    codes = np.zeros((1, k), np.uint8)
    codes[0, j] = code
    whole = sum(int(word) << (32 * i) for i, word in enumerate(ref.pack(codes, bits)[0]))
    assert whole == code << (j * bits)


@pytest.mark.parametrize("bits", ref.BITS)
@pytest.mark.parametrize("group", ref.GROUP_SIZES)
def test_dequantize_agrees_with_mlx(bits, group):
    w = mx.random.normal((3, group * 5), key=mx.random.key(bits))
    words, scales, biases = mx.quantize(w, group, bits)
    ours = ref.dequantize64(np.array(words), np.array(scales), np.array(biases), bits)
    theirs = np.array(mx.dequantize(words, scales, biases, group, bits))
    assert np.abs(ours - theirs).max() < 1e-6


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="multiple of 32"):
        ref.pack(np.zeros((1, 31), np.uint8), 4)
    with pytest.raises(ValueError, match="fit"):
        ref.pack(np.full((1, 32), 4), 2)


def test_ulp():
    assert ref.ulp(np.array([1.0]), "float32") == 2.0**-23
    assert ref.ulp(np.array([1.0]), "float16") == 2.0**-10
    assert ref.ulp(np.array([3.0]), "bfloat16") == 2.0**-6
    assert ref.ulp(np.array([0.0]), "float16") == 2.0**-24
