"""Loading: mlx-lm's own loaders on t5 checkpoints give the tokens of the 2-bit checkpoints, and damage is named."""

import gc
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
import t5_checkpoints as cp
from t5_ternary import calls, choose, convert, marker, modules, reference, repack

from backend_core import Policy, load, restore
from backend_core.errors import ModelError
from backend_core.integrations import activate

TOKENS = mx.array([[5, 9, 200, 31, 77, 1]])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """2-bit and t5 checkpoints by name."""
    root = tmp_path_factory.mktemp("models")
    found = {}

    def add(key, model, **options):
        found[key] = cp.save(model, key.split("-")[0], root / key, **options)
        repack.write(repack.plan(found[key]), root / f"{key}.t5")
        found[f"{key}.t5"] = root / f"{key}.t5"

    add("llama", cp.build("llama"), shards=3)
    add("llama-128", cp.build("llama", 128, dtype=mx.bfloat16), group=128)
    add("qwen3_moe", cp.build("qwen3_moe"))

    def mixed(path, module):
        if not hasattr(module, "to_quantized"):
            return False
        four = "down_proj" in path
        return {"group_size": 64, "bits": 4} if four else "norm" not in path

    overrides = {f"model.layers.{i}.mlp.down_proj": {"group_size": 64, "bits": 4} for i in range(2)}
    add("llama-mixed", cp.build("llama", predicate=mixed), overrides=overrides)
    return found


def policy(**options) -> Policy:
    given = {"race": "off", "report": "none", "activations": "model", **options}
    t5 = given.pop("t5", None)
    return Policy(**given, plugin_options=(("t5", t5),) if t5 else ())


def stock(directory: Path):
    return mlx_lm.load(str(directory))[0]


def tokens(model, count: int = 12) -> list[int]:
    from mlx_lm.generate import generate_step

    prompt = mx.array([3, 8, 1, 90])
    return [int(token) for token, _ in generate_step(prompt, model, max_tokens=count)]


@pytest.mark.parametrize("t5", ["packed", "expand"])
@pytest.mark.parametrize("name", ["llama", "llama-128", "qwen3_moe", "llama-mixed"])
def test_values_are_those_of_the_2_bit_checkpoint(made, name, t5):
    want = stock(made[name])
    model, _ = load(made[f"{name}.t5"], policy(t5=t5))
    a, b = want(TOKENS), model(TOKENS)
    assert a.dtype == b.dtype and mx.array_equal(a, b)
    assert tokens(want) == tokens(model)
    kinds = {type(m) for _, m in model.named_modules()}
    assert (modules.T5Linear in kinds) == (t5 == "packed") and type(model) is type(want)
    if name == "llama":
        assert (modules.T5Embedding in kinds) == (t5 == "packed")
    if name == "qwen3_moe":
        assert (modules.T5SwitchLinear in kinds) == (t5 == "packed")
    if name == "llama-mixed":
        assert nn.QuantizedLinear in kinds


def test_the_policy_is_reported(made):
    from backend_core import report_of

    for t5, text in (("packed", "stay packed (t5=packed)"), ("expand", "became 2-bit words, 29% more"), ("auto",
    "race=off")):
        model, _ = load(made["llama-128.t5"], policy(t5=t5))
        report = report_of(model)
        assert any(text in note for note in report.notes), report.notes
        assert "checkpoint read by t5/checkpoint" in report.notes
        restore(model)


def test_auto_measures_both(made, monkeypatch, tmp_path):
    from t5_ternary import choose, contest

    from backend_core import report_of

    monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(contest, "SECONDS", 0.002)
    asked, decide = [], choose.decide
    monkeypatch.setattr(choose, "decide", lambda *a: asked.append(a) or decide(*a))
    model, _ = load(made["llama.t5"], policy(race="on"))
    [note] = [n for n in report_of(model).notes if "t5=auto" in n]
    assert "model.layers" in note and "as 2-bit words at rows 1," in note and "as 2-bit words at rows 64)" in note
    # What was measured is what the next load goes by.
    monkeypatch.setattr(choose, "measure", lambda *_: pytest.fail("measured again"))
    again, _ = load(made["llama.t5"], policy(race="on"))
    assert type(again.layers[0].mlp.up_proj) is type(model.layers[0].mlp.up_proj)
    assert note.replace("t5=auto:", "t5=auto, measured before:") in report_of(again).notes
    # Measured again by wish; a decision stays while the lead is near the line.
    layers, held, _ = asked[0]
    for lead, expand in ((1.5, True), (1.02, True), (1.0, False), (1.08, False), (1.1, True), (0.5, False)):
        monkeypatch.setattr(choose, "measure", lambda *_, t=lead: contest.Contest(t, {1: (t, 1.0)}, 6))
        assert decide(layers, held, policy(race="force")).expand == expand
    monkeypatch.setattr(choose, "_free_memory", lambda: 100)
    monkeypatch.setattr(choose, "measure", lambda *_: contest.Contest(9.0, {1: (9.0, 1.0)}, 6))
    choice = decide(layers, held, policy(race="force"))
    assert not choice.expand and "0 MB are free" in choice.note


