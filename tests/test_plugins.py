"""The loader: a broken plugin is a record with name, version and traceback, never a crash."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import helpers
import pytest
import toys

from backend_core import LinearSite, Offer, OpSite, PluginError, PluginHost, Policy, hookimpl
from backend_core.plugins import HOOKS
from backend_core.sites import SITE_TYPES

SITE = LinearSite("model.layers.0.mlp.up_proj", n=8, k=32)
HEAD = "from backend_core import Offer, hookimpl\n"
GOOD = HEAD + "@hookimpl\ndef select_linear(site):\n    return Offer('ok', lambda module: module)\n"


def build(module):
    return module


def host(policy: Policy | None = None, **options: object) -> PluginHost:
    return PluginHost(policy, **{"devices": ("cpu",), "isa": ("portable",), **options})  # type: ignore[arg-type]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, text, toml=None): a distribution whose plugin `name` is the package toyplug_<name>."""
    before = set(sys.modules)

    def to_path(name, text=GOOD, toml=None, *, entry=None, dist=None, version="1.0"):
        module = "toyplug_" + name.replace("-", "_")
        files = {f"{module}/__init__.py": text}
        if toml is not None:
            files[f"{module}/mlx_accel.toml"] = toml
        site = helpers.distribution(tmp_path, dist or module, plugins={name: entry or module}, files=files,
                                    version=version)  # fmt: skip
        monkeypatch.syspath_prepend(str(site))
        return module

    yield to_path
    for module in set(sys.modules) - before:
        if module.startswith("toyplug_"):
            del sys.modules[module]


# Loading


def test_installed_plugins_are_invisible_to_tests():
    assert host().all_records() == []


def test_a_good_plugin_is_ready(install):
    install("good", version="2.5")
    [record] = host().all_records()
    assert (record.name, record.version, record.distribution) == ("good", "2.5", "toyplug_good")
    assert (record.state, record.reason, record.hooks, record.faults) == ("ready", "", ("select_linear",), [])
    assert record.why_not() == ""


def test_the_entry_may_be_an_object(install):
    text = "class P:\n    @hookimpl\n    def select_op(self, site):\n        return None\nplugin = P()\n"
    install("obj", HEAD + text, entry="toyplug_obj:plugin")
    assert host().records["obj"].hooks == ("select_op",)


