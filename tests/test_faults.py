"""Broken third-party plugins, as separate distributions in real processes: the text never changes.

Wrong numbers, an exception, a slow kernel, a failing import and a killed process: all five leave the text as
stock prints it, and stand in the report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

WITHOUT_SHIPPED = "-bonsai_qmv,-host_linear,-host_ops,-cider_sdpa"
COMMON = """
from backend_core import Offer, hookimpl
def layer(module, factor=1.0):
    import mlx.core as mx
    def call(x):
        y = mx.quantized_matmul(x, module.weight, module.scales, module.biases, transpose=True,
                                group_size=module.group_size, bits=module.bits)
        return y * factor
    return call
"""
PLUGINS = {
    "wrong": COMMON + '''
@hookimpl
def select_linear(site):
    return Offer("wrong", lambda module: layer(module, 1.001), row_invariant=True, preference=9)
''',
    "raising": COMMON + '''
@hookimpl
def select_linear(site):
    def build(module):
        def call(x):
            raise OSError("the disk of the toy is full")
        return call
    return Offer("raising", build, row_invariant=True, preference=9)
''',
    "slow": COMMON + '''
import time
@hookimpl
def select_linear(site):
    def build(module):
        right = layer(module)
        def call(x):
            time.sleep(0.005)
            return right(x)
        return call
    return Offer("slow", build, row_invariant=True, preference=9)
''',
    "unimportable": "import a_module_that_does_not_exist\n",
    "deadly": COMMON + '''
import os, signal
@hookimpl
def select_linear(site):
    def build(module):
        return lambda x: os.kill(os.getpid(), signal.SIGSEGV)
    return Offer("deadly", build, row_invariant=True, preference=9)
''',
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", bits=4, tie_word_embeddings=False)
    return tiny_models.save(model, "llama", tmp_path_factory.mktemp("model"), bits=4, tie_word_embeddings=False)


def install_plugin(folder: Path, name: str) -> Path:
    """A distribution `toy-NAME` 1.0 on a path of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"toy_{name}.py").write_text(PLUGINS[name])
    info = folder / f"toy_{name}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mlx_accel.plugins]\ntoy_{name} = toy_{name}\n")
    return folder


def run(arguments: list[str], cache: Path, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_ACCEL_")}
    environment.update(MLX_ACCEL_CACHE=str(cache), HF_HUB_OFFLINE="1", **env)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=240)


def generate(model: Path, cache: Path, path: Path | None, *more: str) -> subprocess.CompletedProcess[str]:
    return run(
        ["-m", "mlx_lm", "generate", "--model", str(model), "--prompt", "hello", "--max-tokens", "12", "--temp", "0",
         "--ignore-chat-template", *more], cache, path,
    )  # fmt: skip


def text_of(result: subprocess.CompletedProcess[str]) -> str:
    """What was generated, between mlx-lm's two rulers."""
    assert result.returncode == 0, result.stderr
    return result.stdout.split("==========")[1]


@pytest.fixture(scope="module")
def stock_text(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_of(generate(model_dir, tmp_path_factory.mktemp("cache"), None, "--backend", "mlx"))


def linear(report: dict) -> list[dict]:
    """The decisions for linear layers; installed plugins may answer for other sites."""
    return [d for d in report["decisions"] if d["hook"] == "select_linear"]


def explain(model: Path, cache: Path, path: Path, *more: str) -> dict:
    result = run(["-m", "backend_core", "explain", str(model), "--json", *more], cache, path)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "times the rounding bound"),
        ("raising", "OSError: the disk of the toy is full"),
        ("slow", "no measured win"),
    ],
)
def test_a_bad_offer_leaves_the_text_and_stands_in_the_report(name, reason, model_dir, stock_text, tmp_path) -> None:
    path = install_plugin(tmp_path / "site", name)
    cache = tmp_path / "cache"
    # A bare name would insist on the plugin, and that it cannot serve would be an error.
    only = ["--backend-option", f"plugins={WITHOUT_SHIPPED}"]
    assert text_of(generate(model_dir, cache, path, "--backend", "accel", *only)) == stock_text
    report = explain(model_dir, cache, path, "-o", f"plugins={WITHOUT_SHIPPED}")
    for decision in linear(report):
        assert decision["chosen"] == "stock"
        [loser] = [x for x in decision["losers"] if x["offer"] == f"toy_{name}/{name}"]
        assert reason in loser["reason"]


def test_a_plugin_whose_import_fails_is_recorded(model_dir, stock_text, tmp_path) -> None:
    path = install_plugin(tmp_path / "site", "unimportable")
    result = generate(model_dir, tmp_path / "cache", path, "--backend", "accel")
    assert text_of(result) == stock_text
    assert "plugin toy_unimportable failed" in result.stderr
    listed = run(["-m", "backend_core", "plugins", "--json"], tmp_path / "cache", path)
    [record] = [r for r in json.loads(listed.stdout) if r["name"] == "toy_unimportable"]
    assert record["state"] == "failed" and record["version"] == "1.0" and record["distribution"] == "toy-unimportable"
    assert "a_module_that_does_not_exist" in record["reason"]
    assert "Traceback" in record["faults"][0]["traceback"]
    strict = generate(model_dir, tmp_path / "cache", path, "--backend", "accel", "--backend-option", "strict=1")
    assert strict.returncode == 2 and "a_module_that_does_not_exist" in strict.stderr
    assert "Traceback" not in strict.stderr
    named = generate(model_dir, tmp_path / "cache", path, "--backend", "accel", "--backend-option",
                     "plugins=+toy_unimportable")  # fmt: skip
    assert named.returncode == 2
    assert "'toy_unimportable' was asked for and cannot serve" in named.stderr
    assert "a_module_that_does_not_exist" in named.stderr


def test_an_offer_that_kills_the_process_is_quarantined(model_dir, stock_text, tmp_path) -> None:
    path, cache = install_plugin(tmp_path / "site", "deadly"), tmp_path / "cache"
    first = generate(model_dir, cache, path, "--backend", "accel")
    assert first.returncode < 0  # died of the signal
    second = generate(model_dir, cache, path, "--backend", "accel")
    assert text_of(second) == stock_text
    assert "toy_deadly/deadly is quarantined" in second.stderr
    third = generate(model_dir, cache, path, "--backend", "accel")
    assert text_of(third) == stock_text
    report = explain(model_dir, cache, path)
    for decision in linear(report):
        [loser] = [x for x in decision["losers"] if x["offer"] == "toy_deadly/deadly"]
        assert loser["reason"].startswith("quarantined: the process died")
    named = generate(model_dir, cache, path, "--backend", "accel", "--backend-option", "plugins=+toy_deadly")
    assert named.returncode == 2 and "quarantined" in named.stderr
    cleared = run(["-m", "backend_core", "profile", "clear"], cache, path)
    assert cleared.returncode == 0
    assert generate(model_dir, cache, path, "--backend", "accel").returncode < 0


def test_a_named_plugin_that_is_not_installed(model_dir, tmp_path) -> None:
    result = generate(model_dir, tmp_path, None, "--backend", "accel", "--backend-option", "plugins=+w9a9")
    assert result.returncode == 2
    assert "plugin 'w9a9' is not installed" in result.stderr and "Traceback" not in result.stderr