def test_stock_functions_with_the_backend_on(made):
    activate.enable(policy(t5="packed"))
    try:
        model, tokenizer = mlx_lm.load(str(made["llama.t5"]))
        assert isinstance(model.model.embed_tokens, modules.T5Embedding)
        text = mlx_lm.generate(model, tokenizer, "hello", max_tokens=8)
    finally:
        activate.disable()
    want, tokenizer = mlx_lm.load(str(made["llama"]))
    assert text == mlx_lm.generate(want, tokenizer, "hello", max_tokens=8)


def test_a_saved_model_is_t5_again(made, tmp_path):
    from mlx_lm import utils
    from mlx_lm.utils import save_config, save_model

    for name in ("llama.t5", "llama-mixed.t5"):
        activate.enable(policy(t5="packed"))
        try:
            model, config = utils.load_model(made[name])
            target = tmp_path / name
            save_model(target, model)
            save_config(dict(config), target / "config.json")
            again, _ = utils.load_model(target)
        finally:
            activate.disable()
        assert mx.array_equal(again(TOKENS), stock(made[name.removesuffix(".t5")])(TOKENS))
        assert marker.find(json.loads((target / "config.json").read_text())) is not None
        held, source = cp.tensors_of(target), cp.tensors_of(made[name])
        assert set(held) == set(source) and all(cp.same_bits(held[k], source[k]) for k in held)


def test_without_a_marker_the_shapes_tell(made, tmp_path):
    """As other tools write them: config.json of the 2-bit checkpoint, biases still there."""
    other = tmp_path / "other"
    shutil.copytree(made["llama-128"], other)
    held = cp.tensors_of(other)
    for name in [n for n in held if n.endswith(".biases")]:
        weight = name.replace(".biases", ".weight")
        held[weight] = mx.array(convert.from_affine(np.array(held[weight]), 128))
    cp.write_shards(other, held, 1)
    model, _ = load(other, policy(t5="packed"))
    assert isinstance(model.model.embed_tokens, modules.T5Embedding)
    assert mx.array_equal(model(TOKENS), stock(made["llama-128"])(TOKENS))


def test_stock_fails_with_its_own_exception_and_a_hint(made):
    code = """
import sys, mlx_lm
try:
    mlx_lm.load(sys.argv[1])
except ValueError as error:
    print(type(error).__name__, str(error).splitlines()[0][:60], getattr(error, "__notes__", None))
"""
    command = [sys.executable, "-c", code, str(made["llama.t5"])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ValueError" in done.stdout and "parameters not in model" in done.stdout, done.stderr
    assert "format 't5', which mlx-accel's plugin t5 reads: add --backend accel" in done.stdout


def damaged(source: Path, target: Path, name: str, change) -> Path:
    shutil.copytree(source, target)
    held = cp.tensors_of(target)
    mx.eval(held)
    value = change(np.array(held[name]))
    if value is None:
        del held[name]
    else:
        held[name] = mx.array(value)
    for file in target.glob("model*"):
        file.unlink()
    cp.write_shards(target, held, 1)
    return target


def with_byte(at: int, value: int):
    def change(a):
        a.reshape(-1)[at] = value
        return a

    return change


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{UP}.weight", with_byte(100, 243), f"{UP}.weight is damaged: byte 100 is 243"),
        (f"{UP}.weight", with_byte(12, 3), f"{UP}.weight is damaged: the last byte of group 0"),
        (f"{UP}.scales", lambda a: None, rf"{UP}.weight has no scales \({UP}.scales is missing\)"),
        (f"{UP}.weight", lambda a: None, rf"{UP}.scales belongs to no weight \({UP}.weight is missing\)"),
        (f"{UP}.weight", lambda a: a[:, :20], f"{UP}.weight .256, 20. with scales .256, 2. of F16 is no t5"),
        (f"{UP}.scales", lambda a: a.astype(np.int32), f"{UP}.weight .* of I32 is no t5"),
        (f"{UP}.weight", lambda a: np.full((256, 52), 121, np.uint8), f"{UP}.weight has groups of 128, config.json"),
    ],
)
def test_damage_is_refused_by_name(made, tmp_path, name, change, message):
    bad = damaged(made["llama.t5"], tmp_path / "bad", name, change)
    with pytest.raises(ModelError, match=message):
        load(bad, policy(t5="packed"))


