"""Policy options that plugins bring in mlx_accel.toml."""

from __future__ import annotations

import pytest
from helpers import distribution

from backend_core import PluginHost, Policy, PolicyError, hookimpl
from backend_core.manifest import installed_options
from backend_core.policy import strange_variables
from backend_core.sites import LinearSite

TOML = '[options]\nsqueeze = ["auto", "hard", "soft"]\n'


@pytest.fixture
def squeeze(tmp_path, monkeypatch):
    """A plugin with an option is installed."""
    files = {"squeezer/mlx_accel.toml": TOML, "squeezer/__init__.py": "raise ImportError('never imported')"}
    folder = distribution(tmp_path, "squeezer", plugins={"squeezer": "squeezer"}, files=files)
    monkeypatch.syspath_prepend(str(folder))


def test_without_such_a_plugin_the_option_is_unknown():
    with pytest.raises(PolicyError, match="unknown option 'squeeze'"):
        Policy.from_options(["squeeze=hard"], env={})
    with pytest.raises(PolicyError, match="no installed plugin has it"):
        Policy(plugin_options=(("squeeze", "hard"),))
    assert Policy().option("squeeze") == "" and installed_options() == {}


def test_all_ways_to_give_it_mean_the_same(squeeze):
    assert installed_options() == {"squeeze": ("auto", "hard", "soft")}
    given = Policy.from_options(["squeeze=hard", "race=off"], env={})
    assert given == Policy.from_options(["race=off"], env={"MLX_ACCEL_SQUEEZE": "hard"})
    assert given == Policy(race="off", plugin_options=(("squeeze", "hard"),))
    assert given.option("squeeze") == "hard" and given.as_dict()["squeeze"] == "hard"
    assert Policy.from_options(["squeeze=soft"], env={"MLX_ACCEL_SQUEEZE": "hard"}).option("squeeze") == "soft"
    assert hash(given) and given != Policy(race="off")


def test_the_first_value_is_the_default(squeeze):
    policy = Policy.from_options([], env={})
    assert policy == Policy() and policy.option("squeeze") == "auto"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("squeeze=never", "squeeze='never': not one of 'auto', 'hard', 'soft'"),
        ("squeeze", "needs a value: squeeze=VALUE"),
        ("squeze=hard", "unknown option 'squeze' .*squeeze.*Did you mean 'squeeze'"),
    ],
)
def test_mistakes_are_named(squeeze, option, message):
    with pytest.raises(PolicyError, match=message):
        Policy.from_options([option], env={})


def test_the_variable_is_known(squeeze):
    assert strange_variables({"MLX_ACCEL_SQUEEZE": "hard"}) == []
    assert "MLX_ACCEL_SQUEEZED is not known" in strange_variables({"MLX_ACCEL_SQUEEZED": "hard"})[0]


@pytest.mark.parametrize(
    "text", ["options = 3", "[options]\nx = []", "[options]\nx = [1]", "[options]\n'a b' = ['x']"]
)
def test_unusable_options_are_named_where_the_plugin_is_loaded(tmp_path, monkeypatch, text):
    files = {"squeezer/mlx_accel.toml": text, "squeezer/__init__.py": ""}
    folder = distribution(tmp_path, "squeezer", plugins={"squeezer": "squeezer"}, files=files)
    monkeypatch.syspath_prepend(str(folder))
    assert installed_options() == {}
    [record] = PluginHost(Policy(), devices=("cpu",)).all_records()
    assert record.state == "failed" and "options" in record.reason


def test_hooks_get_the_policy_if_they_ask_for_it(squeeze):
    seen = []

    class Plugin:
        @hookimpl
        def select_linear(self, site, policy):
            seen.append((site.path, policy.option("squeeze")))

    host = PluginHost(Policy(plugin_options=(("squeeze", "soft"),)), devices=("cpu",), entry_points=[])
    host.register(Plugin(), "asks")
    host.collect(LinearSite(path="a"))
    assert seen == [("a", "soft")]
