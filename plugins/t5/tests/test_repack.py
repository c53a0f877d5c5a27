"""Repacking a checkpoint: what is converted, what is copied, what is refused; there and back bit for bit."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import t5_checkpoints as cp
from click.testing import CliRunner
from t5_ternary import commands, convert, marker, repack, tensors, verify

from backend_core.errors import ModelError


def make(directory: Path, shards: int = 3, dtype=mx.float16) -> Path:
    """A checkpoint with every case in it: both groups, experts, 4 bits, not ternary, biases of their own, plain."""
    held = {}

    def add(path, arrays):
        held.update({f"{path}.{key}": value for key, value in arrays.items()})

    add("a", cp.affine(1, (6,), 384, 128, dtype))
    add("b", cp.affine(2, (5,), 192, 64, dtype))
    add("experts", cp.affine(3, (3, 4), 256, 128, dtype))
    four = mx.quantize(mx.random.normal((6, 128), key=mx.random.key(1)).astype(dtype), 64, 4)
    add("four", dict(zip(("weight", "scales", "biases"), four, strict=True)))
    other = cp.affine(4, (6,), 256, 128, dtype)
    other["weight"] = mx.array(np.array(other["weight"]) | np.uint32(3))
    add("four_values", other)
    skewed = cp.affine(5, (6,), 256, 128, dtype)
    biases = np.array(skewed["biases"].view(mx.uint16 if dtype != mx.float32 else mx.uint32))
    biases[5, 1] ^= 1
    skewed["biases"] = mx.array(biases).view(dtype)
    add("skewed", skewed)
    narrow = mx.quantize(mx.random.normal((6, 96), key=mx.random.key(2)).astype(dtype), 32, 2)
    add("narrow", dict(zip(("weight", "scales", "biases"), narrow, strict=True)))
    held["norm.weight"] = mx.ones((7,), dtype)
    held["bytes"] = mx.arange(5, dtype=mx.uint8)
    directory.mkdir()
    quantization = {"group_size": 128, "bits": 2, "b": {"group_size": 64, "bits": 2},
                    "four": {"group_size": 64, "bits": 4}, "narrow": {"group_size": 32, "bits": 2}}  # fmt: skip
    config = {"model_type": "x", "quantization": quantization, "quantization_config": quantization, "last": "é"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "notes").mkdir()
    (directory / "notes" / "card.md").write_text("card")
    cp.write_shards(directory, held, shards)
    return directory


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("shards", [1, 3])
def test_there_and_back(tmp_path, shards, dtype):
    source = make(tmp_path / "src", shards, dtype)
    before = cp.digest(source)
    plan = repack.plan(source)
    assert {p: layer.group_size for p, layer in plan.layers.items()} == {"a": 128, "b": 64, "experts": 128}
    assert plan.copied == {
        "four": "4-bit weights", "four_values": "four values: a code is 3",
        "skewed": "biases are not -scales, bit for bit", "narrow": "groups of 32: t5 has groups of 64 and 128",
    }  # fmt: skip
    repack.write(plan, tmp_path / "t5", verify=True)
    old, new = cp.tensors_of(source), cp.tensors_of(tmp_path / "t5")
    assert set(old) - set(new) == {"a.biases", "b.biases", "experts.biases"} and set(new) <= set(old)
    for path, shape in {"a": (6, 78), "b": (5, 39), "experts": (3, 4, 52)}.items():
        assert new[f"{path}.weight"].shape == shape and new[f"{path}.weight"].dtype == mx.uint8
    for name in set(new) - {"a.weight", "b.weight", "experts.weight"}:
        assert cp.same_bits(old[name], new[name]), name
    assert plan.after == sum(a.nbytes for a in new.values())
    assert (tmp_path / "t5" / "notes" / "card.md").read_text() == "card"
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    entry = marker.find(config)
    assert (entry["group_size"], entry["version"], marker.overrides(entry)) == (128, 1, {"b"})
    own = {"four": {"group_size": 64, "bits": 4}, "narrow": {"group_size": 32, "bits": 2}}
    assert config["quantization"] == {"group_size": 128, "bits": 2, **own, "quant_method": "t5", "version": 1}
    if shards > 1:
        index = json.loads((tmp_path / "t5" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": plan.after, "total_parameters": 4711}
        for name, file in index["weight_map"].items():
            assert name in mx.load(str(tmp_path / "t5" / file))
        assert set(index["weight_map"]) == set(new)

    repack.write(repack.plan(tmp_path / "t5", "affine"), tmp_path / "back", verify=True)
    again = cp.tensors_of(tmp_path / "back")
    assert set(again) == set(old) and all(cp.same_bits(old[name], again[name]) for name in old)
    for name in ("config.json", "model.safetensors.index.json"):
        if (source / name).exists():
            returned = json.loads((tmp_path / "back" / name).read_text())
            want = json.loads((source / name).read_text())
            if "weight_map" in want:  # biases may move to the file of their scales
                assert set(returned.pop("weight_map")) == set(want.pop("weight_map"))
            assert returned == want
    assert cp.digest(source) == before


def test_without_a_marker_the_shapes_tell(tmp_path):
    """Files of other tools: uint8 weights, unchanged config.json, biases kept."""
    source = make(tmp_path / "src", 1)
    held = cp.tensors_of(source)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    for path, size in (("a", 128), ("b", 64), ("experts", 128)):
        held[f"{path}.weight"] = mx.array(convert.from_affine(np.array(held[f"{path}.weight"]), size))
    cp.write_shards(other, held, 1)
    plan = repack.plan(other, "affine")
    assert set(plan.layers) == {"a", "b", "experts"}
    repack.write(plan, tmp_path / "back", verify=True)
    old, again = cp.tensors_of(source), cp.tensors_of(tmp_path / "back")
    assert all(cp.same_bits(old[name], again[name]) for name in old) and set(old) == set(again)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_refusals_leave_everything_as_it_is(tmp_path, monkeypatch):
    source = make(tmp_path / "src")
    before = cp.digest(source)
    plan = repack.plan(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(source)
    for destination, message in (
        (source, "is the source"), (tmp_path / "link", "is the source"), (source / "sub", "lies within the source"),
        (tmp_path / "full", "is not empty"), (tmp_path / "file", "is a file"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=message):
            repack.write(plan, destination)
    monkeypatch.setattr(repack.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1 << 10))
    with pytest.raises(ModelError, match="has 0 MB free, 1 MB are needed"):
        repack.write(plan, tmp_path / "dst")
    assert cp.digest(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full", "link", "src"]
    assert (tmp_path / "full" / "precious").read_text() == "x"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_run_that_ends_early_leaves_nothing(tmp_path, monkeypatch, error):
    source = make(tmp_path / "src")
    before = cp.digest(source)
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return tensors.write_file(*arguments)

    monkeypatch.setattr(repack, "write_file", fails)
    expected = ModelError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if isinstance(error, OSError) else None):
        repack.write(repack.plan(source), tmp_path / "dst")
    assert cp.digest(source) == before and [p.name for p in tmp_path.iterdir()] == ["src"]


def test_an_empty_destination_is_used(tmp_path):
    source = make(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    repack.write(repack.plan(source), tmp_path / "dst")
    assert (tmp_path / "dst" / "config.json").stat().st_mode & 0o777 == (source / "config.json").stat().st_mode & 0o777
    assert (tmp_path / "dst").stat().st_mode & 0o777 == source.stat().st_mode & 0o777


def damaged(directory: Path, name: str, change) -> Path:
    """A t5 copy of the test checkpoint with one tensor changed (None: left out)."""
    source = make(directory / "src", 1)
    repack.write(repack.plan(source), directory / "t5")
    held = cp.tensors_of(directory / "t5")
    mx.eval(held)
    value = change(np.array(held[name]))
    if value is None:
        del held[name]
    else:
        held[name] = mx.array(value)
    cp.write_shards(directory / "t5", held, 1)
    return directory / "t5"


def with_243(a):
    a[2, 40] = 243
    return a


def with_padding(a):
    a[0, 25] = 5
    return a


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a.weight", with_243, "a.weight is damaged: byte 196 is 243"),
        ("a.weight", with_padding, "a.weight is damaged: the last byte of group 0"),
        ("a.scales", lambda a: None, r"a.weight has no scales \(a.scales is missing\)"),
        ("a.weight", lambda a: a[:, :70], "a.weight .6, 70. with scales .6, 3. of F16 is no t5 weight"),
        ("b.scales", lambda a: a.astype(np.int32), "b.weight .* of I32 is no t5 weight"),
        ("b.weight", lambda a: np.full((5, 78), 121, np.uint8), "b.weight has groups of 128, config.json says 64"),
    ],
)
def test_damaged_t5_is_refused_by_name(tmp_path, name, change, message):
    with pytest.raises(ModelError, match=message):
        repack.plan(damaged(tmp_path, name, change), "affine")


def test_truncated_files_are_refused_by_name(tmp_path):
    source = make(tmp_path / "src", 1)
    file = source / "model.safetensors"
    data = file.read_bytes()
    last = tensors.read_file(file)[0][-1]
    file.write_bytes(data[:-3])
    with pytest.raises(ModelError, match=f"{last.name} is truncated"):
        repack.plan(source)
    file.write_bytes(data[:40])
    with pytest.raises(ModelError, match="no complete safetensors file"):
        repack.plan(source)


def test_other_sources_are_refused(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        repack.plan(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        repack.plan(tmp_path / "empty")
    source = make(tmp_path / "src")
    config = json.loads((source / "config.json").read_text())
    for changed, message in (
        ({"quantization": {"group_size": 128, "bits": 4}}, "no ternary 2-bit weights: 2-bit weights|4-bit weights"),
        ({"quantization": None, "quantization_config": None}, "no quantization by mlx"),
        ({"quantization_config": {"quant_method": "t5"}}, "is a t5 checkpoint already"),
    ):
        (source / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ModelError, match=message):
            repack.plan(source)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no t5 weights"):
        repack.plan(source, "affine")


@pytest.mark.parametrize("name", ["a.weight", "a.scales", "norm.weight", "four.biases"])
def test_verify_finds_one_changed_bit(tmp_path, name):
    source = make(tmp_path / "src")
    plan = repack.plan(source)
    repack.write(plan, tmp_path / "t5", verify=True)
    copies = [t for file in (tmp_path / "t5").glob("*.safetensors") for t in tensors.read_file(file)[0]]
    [tensor] = [t for t in copies if t.name == name]
    data = bytearray(tensor.file.read_bytes())
    data[tensor.begin + 1] ^= 1
    tensor.file.write_bytes(bytes(data))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        verify.compare(plan, tmp_path / "t5")


def test_stale_checksums_are_left_out_and_named(tmp_path):
    source = make(tmp_path / "src")
    (source / "SHA256SUMS").write_text("0" * 64 + "  config.json\n")
    notes = repack.write(repack.plan(source), tmp_path / "t5")
    assert notes == ["SHA256SUMS was left out: its checksums are those of the source"]
    assert not (tmp_path / "t5" / "SHA256SUMS").exists()


def test_command(tmp_path):
    source = make(tmp_path / "src")
    run = CliRunner().invoke(commands.repack_t5, [str(source), str(tmp_path / "t5"), "--dry-run"])
    assert run.exit_code == 0, run.output
    assert "3 tensors" in run.stdout and "would become t5" in run.stdout and "nothing written" in run.stdout
    assert "copied, 4-bit weights: four\n" in run.stdout and not (tmp_path / "t5").exists()
    run = CliRunner().invoke(commands.repack_t5, [str(source), str(tmp_path / "t5"), "--verify"])
    assert run.exit_code == 0 and "became t5" in run.stdout and ", verified" in run.stdout
    run = CliRunner().invoke(commands.repack_t5, [str(tmp_path / "t5"), str(tmp_path / "back"), "--to", "affine"])
    assert run.exit_code == 0 and "became 2-bit words" in run.stdout


def test_memory_stays_below_a_shard(tmp_path):
    """Peak resident memory while a shard of 80 MB is rewritten, over that of the imports."""
    part = {key: mx.tile(value, (128, 1)) for key, value in cp.affine(0, (64,), 2048, 128).items()}
    held = {f"{j}.{key}": value for j in range(17) for key, value in part.items()}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text(json.dumps({"quantization": {"group_size": 128, "bits": 2}}))
    cp.write_shards(tmp_path / "src", held, 1)
    size = (tmp_path / "src" / "model.safetensors").stat().st_size
    code = """