def test_a_missing_shard_is_named(made, tmp_path):
    held = cp.tensors_of(made["llama.t5"])
    shutil.copytree(made["llama.t5"], tmp_path / "t5", ignore=shutil.ignore_patterns("*.safetensors*"))
    cp.write_shards(tmp_path / "t5", held, 3)
    (tmp_path / "t5" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"incomplete: .* in model-00002-of-00003\.safetensors, which is missing"):
        load(tmp_path / "t5", policy(t5="packed"))


def test_strict_loading_stays_strict(made, tmp_path):
    bad = damaged(made["llama.t5"], tmp_path / "a", f"{UP}.weight", lambda a: a[:-1])
    with pytest.raises((ModelError, ValueError), match="up_proj"):
        load(bad, policy(t5="packed"))
    bad = damaged(made["llama.t5"], tmp_path / "b", "model.norm.weight", lambda a: None)
    with pytest.raises(ValueError, match="Missing 1 parameters"):
        load(bad, policy(t5="packed"))
    held = cp.tensors_of(made["llama.t5"])
    (tmp_path / "c").mkdir()
    shutil.copytree(made["llama.t5"], tmp_path / "c", dirs_exist_ok=True)
    for file in (tmp_path / "c").glob("model*"):
        file.unlink()
    held |= {"nobody.weight": held[f"{UP}.weight"], "nobody.scales": held[f"{UP}.scales"]}
    cp.write_shards(tmp_path / "c", held, 1)
    with pytest.raises(ValueError, match=r"not in model: \nnobody"):
        load(tmp_path / "c", policy(t5="packed"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 2}, "a later version than 1"), ({"group_size": 32}, "t5 has groups of 64 and 128")],
)
def test_markers_that_nothing_here_understands(made, tmp_path, change, message):
    shutil.copytree(made["llama.t5"], tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    config["quantization_config"].update(change)
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "x", policy(t5="packed"))


