"""The mlx-accel command: output, exit codes, one message per mistake."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import tiny_models
from click.testing import CliRunner, Result

from backend_core import paths
from backend_core.cli import main


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", bits=4)
    return tiny_models.save(model, "llama", tmp_path_factory.mktemp("model"), bits=4)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def test_explain_has_one_decision_per_site_with_reasons(model_dir, installed_plugins) -> None:
    result = call("explain", model_dir, "--json", "-o", "activations=model")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    linear = [d for d in data["decisions"] if d["hook"] == "select_linear"]
    assert len(linear) == 15 and len({d["path"] for d in linear}) == 15
    for d in linear:
        assert d["losers"] and all(x["offer"] and x["reason"] for x in d["losers"])
        if d["chosen"] != "stock":
            assert d["ratio"] > 0.9
    table = call("explain", model_dir, "-o", "race=off")
    assert table.exit_code == 0 and "model.layers.0.mlp.down_proj" in table.stdout
    every = call("explain", model_dir, "--all", "-o", "race=off")
    assert "model.layers.1.mlp.down_proj" in every.stdout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "missing", "does not exist"),
        (lambda d: _file(d), "is a file; a model is a directory"),
        (lambda d: _empty(d), "has no config.json"),
        (lambda d: _truncated(d), "model.safetensors"),
        (lambda d: _rotated(d), "hadamard"),
        (lambda d: _unquantized(d), "has no quantization entry, but 15 layers"),
    ],
    ids=["missing", "a file", "no config", "truncated", "rotated", "config without quantization"],
)
def test_bad_models_get_one_clear_message(make, message, tmp_path) -> None:
    path = make(tmp_path)
    result = call("explain", path)
    assert result.exit_code == 2, result.output
    assert message.lower() in result.stderr.lower(), result.stderr
    assert "Traceback" not in result.stderr and str(path) in result.stderr


def _save(directory: Path) -> Path:
    return tiny_models.save(tiny_models.build("llama", bits=4), "llama", directory / "m", bits=4)


def _file(directory: Path) -> Path:
    (directory / "f").write_text("x")
    return directory / "f"


def _empty(directory: Path) -> Path:
    (directory / "e").mkdir()
    return directory / "e"


def _truncated(directory: Path) -> Path:
    path = _save(directory)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    return path


def _rotated(directory: Path) -> Path:
    path = _save(directory)
    config = json.loads((path / "config.json").read_text())
    config["quantization"]["hadamard"] = True
    (path / "config.json").write_text(json.dumps(config))
    return path


def _unquantized(directory: Path) -> Path:
    path = _save(directory)
    config = json.loads((path / "config.json").read_text())
    del config["quantization"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_plugins_lists_states_and_json(installed_plugins) -> None:
    data = json.loads(call("plugins", "--json").stdout)
    names = {r["name"]: r for r in data}
    assert names["bonsai_qmv"]["distribution"] == "mlx-accel-bonsai-qmv"
    assert names["bonsai_qmv"]["hooks"] == ["register_kernels", "select_linear"]
    off = json.loads(call("plugins", "--json", "-o", "plugins=-bonsai_qmv").stdout)
    assert {r["name"]: r["state"] for r in off}["bonsai_qmv"] == "off"
    assert "bonsai_qmv" in call("plugins").stdout


def test_plugins_without_any() -> None:
    assert json.loads(call("plugins", "--json").stdout) == []
    assert "no plugins" in call("plugins").stdout


def test_doctor_is_clean_here_and_finds_a_broken_model(model_dir, tmp_path, installed_plugins) -> None:
    good = call("doctor", "--json", "--model", model_dir)
    checks = json.loads(good.stdout)["checks"]
    assert good.exit_code == 0, [c for c in checks if c["status"] == "fault"]
    assert {c["name"] for c in checks} >= {"native.module", "plugins.bonsai_qmv", "hook", "profile"}
    bad = call("doctor", "--json", "--model", _truncated(tmp_path))
    faults = [c for c in json.loads(bad.stdout)["checks"] if c["status"] == "fault"]
    assert bad.exit_code == 1 and faults and all(c["mend"] for c in faults)
    table = call("doctor")
    assert table.exit_code == 0 and "no faults" in table.stdout and "mlx[cpu]" not in table.stderr


def test_profile_show_and_clear(model_dir, installed_plugins) -> None:
    assert "no races yet" in call("profile").stdout
    call("explain", model_dir, "--json", "-o", "activations=model")
    shown = json.loads(call("profile", "show", "--json").stdout)
    [environment] = shown["environments"].values()
    assert environment["races"] and shown["path"] == str(paths.profile_path())
    assert "bonsai_qmv/affine" in call("profile", "show").stdout
    assert call("profile", "clear").exit_code == 0
    assert not paths.profile_path().exists()
    assert "nothing to remove" in call("profile", "clear").stdout


def test_a_corrupt_profile_is_named_by_show_and_ignored_by_explain(model_dir) -> None:
    paths.profile_path().parent.mkdir(parents=True, exist_ok=True)
    paths.profile_path().write_bytes(struct.pack("<I", 7) + b"{")
    result = call("profile", "show")
    assert result.exit_code == 2 and "profile clear" in result.stderr
    explained = json.loads(call("explain", model_dir, "--json").stdout)
    assert any("corrupt" in n for n in explained["notes"])


def test_a_cache_that_cannot_be_written_is_noted(model_dir, tmp_path, monkeypatch, installed_plugins) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLX_ACCEL_CACHE", str(tmp_path / "file" / "cache"))
    data = json.loads(call("explain", model_dir, "--json", "-o", "activations=model").stdout)
    assert any("cannot be written" in n for n in data["notes"]), data["notes"]
    assert any(d["chosen"] != "stock" for d in data["decisions"])


@pytest.mark.parametrize("arguments", [("explain", "x", "-o", "speed=1"), ("plugins", "-o", "plugins=+absent")])
def test_bad_options(arguments) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and "error: " in result.stderr and "Traceback" not in result.stderr


def test_bench_generate_writes_json(model_dir, tmp_path, installed_plugins) -> None:
    out = tmp_path / "bench.json"
    result = call("bench", "generate", "--model", model_dir, "--prompt-tokens", 20, "--tokens", 4, "--repeats", 2,
                  "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["same_greedy_tokens"] is True and data["mlx"] == "0.32.4"
    assert set(data["rows"]) == {"prompt", "decode"} and len(data["rows"]["decode"]["accel"]) == 2
    assert "ratio" in result.stdout
