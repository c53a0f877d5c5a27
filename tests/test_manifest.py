"""mlx_accel.toml: read without importing, refused with file and key, checked against the machine."""

from __future__ import annotations

import importlib.metadata
import sys

import helpers
import pytest

from backend_core import manifest
from backend_core.manifest import Manifest

FULL = """
api = 1
name = "toy"
description = "A toy."
hooks = ["select_linear", "fuse_moe"]
[requires]
mlx = ">=0.1"
numpy = ""
devices = ["cpu", "metal"]
isa = ["avx2", "neon"]
"""


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "mlx_accel.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return to_file


def test_reads_everything(write):
    path = write(FULL)
    assert manifest.read(path) == Manifest(
        path,
        1,
        ("select_linear", "fuse_moe"),
        ("cpu", "metal"),
        ("avx2", "neon"),
        {"mlx": ">=0.1", "numpy": ""},
    )


def test_an_empty_file_requires_nothing(write):
    path = write("")
    assert manifest.read(path) == Manifest(path)
    assert manifest.read(path).unmet(("cpu",), ()) == ""


@pytest.mark.parametrize(
    "text,said",
    [
        ("api = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        ("apj = 1", "unknown keys ['apj']"),
        ("api = 0", "api must be a positive integer, not 0"),
        ("api = -1", "api must be"),
        ('api = "1"', "api must be"),
        ("api = true", "api must be"),
        ("api = 1.0", "api must be"),
        ('hooks = "select_linear"', "hooks must be a list of strings"),
        ("hooks = [1]", "hooks must be a list of strings"),
        ("requires = 3", "[requires] must be a table"),
        ('requires = ["mlx"]', "[requires] must be a table"),
        ('[requires]\ndevices = ["tpu", "cpu"]', "requires.devices has ['tpu']"),
        ('[requires]\ndevices = "cpu"', "requires.devices must be a list"),
        ("[requires]\nisa = [2]", "requires.isa must be a list"),
        ('[requires]\nmlx = "new"', "requires.mlx = 'new' is not a version range"),
        ("[requires]\nmlx = 0.32", "requires.mlx = 0.32 is not a version range"),
        ('[requires]\nmlx = [">=1"]', "is not a version range"),
        ("[requires.mlx]\n", "is not a version range"),
    ],
)
def test_mistakes_are_named_with_file_and_key(write, text, said):
    path = write(text)
    with pytest.raises(ValueError) as info:
        manifest.read(path)
    assert said in str(info.value)
    assert str(info.value).startswith(str(path))


@pytest.mark.parametrize(
    "facts,devices,isa,said",
    [
        ({}, ("cpu",), (), ""),
        ({"api": 1}, (), (), ""),
        ({"api": 2}, ("cpu",), (), "needs plugin API 2, this mlx-accel has 1: upgrade mlx-accel"),
        ({"devices": ("metal",)}, ("cpu",), (), "needs one of the devices metal; here: cpu"),
        ({"devices": ("metal", "cuda")}, ("cpu", "cuda"), (), ""),
        ({"devices": ("cpu",), "isa": ("avx2", "neon")}, ("cpu",), ("portable", "avx2"), ""),
        ({"devices": ("cpu",), "isa": ("neon",)}, ("cpu",), ("portable",),
         "needs one of the instruction sets neon; here: portable"),
        ({"isa": ("neon",)}, ("cpu",), (), "needs one of the instruction sets neon; here: none"),
        # The plugin has something for the GPU, so missing CPU instructions do not rule it out.
        ({"devices": ("cpu", "metal"), "isa": ("neon",)}, ("cpu", "metal"), ("portable",), ""),
    ],
)  # fmt: skip
def test_unmet(facts, devices, isa, said):
    assert Manifest(**facts).unmet(devices, isa) == said


@pytest.mark.parametrize(
    "have,wanted,fits",
    [
        ("1.5.2", ">=1.5,<2", True), ("1.5", ">=1.5,<2", True), ("2.0", ">=1.5,<2", False),
        ("1.4.9", ">=1.5,<2", False), ("1.5.2", "", True), ("1.5.2", "==1.5.*", True),
        # Nightly builds of a release in the range count as in the range, those before it as before it.
        ("1.6.0.dev20260901", ">=1.5,<2", True), ("1.5.0rc1", ">=1.5,<2", False),
    ],
)  # fmt: skip
def test_unmet_compares_installed_versions(monkeypatch, have, wanted, fits):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: have)
    said = Manifest(versions={"mlx": wanted}).unmet(("cpu",), ())
    assert said == ("" if fits else f"needs mlx{wanted}, {have} is installed")


def test_unmet_names_what_is_not_installed():
    assert Manifest(versions={"no-such-dist-xyz": ">=2"}).unmet(("cpu",), ()) == (
        "needs no-such-dist-xyz>=2, which is not installed"
    )


def test_found_without_importing_the_plugin(tmp_path, monkeypatch):
    body = "raise SystemExit('imported')"
    site = helpers.distribution(
        tmp_path, "toy",
        files={"toy_pkg_a/__init__.py": body, "toy_pkg_a/plugin.py": body,
               "toy_pkg_a/mlx_accel.toml": "api = 1", "toy_mod_b.py": body, "toy_pkg_c/__init__.py": body},
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(site))
    want = site / "toy_pkg_a" / "mlx_accel.toml"
    assert manifest.find("toy_pkg_a") == want
    assert manifest.find("toy_pkg_a.plugin") == want
    assert manifest.find("toy_mod_b") is None  # a single module cannot ship one
    assert manifest.find("toy_pkg_c") is None
    assert not [m for m in sys.modules if m.startswith("toy_")]


@pytest.mark.parametrize("module", ["no_such_module_xyz", "no_such_module_xyz.sub", "__main__x", ""])
def test_a_module_that_is_not_there_has_no_manifest(module):
    assert manifest.find(module) is None


def test_a_loaded_module_without_spec_has_no_manifest(monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "toy_no_spec", types.ModuleType("toy_no_spec"))
    assert manifest.find("toy_no_spec") is None
