"""A sound model directory passes; each kind of damage is named, with its mend; garbage never crashes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from pathlib import Path

import pytest

from backend_core import doctor
from backend_core.doctor import memory, shards
from backend_core.doctor import model as checked
from backend_core.doctor.checks import Check

CONFIG = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 100,
    "quantization": {"group_size": 32, "bits": 4, "lm_head": {"group_size": 32, "bits": 8}},
}  # fmt: skip


def shard(path: Path, tensors: dict[str, list[int]]) -> None:
    """A float32 safetensors file of zeros."""
    header, at = {"__metadata__": {"format": "mlx"}}, 0
    for name, shape in tensors.items():
        size = 4 * int(math.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(at))


@pytest.fixture
def model(tmp_path):
    """A sound directory of two shards."""
    put = lambda name, value: (tmp_path / name).write_text(json.dumps(value))  # noqa: E731
    put("config.json", CONFIG)
    shard(tmp_path / "model-00001-of-00002.safetensors", {"a": [4, 8], "b": [2]})
    shard(tmp_path / "model-00002-of-00002.safetensors", {"c": [3]})
    names = {"a": 1, "b": 1, "c": 2}
    put(
        "model.safetensors.index.json",
        {"weight_map": {n: f"model-0000{i}-of-00002.safetensors" for n, i in names.items()}},
    )
    put("tokenizer.json", {"model": {"vocab": {f"t{i}": i for i in range(9)}}, "added_tokens": [{"id": 9}]})
    put("tokenizer_config.json", {"chat_template": "{{ messages }}"})
    put(
        "generation_config.json",
        {"eos_token_id": [2, 9], "temperature": 0.6, "top_p": 0.95, "do_sample": True},
    )
    return tmp_path


def faults(directory: Path) -> list[Check]:
    found = [check for check in checked.check_model(directory) if check.status == "fault"]
    assert all(check.mend for check in found)
    assert not [check for check in found if check.name.startswith("doctor.")]
    return found


def only(directory: Path) -> Check:
    (found,) = faults(directory)
    return found


def named(directory: Path, name: str) -> Check:
    (found,) = [check for check in checked.check_model(directory) if check.name == name]
    return found


def test_a_sound_model(model):
    found = {check.name: check for check in checked.check_model(model)}
    assert {check.status for check in found.values()} == {"ok"}
    assert found["model.weights"].detail.startswith("2 files, 3 tensors")
    assert found["model.tokenizer"].detail == "ids up to 9, vocab_size 10"
    assert found["model.quantization"].detail == "affine, 4 bits, group 32, 1 layers of their own"
    assert "temperature 0.6, top_p 0.95" in found["model.sampling"].detail
    assert "for 100 tokens" in found["model.memory"].detail
    assert not [c for c in doctor.run_doctor(model) if c.name.startswith("model.") and c.status != "ok"]


def test_a_missing_directory(tmp_path):
    assert "No such file" in only(tmp_path / "none").detail
    (tmp_path / "file").write_text("")
    assert "is a file" in only(tmp_path / "file").detail
    assert only(Path("a\0b")).name == "model.directory"


def test_a_truncated_shard_is_named_with_its_bytes(model):
    path = model / "model-00001-of-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 5)
    check = only(model)
    assert check.detail == f"{path.name} is truncated: {size} bytes expected, {size - 5} found"
    assert check.mend == f"Download {path.name} again."


def test_a_shard_that_is_too_long(model):
    with open(model / "model-00002-of-00002.safetensors", "ab") as file:
        file.write(b"xyz")
    assert "longer than its header says" in only(model).detail


def test_missing_shards_and_tensors(model):
    (model / "model-00002-of-00002.safetensors").unlink()
    assert only(model).detail == "model-00002-of-00002.safetensors is missing, with 1 tensors"
    shard(model / "model-00002-of-00002.safetensors", {"d": [3]})
    assert only(model).detail == "tensors missing from their files: c"
    found = [c for c in checked.check_model(model) if c.status == "note"]
    assert [c.detail for c in found] == ["tensors that the index does not name: d"]


def test_missing_shard_without_an_index(model):
    (model / "model.safetensors.index.json").unlink()
    assert faults(model) == []
    (model / "model-00001-of-00002.safetensors").unlink()
    assert only(model).detail == "missing: model-00001-of-00002.safetensors"
    (model / "model-00002-of-00002.safetensors").unlink()
    assert only(model).detail == "there is no model*.safetensors file"


def header(length: int, raw: bytes = b"") -> bytes:
    return struct.pack("<Q", length) + raw


def entry(**fields) -> bytes:
    raw = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}).encode()
    return header(len(raw), raw) + bytes(8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated: 0 bytes, without a complete header"),
        (b"\x01\x02", "truncated: 2 bytes"),
        (header(10_000_000_000), "its header would be 10000000000 bytes long"),
        (header(2**64 - 1), "its header would be"),
        (header(1000, b"{}"), "truncated: 1008 bytes expected for its header, 10 found"),
        (header(4, b"\xff\xfe\x00\x01"), "damaged header"),
        (header(2, b"[]"), "damaged header"),
        (header(6, b'{"a":1'), "damaged header"),
        (header(7, b'{"a":1}'), "damaged header"),
        (header(100_000, b"[" * 100_000), "damaged header"),
        (entry(shape=[3]), "does not fill 8 bytes"),
        (entry(shape=[-1]), "impossible shape"),
        (entry(shape="x"), "damaged header"),
        (entry(data_offsets=[8, 0]), "impossible shape or offsets"),
        (entry(data_offsets=[0]), "damaged header"),
        (entry(dtype=None, data_offsets=[0, 1 << 70]), "impossible"),
    ],
)
def test_garbage_shards(model, content, words):
    (model / "model-00002-of-00002.safetensors").write_bytes(content)
    check = only(model)
    assert check.name == "model.shard" and words in check.detail
    assert check.detail.startswith("model-00002-of-00002.safetensors")


def test_a_directory_as_a_shard(model):
    (model / "model-00002-of-00002.safetensors").unlink()
    (model / "model-00002-of-00002.safetensors").mkdir()
    assert only(model).detail == "model-00002-of-00002.safetensors is a directory"


def test_an_unreadable_shard(model, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shards, "open", refuse, raising=False)
    found = faults(model)
    assert [c.detail for c in found] == [
        f"model-0000{i}-of-00002.safetensors cannot be read: Permission denied" for i in (1, 2)
    ]


@pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"", b"[1]", b"{" * 200_000, b'{"a":' * 100_000, b"null"])
def test_a_garbage_config(model, content):
    (model / "config.json").write_bytes(content)
    check = only(model)
    assert check.name == "model.config" and check.detail.startswith("config.json ")


def test_config_is_missing_or_a_directory(model):
    (model / "config.json").unlink()
    assert only(model).detail == "config.json is missing"
    (model / "config.json").mkdir()
    assert only(model).detail == "config.json cannot be read: Is a directory"


@pytest.mark.parametrize("content", [b"\xff", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}'])
def test_a_garbage_index(model, content):
    (model / "model.safetensors.index.json").write_bytes(content)
    assert only(model).name == "model.index"


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": "many"}, {"num_hidden_layers": None}, {"head_dim": []}, {"num_attention_heads": 0},
        {"text_config": 5}, {"text_config": {"vocab_size": 10}}, {"quantization": None, "model_type": ["x"]},
        {"max_position_embeddings": -1},
    ],
)  # fmt: skip
def test_odd_values_in_config_crash_nothing(model, values):
    (model / "config.json").write_text(json.dumps({**CONFIG, **values}))
    assert not [c for c in checked.check_model(model) if c.name.startswith("doctor.")]


def test_checksums(model):
    name = "model-00001-of-00002.safetensors"
    digest = hashlib.sha256((model / name).read_bytes()).hexdigest()
    (model / "SHA256SUMS").write_text(f"{digest}  {name}\n{digest.upper()} *{name}\n\n")
    assert named(model, "model.checksums").detail == "SHA256SUMS: 2 files as recorded"
    (model / "SHA256SUMS").unlink()
    (model / "config.json.sha256").write_text("0" * 64)
    assert only(model).detail == "config.json has another SHA-256 than recorded"
    (model / "config.json.sha256").write_text(f"{digest}  gone.bin\n")
    assert only(model).detail == "gone.bin cannot be read: No such file or directory"
    (model / "config.json.sha256").write_text(f"{digest}  ../../etc/passwd\nnonsense\n")
    assert faults(model) == []
    (model / "config.json.sha256").write_bytes(b"\xff\xff")
    assert named(model, "model.checksums").status == "note"


def tokenizer(model: Path, vocab, added=()) -> Check:
    content = {"model": {"vocab": vocab}, "added_tokens": [{"id": i} for i in added]}
    (model / "tokenizer.json").write_text(json.dumps(content))
    return named(model, "model.tokenizer")


def test_tokenizer_ids_against_the_vocabulary(model):
    assert tokenizer(model, {"a": 10}).status == "fault"
    assert "another model" in tokenizer(model, {"a": 10}).detail
    assert tokenizer(model, {"a": 3}, added=[10]).status == "note"
    assert tokenizer(model, {"a": 3}, added=[9]).status == "ok"
    assert tokenizer(model, [["a", 0.0]] * 11).status == "fault"
    assert tokenizer(model, [["a", 0.0]] * 10).detail == "ids up to 9, vocab_size 10"
    for vocab in (None, {}, 7, {"a": "b"}):
        assert "no vocabulary" in tokenizer(model, vocab).detail


def test_tokenizer_files(model):
    (model / "tokenizer.json").write_bytes(b"\x80")
    assert "is not JSON" in only(model).detail
    (model / "tokenizer.json").unlink()
    assert only(model).detail == "there is no tokenizer.json or tokenizer.model"
    (model / "tokenizer.model").write_bytes(b"x")
    assert faults(model) == []
    (model / "tokenizer_config.json").write_text("{")
    assert only(model).name == "model.tokenizer_config"
    (model / "tokenizer_config.json").unlink()
    assert named(model, "model.chat_template").status == "note"
    (model / "chat_template.jinja").write_text("x")
    assert named(model, "model.chat_template").detail == "chat_template.jinja"


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ({}, "ok", "greedy"),
        ({"do_sample": False, "temperature": 1.0}, "ok", "greedy"),
        ({"eos_token_id": 10}, "fault", "eos_token_id 10 is no token"),
        ({"eos_token_id": [1, -1]}, "fault", "eos_token_id -1"),
        ({"eos_token_id": "x"}, "fault", "eos_token_id 'x'"),
        ({"top_p": 1.5}, "note", "top_p 1.5 is not between 0 and 1"),
        ({"temperature": "hot"}, "note", "temperature 'hot'"),
        ([], "fault", "holds no object"),
    ],
)
def test_sampling(model, content, status, words):
    (model / "generation_config.json").write_text(json.dumps(content))
    check = named(model, "model.sampling")
    assert check.status == status and words in check.detail


def test_unknown_quantization_is_a_fault(model):
    bad = {**CONFIG, "quantization": {"group_size": 128, "bits": 2, "rotation": "hadamard"}}
    (model / "config.json").write_text(json.dumps(bad))
    check = only(model)
    assert check.name == "model.quantization" and "rotation = 'hadamard'" in check.detail
    ternary = {**CONFIG, "quantization": None, "quantization_config": {"quant_method": "t5"}}
    (model / "config.json").write_text(json.dumps(ternary))
    assert only(model).name == "model.quantization"
    assert not [c for c in checked.check_model(model, extra_methods=("t5",)) if c.status == "fault"]


def test_kv_bytes():
    # K and V: 2 * 2 layers * 2 heads * 4 values * 100 tokens * 2 bytes
    assert memory.kv_bytes(CONFIG, 2) == (6400, 100)
    smollm = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    assert memory.kv_bytes(smollm, 4) == (188_743_680, 4096)
    assert memory.kv_bytes({"text_config": smollm}, 4) == (188_743_680, 4096)
    assert memory.kv_bytes({}, 2) is None


def test_memory():
    assert memory.judge_memory(100, (50, 4096), 150).status == "ok"
    assert memory.judge_memory(100, (50, 4096), 149).status == "note"
    assert memory.judge_memory(100, (50, 4096), 99).status == "fault"
    assert memory.judge_memory(100, None, None).status == "ok"
    gib = 1 << 30
    assert memory.judge_wired(10 * gib, 0, 32 * gib).status == "ok"
    check = memory.judge_wired(20 * gib, 0, 32 * gib)
    assert check.status == "note" and "iogpu.wired_limit_mb=22756" in check.mend
    assert memory.judge_wired(20 * gib, 24_000, 32 * gib).status == "ok"