import resource, sys
from pathlib import Path
from t5_ternary import repack, verify
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
start = peak()
plan = repack.plan(Path(sys.argv[1]))
repack.write(plan, Path(sys.argv[2]), verify=True)
repack.write(repack.plan(Path(sys.argv[2]), "affine"), Path(sys.argv[3]))
print(peak() - start)
"""
    arguments = [tmp_path / "src", tmp_path / "t5", tmp_path / "back"]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert size > 75e6
    assert int(done.stdout) < 0.75 * size, f"{int(done.stdout) >> 20} MB for a shard of {size >> 20} MB"


# Odd checkpoints


def incomplete(source: Path, change: str) -> str:
    """Damage a checkpoint in shards; what the message must say."""
    file = source / "model.safetensors.index.json"
    held = json.loads(file.read_text())
    if change == "shard":
        (source / held["weight_map"]["b.scales"]).unlink()
        return r"the checkpoint is incomplete: .* should be in model-0000\d-of-00003.safetensors, which is missing"
    if change == "link":
        shard = source / held["weight_map"]["b.scales"]
        shard.unlink()
        shard.symlink_to(source / "gone")
        return "the checkpoint is incomplete: .*, which is missing"
    if change == "tensor":
        held["weight_map"]["b.more"] = "model-00001-of-00003.safetensors"
        file.write_text(json.dumps(held))
        return "the checkpoint is incomplete: b.more should be in model-00001-of-00003.safetensors, which does not"
    file.write_text({"text": "{", "list": "[]", "map": '{"weight_map": {"a": 1}}', "metadata":
                     '{"weight_map": {}, "metadata": [1]}'}[change])  # fmt: skip
    return r"index.json (cannot be read|is no index|: metadata is no object)|index.json: metadata is no object"


@pytest.mark.parametrize("change", ["shard", "link", "tensor", "text", "list", "map", "metadata"])
def test_incomplete_checkpoints_are_refused(tmp_path, change):
    source = make(tmp_path / "src")
    repack.write(repack.plan(source), tmp_path / "t5")
    for directory, to in ((source, "t5"), (tmp_path / "t5", "affine")):
        message = incomplete(directory, change)
        with pytest.raises(ModelError, match=message):
            repack.plan(directory, to)


def test_links(tmp_path):
    """Weights, a source and a destination that are links; links to nowhere and in circles."""
    blobs = make(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    files = [file for file in blobs.iterdir() if file.is_file()]
    for file in files:
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    (tmp_path / "snapshot" / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "snapshot" / "circle").symlink_to(tmp_path / "snapshot")
    (tmp_path / "src").symlink_to(tmp_path / "snapshot")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "new").symlink_to(tmp_path / "made")
    before = cp.digest(blobs)
    for name, real in (("link", "empty"), ("new", "made"), ("plain", "plain")):
        repack.write(repack.plan(tmp_path / "src"), tmp_path / name, verify=True)
        assert (tmp_path / name).is_symlink() == (name != real)
        assert not any(f.is_symlink() for f in (tmp_path / real).iterdir())
        assert {f.name for f in (tmp_path / real).iterdir()} == {f.name for f in files}
    assert cp.digest(blobs) == before
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".partial")]


def simple(directory: Path, tensors: dict, quantization: dict | None = None) -> Path:
    directory.mkdir()
    cp.write_shards(directory, tensors, 1)
    config = {"model_type": "x", "quantization": {"group_size": 64, "bits": 2, **(quantization or {})}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def named(path: str, *arguments, **options) -> dict:
    return {f"{path}.{key}": value for key, value in cp.affine(*arguments, **options).items()}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_odd_shapes_and_scales_come_back(tmp_path, dtype):
    """One group, one row, no row, one expert; scales of -0, +0, infinity and NaN; names with dots; mixed groups."""
    tensors = {
        **named("one", 0, (1,), 64, 64, dtype=dtype), **named("row.of.two", 1, (1,), 128, 64, dtype=dtype),
        **named("expert", 2, (2, 1), 64, 64, dtype=dtype), **named("wide.v1.5", 3, (5,), 256, 128, dtype=dtype),
        "none.weight": mx.zeros((0, 4), mx.uint32), "none.scales": mx.zeros((0, 1), dtype),
        "none.biases": mx.zeros((0, 1), dtype), "norm.weight": mx.ones((3,), dtype),
    }  # fmt: skip
    scales = np.array(tensors["wide.v1.5.scales"].view(mx.uint16))
    infinity = 0x7C00 if dtype == mx.float16 else 0x7F80
    scales[:, 0] = 0x8000, 0, infinity, infinity | 1, 0x8001  # -0, +0, infinity, NaN, the smallest below 0
    tensors["wide.v1.5.scales"] = mx.array(scales).view(dtype)
    tensors["wide.v1.5.biases"] = mx.array(scales ^ 0x8000).view(dtype)
    source = simple(tmp_path / "src", tensors, {"wide.v1.5": {"group_size": 128, "bits": 2}})
    repack.write(repack.plan(source), tmp_path / "model.v2.t5", verify=True)
    plan = repack.plan(tmp_path / "model.v2.t5", "affine")
    assert {path: layer.group_size for path, layer in plan.layers.items()} == {
        "one": 64, "row.of.two": 64, "expert": 64, "wide.v1.5": 128, "none": 64}  # fmt: skip
    repack.write(plan, tmp_path / "back", verify=True)
    again = cp.tensors_of(tmp_path / "back")
    assert again.keys() == tensors.keys()
    assert all(cp.same_bits(tensors[name], again[name]) for name in tensors)
    assert (tmp_path / "back" / "config.json").read_text().split() == json.dumps(
        json.loads((source / "config.json").read_text()), indent=4).split()  # fmt: skip


def test_a_bias_of_plus_zero_beside_a_scale_of_plus_zero_is_another_bias(tmp_path):
    tensors = named("a", 0, (4,), 64, 64)
    tensors["a.scales"], tensors["a.biases"] = mx.zeros((4, 1), mx.float16), mx.zeros((4, 1), mx.float16)
    with pytest.raises(ModelError, match="biases are not -scales, bit for bit"):
        repack.plan(simple(tmp_path / "src", tensors))


def test_directories_made_for_nothing_are_removed(tmp_path, monkeypatch):
    source = make(tmp_path / "src")
    monkeypatch.setattr(repack, "write_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    with pytest.raises(ModelError, match="Read-only; nothing was left there"):
        repack.write(repack.plan(source), tmp_path / "a" / "b" / "dst")
    monkeypatch.setattr(repack.tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(errno.EACCES, "denied")))
    with pytest.raises(ModelError, match="dst cannot be written: denied"):
        repack.write(repack.plan(source), tmp_path / "a" / "b" / "dst")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_a_terminated_run_leaves_nothing(tmp_path):
    """SIGTERM between two files."""
    source = make(tmp_path / "src")
    program = (
        "import os, signal, sys\nfrom t5_ternary import repack\nfrom t5_ternary.commands import repack_t5\n"
        "old = repack.write_file\n"
        "def write_file(*a):\n    old(*a)\n    os.kill(os.getpid(), signal.SIGTERM)\n    return 0\n"
        "repack.write_file = write_file\nrepack_t5([sys.argv[1], sys.argv[2]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(source), str(tmp_path / "dst")], capture_output=True)
    assert done.returncode == 128 + 15, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"group_size": [64]}, r"group_size = \[64\]: t5 has groups"),
        ({"group_size": {}}, "group_size = {}: t5 has groups"),
        ({"source": 3}, "source does not hold the quantization"),
        ({"source": {"hidden_size": 1}}, "source does not hold the quantization"),
        ({"source": {"quantization": {"bits": 2}}}, "source is no quantization of mlx"),
        ({"source": {"quantization": {"bits": 2, "group_size": "x"}}}, "source is no quantization of mlx"),
        ({"source": {"quantization": {"bits": 2, "group_size": 64, "a.b": 3}}}, "a.b = 3 says nothing"),
    ],
)
def test_damaged_markers_are_refused(tmp_path, change, message):
    source = make(tmp_path / "src", 1)
    repack.write(repack.plan(source), tmp_path / "t5")
    file = tmp_path / "t5" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(change)
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        repack.write(repack.plan(tmp_path / "t5", "affine"), tmp_path / "back")


@pytest.mark.parametrize("change", ["dtype", "shape", "offsets", "metadata"])
def test_headers_of_wrong_types_are_refused(tmp_path, change):
    source = make(tmp_path / "src", 1)
    file = source / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entry = header["a.scales"]
    if change == "metadata":
        header["__metadata__"] = {"format": 3}
    else:
        entry["data_offsets" if change == "offsets" else change] = {"dtype": 5, "shape": ["4", 2], "offsets": ["0", 8]}[
            change
        ]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(ModelError, match="damaged header"):
        repack.plan(source)
