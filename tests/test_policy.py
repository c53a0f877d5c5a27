"""Policy: the same keys from Python, options and environment; nonsense is refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_core import AccelError, Policy, PolicyError

CHOICES = {
    "allow": ["", "lossy"],
    "race": ["on", "off", "force"],
    "activations": ["auto", "model", "float32"],
    "report": ["short", "full", "json", "none"],
}


def test_defaults_are_the_safe_ones():
    policy = Policy()
    assert policy.as_dict() == {
        "plugins": "", "allow": "", "race": "on", "deterministic": False, "activations": "auto",
        "strict": False, "report": "short",
    }  # fmt: skip
    assert not policy.allow_lossy
    assert policy.named_plugins == ()
    assert policy.admits_plugin("anything")
    assert Policy.from_options([], env={}) == policy


def test_is_frozen_hashable_and_json_able():
    policy = Policy(plugins="+a", strict=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.race = "off"  # type: ignore[misc]
    assert hash(policy) == hash(Policy(plugins="+a", strict=True))
    assert json.loads(json.dumps(policy.as_dict()))["plugins"] == "+a"
    assert Policy.keys() == tuple(policy.as_dict())


@pytest.mark.parametrize("key,value", [(k, v) for k, values in CHOICES.items() for v in values])
def test_every_documented_choice_is_accepted(key, value):
    assert getattr(Policy(**{key: value}), key) == value
    assert getattr(Policy.from_options([f"{key}={value}"], env={}), key) == value


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_other_choices_are_refused_with_the_possible_ones(key):
    for wrong in ("maybe", "ON", None, 3):
        with pytest.raises(PolicyError) as info:
            Policy(**{key: wrong})
        for value in filter(None, CHOICES[key]):
            assert repr(value) in str(info.value)
        assert repr(wrong) in str(info.value) and key in str(info.value)


def test_policy_errors_are_accel_errors_and_value_errors():
    with pytest.raises(AccelError):
        Policy(race="never")
    with pytest.raises(ValueError):
        Policy(race="never")


@pytest.mark.parametrize("key", ["deterministic", "strict"])
@pytest.mark.parametrize(
    "value,want",
    [(True, True), (1, True), ("1", True), ("TRUE", True), (" yes ", True), ("on", True),
     (False, False), (0, False), ("0", False), ("False", False), ("no", False), ("off", False), ("", False)],
)  # fmt: skip
def test_booleans(key, value, want):
    assert getattr(Policy(**{key: value}), key) is want


@pytest.mark.parametrize("value", ["2", "y", "maybe", None, 2, "10"])
def test_other_booleans_are_refused(value):
    with pytest.raises(PolicyError, match=r"strict=.*use 1 or 0"):
        Policy(strict=value)


@pytest.mark.parametrize(
    "plugins,named,admitted,refused",
    [
        ("", (), ["a", "b"], []),
        (" , ,", (), ["a", "b"], []),
        ("+a", ("a",), ["a", "b"], []),
        ("-a", (), ["b"], ["a"]),
        ("+a,-b", ("a",), ["a", "c"], ["b"]),
        ("a", ("a",), ["a"], ["b"]),
        ("a, +b", ("a", "b"), ["a", "b"], ["c"]),
        ("none", (), [], ["a", "b"]),
        ("none,+a", ("a",), ["a"], ["b"]),
        ("+bonsai-qmv", ("bonsai_qmv",), ["bonsai_qmv", "bonsai-qmv"], []),
        ("-bonsai_qmv", (), ["a"], ["bonsai_qmv", "bonsai-qmv"]),
        ("+a,-a", ("a",), ["b"], ["a"]),
    ],
)
def test_plugin_words(plugins, named, admitted, refused):
    policy = Policy(plugins=plugins)
    assert policy.named_plugins == named
    assert [policy.admits_plugin(p) for p in admitted] == [True] * len(admitted)
    assert [policy.admits_plugin(p) for p in refused] == [False] * len(refused)


@pytest.mark.parametrize("plugins", ["+", "-", "a,+", "a, - ,b"])
def test_a_sign_needs_a_name(plugins):
    with pytest.raises(PolicyError, match="without a plugin name"):
        Policy(plugins=plugins)


@pytest.mark.parametrize("plugins", [None, ["a"], 1])
def test_plugins_must_be_text(plugins):
    with pytest.raises(PolicyError, match="one string"):
        Policy(plugins=plugins)


def test_options_win_over_environment_which_wins_over_defaults():
    env = {"MLX_ACCEL_RACE": "off", "MLX_ACCEL_STRICT": "1", "MLX_ACCEL_REPORT": "", "MLX_ACCEL_ALLOW": " "}
    policy = Policy.from_options(["race=force"], env=env)
    assert (policy.race, policy.strict, policy.report, policy.allow) == ("force", True, "short", "")
    assert Policy.from_options([], env=env).race == "off"


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("MLX_ACCEL_ACTIVATIONS", " float32 ")
    assert Policy.from_options().activations == "float32"
    assert Policy.from_options([], env={}).activations == "auto"


def test_foreign_environment_variables_are_left_alone():
    assert Policy.from_options([], env={"MLX_ACCEL_CACHE": "/x", "MLX_ACCEL_BACKEND": "accel"}) == Policy()


def test_a_wrong_environment_value_is_an_error():
    with pytest.raises(PolicyError, match="race='perhaps'"):
        Policy.from_options([], env={"MLX_ACCEL_RACE": "perhaps"})


def test_plugins_add_up_and_the_last_of_the_others_counts():
    policy = Policy.from_options(["plugins=+a", "race=off", "plugins=-b", "race=on"], env={"MLX_ACCEL_PLUGINS": "c"})
    assert policy.plugins == "+a,-b"
    assert policy.race == "on"


def test_values_may_hold_blanks_and_equal_signs():
    assert Policy.from_options([" race = off "], env={}).race == "off"
    with pytest.raises(PolicyError, match="race='=off'"):
        Policy.from_options(["race==off"], env={})


def test_unknown_options_list_all_and_hint_at_the_nearest():
    with pytest.raises(PolicyError) as info:
        Policy.from_options(["determinstic=1"], env={})
    text = str(info.value)
    assert "'determinstic'" in text and "Did you mean 'deterministic'?" in text
    assert all(key in text for key in Policy.keys())  # noqa: SIM118
    with pytest.raises(PolicyError) as info:
        Policy.from_options(["zzzz=1"], env={})
    assert "Did you mean" not in str(info.value)


@pytest.mark.parametrize("option", ["strict", "race", ""])
def test_an_option_without_value_is_refused(option):
    with pytest.raises(PolicyError, match="needs a value" if option else "unknown option ''"):
        Policy.from_options([option], env={})


policies = st.builds(
    Policy,
    plugins=st.lists(st.from_regex(r"[+-]?[a-z]{1,4}", fullmatch=True), max_size=4).map(",".join),
    strict=st.booleans(),
    deterministic=st.booleans(),
    **{k: st.sampled_from(v) for k, v in CHOICES.items()},
)


@given(policies)
def test_options_environment_and_python_mean_the_same(policy):
    words = {k: str(v) for k, v in policy.as_dict().items()}
    assert Policy.from_options([f"{k}={v}" for k, v in words.items()], env={}) == policy
    assert Policy.from_options([], env={f"MLX_ACCEL_{k.upper()}": v for k, v in words.items()}) == policy


@given(policies, st.from_regex(r"[a-z]{1,4}", fullmatch=True))
def test_off_beats_everything_and_named_plugins_are_admitted_otherwise(policy, name):
    off = Policy(plugins=f"{policy.plugins},-{name}")
    assert not off.admits_plugin(name)
    for named in policy.named_plugins:
        assert policy.admits_plugin(named) or f"-{named}" in policy.plugins.split(",")


@given(st.text(), st.text())
def test_any_text_is_a_policy_or_a_policy_error(key, value):
    for options in ([f"{key}={value}"], [f"plugins={value}"], [f"race={value}"], [f"strict={value}"]):
        try:
            policy = Policy.from_options(options, env={})
        except PolicyError:
            continue
        policy.admits_plugin("x")
        assert "" not in policy.named_plugins
