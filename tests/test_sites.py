"""Sites: frozen facts with a signature that says what, not where."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_core import sites
from backend_core.sites import AttentionSite, CheckpointSite, DraftSite, LinearSite, MoeSite, OpSite, Site

ALL = [LinearSite, AttentionSite, MoeSite, DraftSite, OpSite, CheckpointSite]
HOOKS = ["select_linear", "select_attention", "fuse_moe", "verify_draft", "select_op", "adapt_checkpoint"]


def test_one_site_type_per_hook():
    assert dict(zip(HOOKS, ALL, strict=True)) == sites.SITE_TYPES


@pytest.mark.parametrize("cls", ALL)
def test_sites_are_frozen_hashable_and_json_able(cls):
    site = cls(path="model.x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        site.path = "y"
    assert len({site, cls(path="model.x"), cls(path="model.y")}) == 2
    facts = json.loads(json.dumps(site.facts()))
    assert set(facts) == {f.name for f in dataclasses.fields(cls)}
    assert facts["path"] == "model.x" and facts["device"] == "cpu"


@pytest.mark.parametrize("cls", ALL)
def test_every_field_is_documented(cls):
    text = f"{Site.__doc__}\n{cls.__doc__}"
    for f in dataclasses.fields(cls):
        assert f.name in text, f.name


def test_facts_hold_lists_for_tuples():
    assert LinearSite("a", aliases=("b", "c")).facts()["aliases"] == ["b", "c"]


WHERE = {"path": "other", "aliases": ("b",), "host": "mlx_vlm", "model_type": "qwen3", "in_lora": True}


@pytest.mark.parametrize("field", sorted(WHERE))
def test_signature_ignores_where_a_site_is(field):
    site = LinearSite("a", n=8, k=32)
    assert dataclasses.replace(site, **{field: WHERE[field]}).signature == site.signature


@pytest.mark.parametrize("cls", ALL)
def test_signature_depends_on_every_other_field(cls):
    site = cls(path="a")
    seen = {site.signature}
    fields = [f for f in dataclasses.fields(cls) if f.name not in WHERE]
    for f in fields:
        value = getattr(site, f.name)
        changed: object = (
            not value if isinstance(value, bool)
            else value + 1 if isinstance(value, (int, float))
            else ("x",) if isinstance(value, tuple)
            else value + "x"
        )  # fmt: skip
        seen.add(dataclasses.replace(site, **{f.name: changed}).signature)
    assert len(seen) == len(fields) + 1


def test_signatures_of_different_hooks_differ():
    assert len({cls(path="a").signature for cls in ALL}) == len(ALL)


def test_signature_is_the_same_in_another_process():
    code = "from backend_core import LinearSite; print(LinearSite('z', n=5, k=64, bits=4).signature)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == LinearSite("a", n=5, k=64, bits=4).signature


@pytest.mark.parametrize(
    "site,want",
    [
        (LinearSite("a", n=10, k=64, weight_dtype="float16"), 10 * 64 * 2),
        (LinearSite("a", n=10, k=64, weight_dtype="float32", batch=3), 3 * 10 * 64 * 4),
        # 4-bit g64 with fp16 scales: 0.5625 bytes per weight, T5's neighbours as in the reference numbers.
        (LinearSite("a", n=2, k=128, mode="affine", bits=4, group_size=64, scales_dtype="float16"), 144),
        (LinearSite("a", n=2, k=128, mode="affine", bits=2, group_size=128, scales_dtype="float16"), 72),
        (LinearSite("a", n=2, k=128, mode="affine", bits=1, group_size=128, scales_dtype="bfloat16"), 40),
        (LinearSite("a", n=1, k=96, mode="affine", bits=3, group_size=32, scales_dtype="float32"), 36 + 24),
        (LinearSite("a", n=4, k=64, mode="mxfp4", bits=4, group_size=32, scales_dtype="uint8"), 4 * (32 + 2)),
        (LinearSite("a", n=4, k=64, mode="mxfp8", bits=8, group_size=32, scales_dtype="uint8"), 4 * (64 + 2)),
        (LinearSite("a", n=0, k=0), 0),
    ],
)
def test_weight_bytes(site, want):
    assert site.weight_bytes == want


@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    groups=st.integers(1, 4),
    n=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_weight_bytes_equal_what_mlx_stores(bits, group_size, groups, n, dtype):
    import mlx.core as mx

    k = group_size * groups
    w = mx.zeros((n, k), getattr(mx, dtype))
    arrays = mx.quantize(w, group_size=group_size, bits=bits)
    site = LinearSite("a", n=n, k=k, mode="affine", bits=bits, group_size=group_size, scales_dtype=dtype)
    assert site.weight_bytes == sum(a.nbytes for a in arrays)


@pytest.mark.parametrize(
    "site,want",
    [
        (LinearSite("a", n=8, k=64, weight_dtype="bfloat16"), "8x64 bfloat16"),
        (LinearSite("a", n=1536, k=576, mode="affine", bits=4, group_size=32), "1536x576 4-bit g32 affine"),
        (LinearSite("a", kind="switch", batch=6, n=96, k=128, mode="mxfp4", bits=4, group_size=32),
         "6x96x128 4-bit g32 mxfp4 switch"),
        (LinearSite("a", kind="embedding", n=320, k=96), "320x96 float32 embedding"),
    ],
)  # fmt: skip
def test_a_site_is_described_for_people(site, want):
    assert site.describe() == want


def test_row_ranges_are_adjacent():
    assert sites.DECODE_ROWS == (1, 1)
    assert sites.VERIFY_ROWS == (2, 16)
    assert sites.PREFILL_ROWS == (17, None)


def test_itemsize():
    import mlx.core as mx

    for name in ("bool_", "uint8", "int16", "float16", "bfloat16", "float32", "uint32", "int64"):
        dtype = getattr(mx, name)
        assert sites.itemsize(str(dtype).rpartition(".")[2]) == mx.zeros(1, dtype).nbytes
    with pytest.raises(KeyError):
        sites.itemsize("float7")
