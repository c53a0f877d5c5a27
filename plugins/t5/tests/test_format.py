"""The format: the reference against the definition, the fast conversions against the reference and against mlx."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from t5_ternary import convert, host, layout, reference, words

GROUPS = (64, 128)


def random_trits(seed: int, n: int, k: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, (n, k), dtype=np.uint8)


@pytest.mark.parametrize("group", GROUPS)
def test_every_code_in_every_place(group):
    """A group whose byte b is `code` has the digits of `code` as weights 5b..5b+4, and every other weight 0."""
    size = layout.GROUP_BYTES[group]
    for code, b in itertools.product(range(243), (0, 1, 2, 7, size - 2, size - 1)):
        digits = [code // 3**i % 3 for i in range(5)]
        real = min(5, group - 5 * b)
        trits = np.ones((1, group), np.uint8)
        trits[0, 5 * b : 5 * b + real] = digits[:real]
        want = np.full(size, 121)
        want[b] = sum(3**i * (digits[i] if i < real else 1) for i in range(5))
        assert reference.pack(trits, group)[0].tolist() == want.tolist()
        words = convert.to_affine(want.astype(np.uint8)[None], group)
        codes = words.view(np.uint8)[0][:, None] >> np.arange(0, 8, 2) & 3
        assert codes.reshape(-1).tolist() == trits[0].tolist()


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(GROUPS), st.integers(0, 7), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverse(group, n, groups, seed):
    trits = random_trits(seed, n, groups * group)
    packed = reference.pack(trits, group)
    assert packed.shape == (n, layout.packed_columns(groups * group, group)) and packed.dtype == np.uint8
    assert np.array_equal(reference.unpack(packed, group), trits)
    assert convert.first_fault(packed, group) == ""


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(GROUPS), st.sampled_from([(5,), (1,), (0,), (3, 2)]), st.integers(1, 9), st.integers(0, 99))
def test_fast_conversions_agree_with_the_reference(group, lead, groups, seed):
    n, k = int(np.prod(lead)), groups * group
    trits = random_trits(seed, n, k)
    words = np.zeros((n, k // 16), np.uint32)
    for j in range(k):
        words[:, j // 16] |= trits[:, j].astype(np.uint32) << np.uint32(2 * (j % 16))
    packed = convert.from_affine(words.reshape(*lead, k // 16), group)
    assert packed is not None and packed.shape == (*lead, layout.packed_columns(k, group))
    assert np.array_equal(packed.reshape(n, packed.shape[-1]), reference.pack(trits, group))
    assert np.array_equal(convert.to_affine(packed, group), words.reshape(*lead, k // 16))


@pytest.mark.parametrize("group", GROUPS)
def test_a_code_of_3_is_not_ternary_wherever_it_stands(group):
    for j in range(2 * group):
        words = np.full((1, 2 * group // 16), 0x55555555, np.uint32)
        words[0, j // 16] |= np.uint32(3 << 2 * (j % 16))
        assert convert.from_affine(words, group) is None


@pytest.mark.parametrize("group", GROUPS)
def test_values_are_those_of_mlx_2_bit_weights_with_bias_minus_scale(group):
    k = 3 * group
    trits = random_trits(1, 4, k)
    packed = reference.pack(trits, group)
    scales = np.random.default_rng(2).uniform(0.01, 1, (4, 3)).astype(np.float16)
    words = mx.array(convert.to_affine(packed, group))
    theirs = mx.dequantize(words, mx.array(scales).astype(mx.float32), -mx.array(scales).astype(mx.float32), group, 2)
    assert np.array_equal(reference.dequantize64(packed, scales, group), np.array(theirs).astype(np.float64))


def test_group_of_ones_is_121_everywhere():
    """The padding of the published files."""
    for group in GROUPS:
        assert (reference.pack(np.ones((2, group)), group) == 121).all()


@pytest.mark.parametrize("group", GROUPS)
def test_range_of_the_last_byte(group):
    padding, digits = layout.PADDING[group]
    last = {int(reference.pack(random_trits(s, 1, group), group)[0, -1]) for s in range(400)}
    assert min(last) == padding and max(last) == padding + 3**digits - 1


def test_faults_are_named():
    good = reference.pack(random_trits(0, 3, 128), 128)
    bad = good.copy()
    bad[1, 4] = 243
    assert convert.first_fault(bad, 128) == "byte 30 is 243; five trits are at most 242"
    bad = good.copy()
    bad[2, 25] = 0
    assert convert.first_fault(bad, 128) == "the last byte of group 2 does not end in trits of 1"
    with pytest.raises(ValueError, match="above 242"):
        reference.unpack(np.full((1, 26), 250, np.uint8), 128)
    with pytest.raises(ValueError, match="0, 1 or 2"):
        reference.pack(np.full((1, 128), 3), 128)
    with pytest.raises(ValueError, match="multiple of 128"):
        reference.pack(np.ones((1, 64)), 128)


def test_shapes():
    assert layout.group_size_of((7, 52), (7, 2)) == 128
    assert layout.group_size_of((7, 52), (7, 4)) == 64
    assert layout.group_size_of((3, 7, 26), (3, 7, 2)) == 64
    others = (((7, 52), (6, 2)), ((7, 64), (7, 2)), ((7, 52), (7, 0)), ((52,), (2,)), ((7, 52), (7, 2, 1)))
    for weight, scales in others:
        assert layout.group_size_of(weight, scales) == 0
    with pytest.raises(ValueError, match="whole number of groups"):
        layout.packed_columns(160, 64)
    with pytest.raises(ValueError, match="groups of 64 and 128"):
        layout.packed_columns(64, 32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_negated_flips_the_sign_of_every_number(dtype):
    values = np.array([0.0, -0.0, 1.5, -2.0, np.inf, 6e-8], dtype)
    bits = values.view(np.uint16 if dtype == np.float16 else np.uint32)
    assert np.array_equal(convert.negated(bits).view(dtype), -values)
    assert np.array_equal(np.signbit(convert.negated(bits).view(dtype)), ~np.signbit(values))
    with pytest.raises(TypeError):
        convert.negated(values.astype(np.float64))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GROUPS), st.integers(0, 7), st.integers(1, 6), st.booleans())
def test_words_of_kernel_and_operations_are_those_of_the_conversion(group, n, groups, experts):
    lead = (n, 3) if experts else (n,)
    packed = reference.pack(random_trits(n, int(np.prod(lead)), group * groups), group)
    want = convert.to_affine(packed, group).reshape(*lead, groups * group // 16)
    given_ = mx.array(packed).reshape(*lead, packed.shape[-1])
    for made in (words.words(given_, group), words.operations(given_, group)):
        assert made.dtype == mx.uint32 and made.shape == want.shape
        assert np.array_equal(np.array(made), want)


@pytest.mark.parametrize("group", GROUPS)
def test_words_of_all_codes_in_blocks_and_views(group):
    """More groups than the conversion takes at a time, every code in every place, rows that are picked."""
    size = layout.GROUP_BYTES[group]
    n = convert._GROUPS // 8 + 7
    trits = np.random.default_rng(0).integers(0, 3, (n, 9 * group), dtype=np.uint8)
    packed = reference.pack(trits, group)
    assert all(len(np.unique(packed.reshape(-1, size)[:, b])) == 243 for b in range(size - 1))
    want = (trits.reshape(n, -1, 16).astype(np.uint64) << (2 * np.arange(16, dtype=np.uint64))).sum(-1)
    assert np.array_equal(convert.to_affine(packed, group), want)
    assert np.array_equal(np.array(words.words(mx.array(packed), group)), want)
    picked = np.array(words.words(mx.array(packed)[mx.array([5, 0, 5])], group))
    assert np.array_equal(picked, want[[5, 0, 5]])
    assert np.array_equal(np.array(words.words(mx.array(packed)[::3], group)), want[::3])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("lead", [(0,), (1,), (7,), (3, 5), (1100,)])
def test_words_and_faults_of_the_library_are_those_of_numpy(group, lead, monkeypatch):
    """Every byte, also in pieces for threads; a damaged byte in any place is seen."""
    if host.library() is None:
        pytest.skip("installed without a compiler")
    monkeypatch.setattr(host, "_GROUPS", 1000)
    rng = np.random.default_rng(len(lead))
    k = 3 * group
    packed = reference.pack(random_trits(1, int(np.prod(lead)), k), group).reshape(
        *lead, layout.packed_columns(k, group)
    )
    assert np.array_equal(host.to_affine(packed, group), convert.to_affine_in_numpy(packed, group))
    assert host.faults(packed, group) == 0
    if not packed.size:
        return
    padding, digits = layout.PADDING[group]
    size = layout.GROUP_BYTES[group]
    for place in (0, 1, size - 2, *rng.integers(0, packed.size, 5)):
        wrong = packed.copy()
        wrong.reshape(-1)[place] = 243
        assert host.faults(wrong, group) == 1
        assert f"byte {place} is 243" in convert.first_fault(wrong, group)
    for value in (0, padding - 1, padding + 3**digits):
        wrong = packed.copy()
        wrong.reshape(-1)[-1] = value
        assert host.faults(wrong, group) == 1
        assert convert.first_fault(wrong, group)
    # Two bytes of a group count once, groups one by one, next to each other or not.
    wrong = packed.copy()
    wrong.reshape(-1)[[0, 1, size, -1]] = 255
    assert host.faults(wrong, group) == len({0, 1, packed.size // size - 1})
