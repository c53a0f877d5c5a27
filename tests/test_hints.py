"""Stock's own exceptions, with a word of help where an installed plugin reads the format."""

from __future__ import annotations

import json
import sys
import types

import pytest
from helpers import distribution

from backend_core.integrations import hints
from backend_core.manifest import installed_formats


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A plugin that reads the format "squeezed" is installed."""
    files = {"squeezer/mlx_accel.toml": 'formats = ["squeezed"]\n', "squeezer/__init__.py": "raise ImportError()"}
    monkeypatch.syspath_prepend(str(distribution(tmp_path, "squeezer", plugins={"squeezer": "squeezer"}, files=files)))


def checkpoint(directory, **config):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_format_and_the_plugin_are_named(reader, tmp_path):
    assert installed_formats() == {"squeezed": "squeezer"}
    for i, key in enumerate(("quantization_config", "quantization")):
        text = hints.hint(checkpoint(tmp_path / f"m{i}", **{key: {"quant_method": "squeezed"}}))
        assert "format 'squeezed'" in text and "plugin squeezer" in text and "--backend accel" in text


def test_no_hint_where_nothing_can_be_said(reader, tmp_path):
    assert hints.hint(checkpoint(tmp_path / "a", quantization_config={"quant_method": "other"})) == ""
    assert hints.hint(checkpoint(tmp_path / "b", quantization_config="squeezed")) == ""
    assert hints.hint(checkpoint(tmp_path / "c", quantization_config={"quant_method": ["squeezed"]})) == ""
    (tmp_path / "c" / "config.json").write_text("[1")
    assert hints.hint(tmp_path / "c") == "" and hints.hint(tmp_path / "none") == "" and hints.hint(None) == ""


def test_without_the_plugin_there_is_no_hint(tmp_path):
    assert hints.hint(checkpoint(tmp_path / "a", quantization_config={"quant_method": "squeezed"})) == ""


def test_exceptions_keep_type_and_text(reader, tmp_path, monkeypatch):
    model = checkpoint(tmp_path / "m", quantization_config={"quant_method": "squeezed"})
    plain = checkpoint(tmp_path / "p")
    utils = types.ModuleType("fake_host.utils")

    def load_model(model_path, lazy=False):
        if lazy:
            return "model"
        raise ValueError("shapes differ")

    utils.load_model = load_model
    monkeypatch.setitem(sys.modules, "fake_host.utils", utils)
    hints.install("fake_host")
    wrapped = utils.load_model
    hints.install("fake_host")
    assert utils.load_model is wrapped and wrapped.__wrapped__ is load_model
    assert wrapped(model, lazy=True) == "model"
    with pytest.raises(ValueError, match="shapes differ") as info:
        wrapped(model)
    notes = getattr(info.value, "__notes__", None) or [info.value.args[0].split("\n")[1]]
    assert len(notes) == 1 and "--backend accel" in notes[0]
    with pytest.raises(ValueError) as info:
        wrapped(plain)
    assert not getattr(info.value, "__notes__", None) and info.value.args == ("shapes differ",)


def test_hosts_without_the_function_are_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "fake_host.utils", types.ModuleType("fake_host.utils"))
    hints.install("fake_host")
    hints.install("no_such_host")
    assert not hasattr(sys.modules["fake_host.utils"], "load_model")
