"""Guard: a tree of modules that still is what it was, asked again and again."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")
import mlx.core as mx

from backend_core import native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.status().reason or "native")


@pytest.fixture
def tree():
    """A root with two layers, and the guard of all of it."""
    layers = [{"weight": mx.array([1.0, 2.0]), "scale": 3, "state": {"slot": object()}} for _ in range(2)]
    root = {"layers": layers, "norm": {"weight": mx.ones(2)}}
    links = [(None, "norm", root["norm"])]
    for layer in layers:
        links += [(layer, "state", layer["state"]), (layer["state"], "slot", layer["state"]["slot"])]
    arrays = [(native.get().Snapshot(part), part) for part in (*layers, root["norm"])]
    return root, native.get().Guard(links, arrays, [("layers", list(layers))])


def double_in_place(a):
    a *= 2


CHANGES = {
    "another object": lambda root: root["layers"][1]["state"].update(slot=object()),
    "another dict": lambda root: root["layers"][1].update(state=dict(root["layers"][1]["state"])),
    "another array": lambda root: root["layers"][0].update(weight=mx.array([1.0, 2.0])),
    "an array changed in place": lambda root: double_in_place(root["layers"][0]["weight"]),
    "no array": lambda root: root["layers"][0].pop("weight"),
    "one more entry": lambda root: root["layers"][0].update(bias=mx.zeros(2)),
    "another child of the root": lambda root: root.update(norm=dict(root["norm"])),
    "an array below the root": lambda root: root["norm"].update(weight=mx.zeros(2)),
    "layers in another order": lambda root: root["layers"].reverse(),
    "one layer less": lambda root: root["layers"].pop(),
    "another list": lambda root: root.update(layers=[dict(layer) for layer in root["layers"]]),
}


@pytest.mark.parametrize("asked", [0, 1, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen_however_often_it_was_asked(tree, name, asked) -> None:
    root, guard = tree
    assert all(guard.holds(root) for _ in range(asked))
    CHANGES[name](root)
    assert not guard.holds(root)
    assert not guard.holds(root)


def test_what_is_put_back_holds_again(tree) -> None:
    root, guard = tree
    layer = root["layers"][0]
    slot, weight = layer["state"]["slot"], layer["weight"]
    for _ in range(2):
        assert guard.holds(root)
        layer["state"]["slot"], layer["weight"] = None, mx.zeros(2)
        assert not guard.holds(root)
        layer["state"]["slot"], layer["weight"] = slot, weight
        assert guard.holds(root) and guard.holds(root)


def test_what_it_was_not_told_of_may_change(tree) -> None:
    root, guard = tree
    assert guard.holds(root)
    root["other"] = root["layers"][0]["state"]["count"] = 1
    assert guard.holds(root) and guard.holds(root)


def test_the_same_array_in_another_object(tree) -> None:
    """As what mx.compile puts back."""
    root, guard = tree
    layer = root["layers"][0]
    assert guard.holds(root)
    snapshot = native.get().Snapshot(layer)
    before = layer["weight"]
    layer["weight"] = None
    snapshot.put_back(layer)
    assert layer["weight"] is not before
    del before
    assert guard.holds(root) and guard.holds(root)
    double_in_place(layer["weight"])
    assert not guard.holds(root)


def test_another_root_with_the_same_children(tree) -> None:
    root, guard = tree
    assert guard.holds(root)
    assert guard.holds(dict(root))
    assert not guard.holds({**root, "norm": {}})
    assert guard.holds(root)
