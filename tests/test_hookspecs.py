"""The hook interface: complete, documented, and cheap to import."""

from __future__ import annotations

import inspect

import helpers
import pluggy
import pytest

import backend_core
from backend_core import hookspecs, plugins
from backend_core.sites import SITE_TYPES


def specs() -> dict[str, object]:
    return {n: f for n, f in vars(hookspecs).items() if hasattr(f, f"{hookspecs.PROJECT}_spec")}


def test_one_specification_per_site_type_and_the_registry():
    assert set(specs()) == {"register_kernels", *SITE_TYPES} == set(plugins.HOOKS)


@pytest.mark.parametrize("name", sorted(plugins.HOOKS))
def test_each_takes_documented_arguments(name):
    function = specs()[name]
    want = ["registry"] if name == "register_kernels" else ["site", "policy"]
    assert list(inspect.signature(function).parameters) == want
    assert len(inspect.getdoc(function) or "") > 150


@pytest.mark.parametrize("name", sorted(SITE_TYPES))
def test_annotations_name_the_right_site(name):
    assert specs()[name].__annotations__["site"] == SITE_TYPES[name].__name__
    assert "build" in specs()[name].__doc__


def test_the_exported_marker_belongs_to_the_project():
    assert backend_core.hookimpl is hookspecs.hookimpl

    @backend_core.hookimpl
    def select_linear(site):
        return None

    manager = pluggy.PluginManager("mlx_accel")
    manager.add_hookspecs(hookspecs)
    holder = type("Plugin", (), {"select_linear": staticmethod(select_linear)})()
    manager.register(holder)
    assert [i.plugin for i in manager.hook.select_linear.get_hookimpls()] == [holder]


def test_importing_what_a_plugin_needs_loads_neither_mlx_nor_numpy():
    code = (
        "import sys; from backend_core import hookimpl, Offer, LinearSite, Policy, PluginHost\n"
        "print([m for m in ('mlx', 'numpy', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    assert helpers.python("-c", code).stdout.strip() == "[]"