BROKEN = {
    "no module": ("", "no_such_module_xyz", "loading: ModuleNotFoundError: No module named 'no_such"),
    "import error": ("import no_such_module_xyz", None, "loading: ModuleNotFoundError"),
    "syntax error": ("def", None, "loading: SyntaxError"),
    "exception": ("raise RuntimeError('boom')", None, "loading: RuntimeError: boom"),
    "exit": ("import sys; sys.exit(3)", None, "loading: SystemExit: 3"),
    "no attribute": (GOOD, "toyplug_bad:nothing", "loading: AttributeError"),
    "malformed entry": (GOOD, "toy plug:what", "loading: "),
    "None": ("plugin = None", "toyplug_bad:plugin", "loading: TypeError: toyplug_bad:plugin is None"),
    "typo in a hook": (HEAD + "@hookimpl\ndef select_linaer(site): 1", None, "unknown hook 'select_linaer'"),
    "unknown argument": (HEAD + "@hookimpl\ndef select_linear(sight): pass", None, "Argument(s) {'sight'}"),
    "wrapper": (HEAD + "@hookimpl(wrapper=True)\ndef select_linear(site):\n    return (yield)", None,
                "select_linear is a hook wrapper"),
    "old wrapper": (HEAD + "@hookimpl(hookwrapper=True)\ndef select_linear(site):\n    yield", None,
                    "select_linear is a hook wrapper"),
    "kernels raise": (HEAD + "@hookimpl\ndef register_kernels(registry): 1/0", None,
                      "register_kernels: ZeroDivisionError"),
    "kernels exit": (HEAD + "@hookimpl\ndef register_kernels(registry): raise SystemExit", None,
                     "register_kernels: SystemExit"),
    "kernel file missing": (HEAD + "@hookimpl\ndef register_kernels(registry):\n"
                            "    registry.cpu(name='a', library='/no/lib.so', symbol='f')", None,
                            "register_kernels: FileNotFoundError: kernel 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_plugin_is_a_record(install, what):
    text, entry, said = BROKEN[what]
    install("bad", text, entry=entry)
    install("good")
    both = host()
    record = both.records["bad"]
    assert record.state == "failed"
    assert said in record.reason and record.why_not() == record.reason
    assert (record.distribution, record.version) == ("toyplug_bad", "1.0")
    [fault] = record.faults
    assert fault.error and fault.error in record.reason
    assert fault.traceback.startswith(("Traceback", "  File")) and fault.error.split(":")[0] in fault.traceback
    # The other one is not touched, and the broken one stands in every site's refusals.
    offers, refusals = both.collect(SITE)
    assert [o.label for o in offers] == ["good/ok"]
    assert refusals == [("bad", record.reason)]
    assert [name for name, _ in both.collect(OpSite("x"))[1]] == ["bad"]


@pytest.mark.parametrize("what", BROKEN)
def test_strict_raises_with_name_and_cause(install, what):
    text, entry, said = BROKEN[what]
    install("bad", text, entry=entry)
    with pytest.raises(PluginError, match=r"^plugin 'bad': ") as info:
        host(Policy(strict=True))
    assert said.partition(": ")[2] in str(info.value)
    assert info.value.__cause__ is not None


@pytest.mark.parametrize("what", BROKEN)
def test_a_named_plugin_that_is_broken_is_an_error_that_quotes_the_cause(install, what):
    text, entry, said = BROKEN[what]
    install("bad", text, entry=entry)
    for plugins in ("+bad", "bad"):
        with pytest.raises(PluginError) as info:
            host(Policy(plugins=plugins))
        assert str(info.value).startswith("plugin 'bad' was asked for and cannot serve: ")
        assert said in str(info.value)


def test_a_failed_registration_leaves_no_hook_behind(install):
    # fuse_moe is fine and comes first; the plugin as a whole must still be out.
    text = HEAD + (
        "@hookimpl\ndef fuse_moe(site): return Offer('x', lambda m: m)\n"
        "@hookimpl\ndef select_linear(sight): return Offer('x', lambda m: m)\n"
        "@hookimpl\ndef select_opp(site): return Offer('x', lambda m: m)\n"
    )
    install("bad", text)
    both = host()
    assert not any(both.implements(hook) for hook in HOOKS)
    assert both.collect(SITE_TYPES["fuse_moe"]("moe"))[0] == []


def test_failed_kernels_take_the_hooks_with_them(install):
    install("bad", GOOD + "@hookimpl\ndef register_kernels(registry): 1/0\n")
    bad = host()
    assert bad.collect(SITE)[0] == []
    assert not bad.implements("select_linear")


def test_keyboard_interrupt_is_not_swallowed(install):
    install("bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        host()


def test_unknown_hooks_may_be_marked_optional(install):
    install("future", GOOD + "@hookimpl(optionalhook=True)\ndef select_quantum(site): pass\n")
    record = host().records["future"]
    assert (record.state, record.hooks) == ("ready", ("select_linear",))


def test_names_are_the_same_with_dashes_and_underscores(install):
    install("my-plug")
    assert list(host(Policy(plugins="+my-plug")).records) == ["my_plug"]
    assert host(Policy(plugins="-my_plug")).records["my_plug"].state == "off"


def test_a_name_taken_twice_is_reported(install):
    install("twin", dist="aaa_first")
    install("twin", entry="toyplug_twin", dist="zzz_second")
    records = host().all_records()
    assert [r.state for r in records] == ["ready", "failed"]
    assert {r.distribution for r in records} == {"aaa_first", "zzz_second"}
    assert records[1].reason == f"the name 'twin' is already taken by {records[0].distribution}"


# Policy and manifest


def test_a_plugin_turned_off_is_not_imported(install):
    module = install("good", "raise RuntimeError('imported')", "hooks = ['select_linear']")
    record = host(Policy(plugins="-good")).records["good"]
    assert (record.state, record.reason) == ("off", "turned off by the plugins option")
    assert module not in sys.modules and record.faults == []


def test_plugins_that_are_not_named_are_off(install):
    install("one")
    install("two")
    assert {n: r.state for n, r in host(Policy(plugins="two")).records.items()} == {
        "one": "off",
        "two": "ready",
    }
    assert {r.state for r in host(Policy(plugins="none")).all_records()} == {"off"}


@pytest.mark.parametrize(
    "toml,said",
    [
        ("[requires]\ndevices = ['metal']", "needs one of the devices metal; here: cpu"),
        ("[requires]\nmlx = '<0.1'", "needs mlx<0.1"),
        ("[requires]\n'no-such-dist-xyz' = '>=1'", "not installed"),
        ("[requires]\nisa = ['neon']", "needs one of the instruction sets neon; here: portable"),
        ("api = 99", "needs plugin API 99"),
    ],
)
def test_unmet_requirements_are_found_before_the_import(install, toml, said):
    module = install("needy", "raise RuntimeError('imported')", "hooks = ['select_linear']\n" + toml)
    needy = host()
    record = needy.records["needy"]
    assert record.state == "unmet" and said in record.reason
    assert module not in sys.modules
    assert needy.collect(SITE)[1] == [("needy", record.reason)]
    with pytest.raises(PluginError, match="asked for and cannot serve: needs"):
        host(Policy(plugins="+needy"))
    # Not fitting this machine is no fault.
    assert host(Policy(strict=True)).records["needy"].state == "unmet"


def test_a_bad_manifest_is_a_fault_of_that_plugin(install):
    module = install("bad", GOOD, "apj = 1")
    record = host().records["bad"]
    assert record.state == "failed" and "unknown keys ['apj']" in record.reason
    assert module not in sys.modules


def test_a_named_plugin_that_is_not_installed_lists_those_that_are(install):
    with pytest.raises(PluginError, match=r"^plugin 'ghost' is not installed \(installed: none\)$"):
        host(Policy(plugins="+ghost"))
    install("one")
    install("two")
    with pytest.raises(PluginError, match=r"'ghost' is not installed \(installed: one, two\)"):
        host(Policy(plugins="one,ghost"))


def test_named_and_turned_off_at_once_is_an_error(install):
    install("good")
    with pytest.raises(PluginError, match="'good' was asked for and cannot serve: turned off"):
        host(Policy(plugins="+good,-good"))


# Kernels


def test_kernels_are_listed_and_hashed(install, tmp_path):
    kernel = tmp_path / "k.metal"
    kernel.write_text("one")
    text = GOOD + (
        "@hookimpl\ndef register_kernels(registry):\n"
        f"    registry.source(name='k', device='metal', path={str(kernel)!r}, exactness='bitwise')\n"
    )
    install("kern", text)
    record = host().records["kern"]
    assert record.hooks == ("register_kernels", "select_linear")
    facts = json.loads(json.dumps(record.as_dict()))
    assert facts["kernels"] == [{"name": "k", "device": "metal", "exactness": "bitwise", "file": str(kernel)}]
    before = record.content_hash
    assert host().records["kern"].content_hash == before
    kernel.write_text("two")
    assert host().records["kern"].content_hash != before


def test_each_plugin_announces_into_a_registry_of_its_own(tmp_path):
    kernel = tmp_path / "k.metal"
    kernel.write_text("text")
    seen = []

    def announces(name):
        def register_kernels(registry):
            seen.append((name, registry.plugin))
            registry.source(name=name, device="metal", path=kernel)

        return toys.module_with(register_kernels=register_kernels)

    own = toys.host(one=announces("a"), two=announces("b"))
    assert seen == [("a", "one"), ("b", "two")]
    assert {n: [k.name for k in r.kernels] for n, r in own.records.items()} == {"one": ["a"], "two": ["b"]}


def test_records_are_json_able_with_traceback(install):
    install("bad", "raise RuntimeError('boom')")
    [facts] = json.loads(json.dumps([r.as_dict() for r in host().all_records()]))
    assert facts["state"] == "failed" and facts["distribution"] == "toyplug_bad"
    [fault] = facts["faults"]
    assert fault["where"] == "loading" and "raise RuntimeError('boom')" in fault["traceback"]


# Registering objects


def test_registered_objects_serve():
    own = toys.host(one=toys.module_with(select_linear=lambda site: Offer("a", build)))
    assert [o.label for o in own.collect(SITE)[0]] == ["one/a"]
    assert own.records["one"].hooks == ("select_linear",)


def test_registering_obeys_policy_and_refuses_a_second_of_the_name():
    own = toys.host(Policy(plugins="-one"))
    assert own.register(toys.module_with(select_linear=lambda site: None), "one").state == "off"
    with pytest.raises(PluginError, match="already registered"):
        own.register(toys.module_with(), "one")


def test_one_object_under_two_names_fails_only_the_second_time():
    plugin = toys.module_with(select_linear=lambda site: Offer("a", build))
    own = toys.host(one=plugin)
    assert own.register(plugin, "two").state == "failed"
    assert [o.label for o in own.collect(SITE)[0]] == ["one/a"]


def test_a_class_instead_of_an_instance_is_a_fault_of_the_call_only():
    class Plugin:
        @hookimpl
        def select_linear(self, site):
            return Offer("a", build)

    own = toys.host(cls=Plugin, good=toys.module_with(select_linear=lambda site: Offer("a", build)))
    assert "good/a" in [o.label for o in own.collect(SITE)[0]]


# Asking


def toy(function, hook="select_linear"):
    return toys.module_with(**{hook: function})


def raising(error):
    def hook(site):
        raise error

    return hook


@pytest.mark.parametrize(
    "function,said",
    [
        (raising(KeyError("x")), "KeyError: 'x'"),
        (raising(SystemExit(1)), "SystemExit: 1"),
        (
            lambda site: "offer",
            "TypeError: select_linear must return None, an Offer or a list of offers, not str",
        ),
        (lambda site: [None], "not NoneType"),
        (lambda site: [Offer("a", build), Offer("a", build)], "ValueError: two offers with one name"),
        (lambda site: Offer("a", build, rows=(3, 1)), "ValueError: Offer 'a'"),
        (lambda site: Offer("", build), "TypeError: Offer.name"),
        (lambda site: site.no_such_fact, "AttributeError"),
    ],
)
def test_a_fault_in_a_hook_costs_only_that_answer(function, said):
    own = toys.host(bad=toy(function), good=toy(lambda site: Offer("a", build)))
    offers, refusals = own.collect(SITE)
    assert [o.label for o in offers] == ["good/a"]
    [(name, reason)] = refusals
    assert name == "bad" and said in reason
    [fault] = own.records["bad"].faults
    assert fault.where == f"select_linear({SITE.path})" and said in fault.error and "Traceback" in fault.traceback
    assert own.records["bad"].state == "ready" and own.records["bad"].why_not() == fault.error

    strict = toys.host(Policy(strict=True), bad=toy(function))
    with pytest.raises(PluginError, match=r"^plugin 'bad': select_linear"):
        strict.collect(SITE)


def test_interrupts_pass_through():
    with pytest.raises(KeyboardInterrupt):
        toys.host(bad=toy(raising(KeyboardInterrupt()))).collect(SITE)


def test_declining_is_recorded():
    own = toys.host(a=toy(lambda site: None), b=toy(lambda site: []), c=toy(lambda site: None, "select_op"))
    offers, refusals = own.collect(SITE)
    assert offers == []
    assert sorted(refusals) == [("a", "made no offer"), ("b", "made no offer")]


def test_all_offers_of_all_plugins_are_collected():
    own = toys.host(
        one=toy(lambda site: [Offer("a", build), Offer("b", build)]), two=toy(lambda site: Offer("a", build))
    )
    assert sorted(o.label for o in own.collect(SITE)[0]) == ["one/a", "one/b", "two/a"]


def test_a_hook_may_leave_the_argument_out():
    def select_linear():
        return Offer("a", build)

    assert [o.name for o in toys.host(one=toys.module_with(select_linear=select_linear)).collect(SITE)[0]] == ["a"]


@pytest.mark.parametrize("hook", sorted(SITE_TYPES))
def test_every_hook_has_a_collection_path(hook):
    seen = []

    def implementation(site):
        seen.append(site)
        return Offer("toy", build)

    own = toys.host(one=toy(implementation, hook))
    site = SITE_TYPES[hook]("somewhere")
    assert own.implements(hook)
    assert [h for h in SITE_TYPES if own.implements(h)] == [hook]
    [offer], refusals = own.collect(site)
    assert offer.label == "one/toy" and refusals == [] and seen == [site]


def test_hooks_are_asked_once_per_site_in_any_order_of_faults():
    calls = []
    own = toys.host(
        a=toy(lambda site: calls.append("a")),
        b=toy(raising(ValueError())),
        c=toy(lambda site: calls.append("c")),
    )
    own.collect(SITE)
    assert sorted(calls) == ["a", "c"]


def test_the_marked_installed_plugins_are_visible(installed_plugins):
    have = importlib.metadata.entry_points(group="mlx_accel.plugins")
    assert set(host().records) == {e.name.replace("-", "_") for e in have}
