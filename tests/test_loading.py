"""The patch point of each host: what is accelerated, what stays stock, what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_models
import toys

import backend_core
from backend_core import Offer, Policy, PolicyError, disable, enable, load, report_of
from backend_core.checkpoints import UnknownQuantization
from backend_core.errors import ModelError
from backend_core.integrations import activate, loading

DETERMINISTIC = Policy(deterministic=True, activations="model", report="none")


@pytest.fixture
def utils():
    module = importlib.import_module("mlx_lm.utils")
    yield module
    disable()
    assert not hasattr(module.load_model, "_accel_original")


@pytest.fixture
def toy_plugins(monkeypatch: pytest.MonkeyPatch):
    """The installed plugins are replaced by the exact toy."""
    monkeypatch.setattr(
        backend_core.core, "plugin_host", lambda policy=None: toys.host(policy, exact=toys.exact_plugin())
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", bits=4)
    return tiny_models.save(model, "llama", tmp_path_factory.mktemp("model"), bits=4)


def is_accelerated(model) -> bool:
    return any("_accel" in m.__dict__ for _, m in model.named_modules())


def test_enable_covers_load_and_disable_ends_it(utils, toy_plugins, model_dir) -> None:
    import mlx_lm

    enable(DETERMINISTIC)
    model, _ = mlx_lm.load(str(model_dir))
    assert is_accelerated(model) and report_of(model) is not None
    disable()
    other, _ = mlx_lm.load(str(model_dir))
    assert not is_accelerated(other) and is_accelerated(model)
    enable(DETERMINISTIC)
    enable(DETERMINISTIC)  # twice is once
    assert not hasattr(utils.load_model._accel_original, "_accel_original")


def test_the_tokenizer_and_config_come_through_unchanged(utils, toy_plugins, model_dir) -> None:
    import mlx_lm

    stock = mlx_lm.load(str(model_dir), return_config=True)
    enable(DETERMINISTIC)
    ours = mlx_lm.load(str(model_dir), return_config=True)
    assert ours[2] == stock[2] and ours[1].encode("hello") == stock[1].encode("hello")


def test_load_is_mlx_lms_load_accelerated_once(toy_plugins, model_dir) -> None:
    module = importlib.import_module("mlx_lm.utils")
    before = module.load_model
    model, tokenizer = load(model_dir, DETERMINISTIC)
    assert is_accelerated(model) and tokenizer.encode("a")
    assert module.load_model is before
    with pytest.raises(ModelError, match="/no/such/dir does not exist"):
        load("/no/such/dir", DETERMINISTIC)


def test_lazy_loading_stays_stock_and_says_so(utils, toy_plugins, model_dir, capsys) -> None:
    enable(DETERMINISTIC)
    model, _ = utils.load_model(model_dir, lazy=True)
    assert not is_accelerated(model)
    assert "loaded lazily" in capsys.readouterr().err


def test_commands_that_write_weights_stay_stock(utils, toy_plugins, model_dir, capsys) -> None:
    for command in ("mlx_lm.lora", "mlx_lm.quant.dwq", "mlx_lm.convert", "mlx_vlm.train", "mlx_lm.fuse"):
        enable(DETERMINISTIC, command=command)
        assert "runs stock" in capsys.readouterr().err
        assert not is_accelerated(utils.load_model(model_dir)[0])
    enable(DETERMINISTIC, command="mlx_lm.server")
    assert is_accelerated(utils.load_model(model_dir)[0])


def test_sharded_loading_selects_at_the_first_forward_pass(utils, toy_plugins, model_dir, capsys) -> None:
    """One process is a group of one: sharded_load runs as it does on many."""
    enable(DETERMINISTIC)
    model, _ = utils.sharded_load(str(model_dir))
    assert "selection follows" in capsys.readouterr().err
    assert not is_accelerated(model)
    cls = type(model)
    y = model(mx.array([[1, 2, 3]]))
    assert is_accelerated(model) and type(model) is not cls and type(model).__name__ == "Model"
    disable()
    stock, _ = utils.load_model(model_dir)
    assert type(model) is type(stock)
    assert mx.abs(y - stock(mx.array([[1, 2, 3]]))).max().item() < 1e-4


def test_every_report_form(utils, toy_plugins, model_dir, capsys) -> None:
    for form, text in (("short", "[accel] 15 sites: 15 run exact/exact, 0 stay stock"), ("json", '"decisions": ['),
                       ("full", "exact/exact"), ("none", "")):  # fmt: skip
        enable(Policy(deterministic=True, activations="model", report=form))
        utils.load_model(model_dir)
        err = capsys.readouterr().err
        assert text in err and (form != "none" or err == "")


def test_unknown_quantization_is_refused_by_name(utils, toy_plugins, model_dir, tmp_path, capsys) -> None:
    for change, word in (
        ({"quantization": {"group_size": 32, "bits": 4, "hadamard": True}}, "hadamard"),
        ({"quantization": None, "quantization_config": {"quant_method": "w9a9"}}, "w9a9"),
    ):
        path = tmp_path / word
        path.mkdir()
        for file in model_dir.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        config = {**json.loads((path / "config.json").read_text()), **change}
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        enable(DETERMINISTIC)
        with pytest.raises(UnknownQuantization, match=word):
            utils.load_model(path)
        enable(DETERMINISTIC, command="mlx_lm.generate")
        with pytest.raises(SystemExit) as exit:
            utils.load_model(path)
        assert exit.value.code == 2 and word in capsys.readouterr().err


def test_a_damaged_file_is_named_with_its_mend(utils, toy_plugins, model_dir, tmp_path) -> None:
    for file in model_dir.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 3] if file.suffix == ".safetensors" else data)
    enable(DETERMINISTIC)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated: .* Download model\.safetensors again"):
        utils.load_model(tmp_path)


def test_adapt_checkpoint_loads_what_stock_cannot(utils, model_dir, tmp_path, monkeypatch) -> None:
    """A toy format: the config says the type with another name."""
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toyformat"}
    del config["quantization"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = []

    def adapt_checkpoint(site):
        seen.append(site)
        if site.quant_method != "toyformat":
            return None
        return Offer(
            "toyformat",
            lambda arguments: {
                **arguments,
                "model_config": {"quantization": {"group_size": 32, "bits": 4}, "quantization_config": None},
            },
        )

    plugin = toys.module_with(adapt_checkpoint=adapt_checkpoint)
    monkeypatch.setattr(backend_core.core, "plugin_host", lambda policy=None: toys.host(policy, toy=plugin))
    enable(DETERMINISTIC)
    model, _ = utils.load_model(tmp_path)
    assert seen[0].quant_method == "toyformat" and seen[0].model_type == "llama"
    assert "model.safetensors" in seen[0].files
    assert mx.array_equal(model(mx.array([[1, 2]])), tiny_models.build("llama", bits=4)(mx.array([[1, 2]])))


def test_interrupt_leaves_word_and_the_interrupt(utils, model_dir, monkeypatch, capsys) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    enable(DETERMINISTIC)
    monkeypatch.setattr(loading.core, "accelerate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        utils.load_model(model_dir)
    assert "interrupted; the model was left stock" in capsys.readouterr().err


def test_a_bad_policy_changes_nothing(utils) -> None:
    from backend_core import backends

    before = utils.load_model
    with pytest.raises(PolicyError):
        backends.switch_to("accel", ["race=never"])
    assert utils.load_model is before and not activate.enabled()


# mlx-vlm

HAS_VLM = importlib.util.find_spec("mlx_vlm") is not None
vlm = pytest.mark.skipif(not HAS_VLM, reason="mlx-vlm is not installed")


@pytest.fixture(scope="module")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    module = importlib.import_module("mlx_vlm.models.qwen2_vl")
    config = {
        "model_type": "qwen2_vl", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 320,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True,
        "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302,
        "vision_config": {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4,
                          "patch_size": 14, "in_channels": 3},
    }  # fmt: skip
    built = module.ModelConfig.from_dict(json.loads(json.dumps(config)))
    built.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    built.text_config = module.TextConfig.from_dict(built.text_config)
    mx.random.seed(0)
    model = module.Model(built)
    nn.quantize(model.language_model, group_size=32, bits=4)
    path = tmp_path_factory.mktemp("vlm")
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 4}}))
    return path


@vlm
@pytest.mark.vlm
def test_a_vision_model_is_accelerated_by_mlx_vlms_own_loader(utils, toy_plugins, vlm_dir) -> None:
    vlm_utils = importlib.import_module("mlx_vlm.utils")
    stock = vlm_utils.load_model(vlm_dir)
    enable(DETERMINISTIC)
    model = vlm_utils.load_model(vlm_dir)
    report = report_of(model)
    assert report is not None and {d.site.host for d in report.decisions} == {"mlx_vlm"}
    assert {d.chosen for d in report.decisions} == {"exact/exact"}
    tokens = mx.array([[1, 5, 7, 9]])
    got, want = model.language_model(tokens).logits, stock.language_model(tokens).logits
    assert mx.abs(got - want).max().item() <= 2e-4 * mx.abs(want).max().item()
    disable()
    assert not hasattr(vlm_utils.load_model, "_accel_original")


@vlm
@pytest.mark.vlm
def test_short_blocks_of_mlx_vlm_go_through_the_accelerated_layer(utils, toy_plugins, vlm_dir) -> None:
    """mlx_vlm.models.linear reads the weights of any QuantizedLinear at 2..8 positions, past its __call__."""
    linear = importlib.import_module("mlx_vlm.models.linear")
    code = linear.native_batch_linear.__code__
    enable(DETERMINISTIC)
    model = importlib.import_module("mlx_vlm.utils").load_model(vlm_dir)
    layer = model.language_model.model.layers[0].mlp.gate_proj
    layer.eval()
    calls = []
    slot = layer.__dict__["_accel"]
    inner = slot.small
    slot.small = slot.single = slot.large = lambda x: (calls.append(x.shape), inner(x))[1]
    x = mx.random.normal((1, 5, 64), key=mx.random.key(0))
    block = linear.linear(layer, x)
    assert calls == [(1, 5, 64)]
    for i in range(5):
        assert mx.array_equal(linear.linear(layer, x[:, i : i + 1]), block[:, i : i + 1])
    calls.clear()
    linear.linear(layer, mx.broadcast_to(x[:, :3], (8, 3, 64)))  # 24 rows: position by position
    assert calls == [(8, 1, 64)] * 3
    # Stock layers are served as before, and disable() takes the route away.
    stock = type(layer).__mro__[1](64, 96, bias=False, group_size=32, bits=4)
    stock.eval()
    assert linear.linear(stock, x).shape == (1, 5, 96)
    disable()
    assert linear.native_batch_linear.__code__ is code


def test_enable_does_not_import_mlx_vlm() -> None:
    import subprocess

    code = (
        "import sys, backend_core; backend_core.enable(); "
        "print('mlx_vlm' in sys.modules, 'mlx_lm' in sys.modules); backend_core.disable()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["False", "True"], result.stderr