class OwnLinear(nn.Module):
    """A layer as models have them that call mlx's operations themselves."""

    def __init__(self, n, k):
        super().__init__()
        self.weight = mx.zeros((n, k // 16), mx.uint32)
        self.scales = mx.zeros((n, k // 64), mx.float16)
        self.biases = mx.zeros((n, k // 64), mx.float16)
        self.group_size, self.bits = 64, 2

    def __call__(self, x):
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group_size, bits=self.bits
        )

    def look_up(self, i):
        return mx.dequantize(self.weight[i], self.scales[i], self.biases[i], self.group_size, self.bits)


def test_layers_of_the_models_own_class(made, monkeypatch):
    """Direct callers of mx.quantized_matmul and mx.dequantize."""
    from t5_ternary import loading

    originals = mx.quantized_matmul, mx.dequantize, mx.gather_qmm
    llama = importlib.import_module("mlx_lm.models.llama")

    class Model(llama.Model):
        def __init__(self, args):
            super().__init__(args)
            self.model.layers[0].mlp.up_proj = OwnLinear(256, 128)

    want = stock(made["llama"])
    config = json.loads((made["llama.t5"] / "config.json").read_text())
    try:
        for t5 in ("packed", "expand"):
            cls = loading.model_with_t5(Model, config, marker.find(config), policy(t5=t5))
            model = cls(llama.ModelArgs.from_dict(cp.CONFIGS["llama"]))
            model.load_weights(list(cp.tensors_of(made["llama.t5"]).items()))
            own = model.model.layers[0].mlp.up_proj
            assert type(own) is OwnLinear and own.weight.dtype == (mx.uint8 if t5 == "packed" else mx.uint32)
            a, b = model(TOKENS), want(TOKENS)
            # Packed, the kernel computes that layer.
            assert mx.array_equal(a, b) == (t5 == "expand")
            assert mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() < 0.02 * mx.abs(b).max().item()
            if t5 == "packed":
                w = want.model.layers[0].mlp.up_proj
                x = mx.random.normal((3, 128), key=mx.random.key(0))
                assert mx.abs(own(x) - w(x)).max().item() < 1e-5
                assert len(calls._products) == 1
                w = want.model.layers[0].mlp.up_proj
                rows = mx.dequantize(w.weight[3:5], w.scales[3:5], w.biases[3:5], 64, 2)
                assert mx.array_equal(own.look_up(mx.array([3, 4])), rows)
    finally:
        calls.uninstall()
    assert (mx.quantized_matmul, mx.dequantize, mx.gather_qmm) == originals
    del model, own
    gc.collect()
    assert not calls._products


def test_calls_pass_everything_else_on():
    w, scales, biases = mx.quantize(mx.random.normal((8, 128), key=mx.random.key(0)), 64, 2)
    x = mx.random.normal((2, 128), key=mx.random.key(1))
    want = mx.quantized_matmul(x, w, scales, biases, True, 64, 2), mx.dequantize(w, scales, biases, 64, 2)
    calls.install()
    calls.install()
    try:
        assert mx.array_equal(mx.quantized_matmul(x, w, scales, biases, True, 64, 2), want[0])
        assert mx.array_equal(mx.dequantize(w, scales=scales, biases=biases, group_size=64, bits=2), want[1])
        with pytest.raises(ValueError):
            mx.quantized_matmul(x, w.view(mx.uint8), scales, biases, True, 64, 2)
        t5 = cp.affine(1, (6,), 256, 128)
        packed = mx.array(convert.from_affine(np.array(t5["weight"]), 128))
        x = mx.random.normal((3, 256), key=mx.random.key(2))
        y = mx.quantized_matmul(x, t5["weight"], t5["scales"], t5["biases"], True, 128, 2)
        # Other group sizes and bits than the weights have are not believed; biases may be missing.
        assert mx.array_equal(mx.quantized_matmul(x, packed, t5["scales"], t5["biases"], True, 64, 4), y)
        assert mx.array_equal(mx.quantized_matmul(x, packed, scales=t5["scales"], transpose=True), y)
        back = mx.quantized_matmul(y, packed, t5["scales"], None, transpose=False, group_size=128, bits=2)
        want = mx.quantized_matmul(y, t5["weight"], t5["scales"], t5["biases"], transpose=False, group_size=128, bits=2)
        assert mx.array_equal(back, want)
    finally:
        calls.uninstall()


def test_mlx_vlm(made, tmp_path):
    pytest.importorskip("mlx_vlm")
    utils = importlib.import_module("mlx_vlm.utils")
    from t5_vlm import save_vlm

    source = save_vlm(tmp_path / "vlm")
    repack.write(repack.plan(source), tmp_path / "t5")
    want = utils.load_model(source)
    found = utils.get_model_and_args
    for t5 in ("packed", "expand"):
        activate.enable(policy(t5=t5))
        try:
            model = utils.load_model(tmp_path / "t5")
        finally:
            activate.disable()
        layer = model.language_model.model.layers[0].mlp.up_proj
        assert isinstance(layer, modules.T5Linear if t5 == "packed" else nn.QuantizedLinear)
        assert mx.array_equal(model.language_model(TOKENS).logits, want.language_model(TOKENS).logits)
    assert utils.get_model_and_args is found and type(model) is type(want)


def test_expanding_empties_what_the_host_still_holds_but_not_what_two_names_share():
    packed = {name: mx.array(reference.pack(cp.random_trits(i, 8, 128), 64)) for i, name in enumerate("ab")}
    scales = mx.ones((8, 2), mx.float16)
    held = {"a.weight": packed["a"], "b.weight": packed["b"], "c.weight": packed["b"]}
    held |= {f"{name}.scales": scales for name in "abc"}
    want = {name: convert.to_affine(np.array(held[f"{name}.weight"]), 64) for name in "abc"}
    layers = {name: modules.T5Linear(128, 8, group_size=64) for name in "ab"}
    result = choose.expand(layers, ["c"], held)
    for name in "abc":
        assert np.array_equal(np.array(result[f"{name}.weight"]), want[name])
        assert np.array_equal(np.array(result[f"{name}.biases"]), -np.array(scales))
    assert all(np.array_equal(np.array(layers[name].weight), want[name]) for name in "ab")
    assert not np.array(held["a.weight"]).any() and np.array(held["b.weight"]).any()
