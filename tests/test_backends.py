"""Backends: found by name, named when unknown, switched without leaving a mess."""

from __future__ import annotations

import helpers
import pytest

from backend_core import AccelError, UnknownBackend, backends

TOY = """
class Toy:
    log = []
    def activate(self, options, command):
        if "bad=1" in options:
            raise ValueError("toy: bad option")
        self.log.append(("on", list(options), command))
    def deactivate(self):
        self.log.append(("off",))
toy, other = Toy(), Toy()
no_backend = object()
"""


@pytest.fixture(autouse=True)
def stock_again(monkeypatch):
    monkeypatch.setattr(backends, "_active", None)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    entries = {
        "toy": "toyback_mod:toy", "other": "toyback_mod:other", "broken": "toyback_broken:x",
        "leaver": "toyback_exit:x", "lost": "toyback_mod:lost", "nothing": "toyback_mod:no_backend",
    }  # fmt: skip
    files = {
        "toyback_mod.py": TOY,
        "toyback_broken.py": "raise RuntimeError('no driver')",
        "toyback_exit.py": "raise SystemExit(7)",
    }
    monkeypatch.syspath_prepend(str(helpers.distribution(tmp_path, "toyback", backends=entries, files=files)))
    import toyback_mod

    toyback_mod.Toy.log.clear()
    yield toyback_mod
    import sys

    del sys.modules["toyback_mod"]


def test_stock_and_accel_are_always_there():
    assert {"mlx", "accel"} <= set(backends.names())
    assert backends.get("accel") is backends.accel
    assert isinstance(backends.get("mlx"), backends.Stock)


def test_names_are_sorted_and_complete(toy):
    names = backends.names()
    assert names == sorted(names)
    assert {"accel", "broken", "leaver", "lost", "mlx", "nothing", "other", "toy"} <= set(names)
    assert backends.get("toy") is toy.toy


@pytest.mark.parametrize("name", ["acell", "", "MLX"])
def test_an_unknown_name_lists_the_names(toy, name):
    with pytest.raises(UnknownBackend) as info:
        backends.get(name)
    assert str(info.value) == f"unknown backend {name!r} (available: {', '.join(backends.names())})"
    assert isinstance(info.value, AccelError) and isinstance(info.value, LookupError)


@pytest.mark.parametrize(
    "name,said",
    [
        ("broken", "backend 'broken' cannot be loaded: RuntimeError: no driver"),
        ("leaver", "backend 'leaver' cannot be loaded: SystemExit: 7"),
        ("lost", "backend 'lost' cannot be loaded: AttributeError: "),
        ("nothing", "backend 'nothing' cannot be used: toyback_mod:no_backend has no activate()"),
    ],
)
def test_a_broken_backend_is_quoted_and_the_others_stay(toy, name, said):
    with pytest.raises(UnknownBackend) as info:
        backends.get(name)
    assert said in str(info.value)
    assert backends.get("toy") is toy.toy


def test_switching_deactivates_the_former(toy):
    backends.switch_to("toy", ["a=1"], "mlx_lm.generate")
    assert backends.active() == "toy"
    backends.switch_to("other", [])
    assert backends.active() == "other"
    backends.switch_to("mlx", [])
    assert backends.active() == "mlx"
    assert toy.Toy.log == [("on", ["a=1"], "mlx_lm.generate"), ("off",), ("on", [], ""), ("off",)]


def test_an_unknown_name_changes_nothing(toy):
    backends.switch_to("toy", [])
    for wrong in ("ghost", "broken"):
        with pytest.raises(UnknownBackend):
            backends.switch_to(wrong, [])
    assert backends.active() == "toy"
    assert toy.Toy.log == [("on", [], "")]


def test_a_failed_switch_leaves_the_former_active(toy):
    backends.switch_to("toy", ["a=1"], "c")
    for name, options in (("other", ["bad=1"]), ("toy", ["bad=1"]), ("mlx", ["a=1"])):
        toy.Toy.log.clear()
        with pytest.raises(ValueError):
            backends.switch_to(name, options)
        assert backends.active() == "toy"
        assert toy.Toy.log == [("off",), ("on", ["a=1"], "c")]


def test_a_failed_first_switch_leaves_stock(toy):
    with pytest.raises(ValueError, match="bad option"):
        backends.switch_to("toy", ["bad=1"])
    assert backends.active() == "mlx"


def test_stock_takes_no_options():
    with pytest.raises(ValueError, match="stock backend mlx"):
        backends.switch_to("mlx", ["race=off"])
    backends.switch_to("mlx", [])
    assert backends.active() == "mlx"


def test_accel_checks_its_options_before_it_takes_effect():
    from backend_core.integrations import activate

    with pytest.raises(ValueError, match="unknown option 'rase'"):
        backends.switch_to("accel", ["rase=off"])
    assert backends.active() == "mlx"
    assert not activate.enabled()


def test_accel_wraps_loading_and_gives_it_back():
    import mlx_lm.utils

    from backend_core.integrations import activate

    stock = mlx_lm.utils.load_model
    backends.switch_to("accel", ["race=off"])
    try:
        assert activate.enabled()
        assert mlx_lm.utils.load_model is not stock
    finally:
        backends.switch_to("mlx", [])
    assert mlx_lm.utils.load_model is stock
    assert not activate.enabled()
