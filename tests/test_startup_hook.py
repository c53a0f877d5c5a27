"""The start-up hook: idle until a host is imported, and harmless when anything is broken."""

from __future__ import annotations

import importlib.util
import sys
import types

import helpers
import pytest

HEAD = "import sys, _mlx_accel_boot as boot\nboot.install()\n"
#: A stand-in for mlx_lm, so that these tests do not wait for the real one.
FAKE = {
    "mlx_lm/__init__.py": "import sys\nvalue = 42\nsys.log = getattr(sys, 'log', []) + ['body']\n",
    "mlx_lm/utils.py": "def load_model(): return 'stock'\n",
    "mlx_vlm/__init__.py": "value = 43\n",
}
#: A backend_core whose steps only leave a trace.
TRACE = {
    "backend_core/__init__.py": "",
    "backend_core/integrations/__init__.py": "",
    "backend_core/integrations/startup.py": (
        "import sys\n"
        "def before_import(host): sys.log = getattr(sys, 'log', []) + ['before ' + host]\n"
        "def after_import(host): sys.log = getattr(sys, 'log', []) + ['after ' + host]\n"
    ),
}


def run(tmp_path, code, files=(), env=None, head=HEAD):
    site = tmp_path / "site"
    for path, text in {**FAKE, **dict(files)}.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    # -S: no site-packages, so only what stands here can be imported.
    return helpers.python("-S", "-c", head + code, path=(helpers.STARTUP, site), env=env)


def test_steps_surround_the_hosts_own_code(tmp_path):
    out = run(tmp_path, "import mlx_lm.utils, mlx_vlm; print(mlx_lm.value, sys.log)", TRACE)
    assert out.stdout.strip() == ("42 ['before mlx_lm', 'body', 'after mlx_lm', 'before mlx_vlm', 'after mlx_vlm']")
    assert out.stderr == ""


def test_other_packages_are_left_alone(tmp_path):
    code = (
        "import json, xml.dom\nprint(getattr(sys, 'log', None), boot.active(), "
        "[m for m in sys.modules if m.startswith(('backend_core', 'mlx'))])"
    )
    assert run(tmp_path, code, TRACE).stdout.strip() == "None True []"


def test_the_kill_switch_and_its_absence(tmp_path):
    code = "import mlx_lm; print(boot.active(), getattr(sys, 'log', None))"
    for value in ("1", "yes"):
        out = run(tmp_path, code, TRACE, env={"MLX_ACCEL_NO_HOOK": value})
        assert out.stdout.strip() == "False ['body']"
    for value in ("", "0"):
        out = run(tmp_path, code, TRACE, env={"MLX_ACCEL_NO_HOOK": value})
        assert out.stdout.strip() == "True ['before mlx_lm', 'body', 'after mlx_lm']"


def test_installing_twice_is_installing_once(tmp_path):
    code = "boot.install(); print(sum(type(f).__name__ == 'HostFinder' for f in sys.meta_path))"
    assert run(tmp_path, code).stdout.strip() == "1"


BROKEN = {
    "absent": {},
    "import error": {"backend_core/__init__.py": "raise ImportError('half an upgrade')"},
    "syntax error": {"backend_core/__init__.py": "", "backend_core/integrations/__init__.py": "def"},
    "no startup": {"backend_core/__init__.py": "", "backend_core/integrations/__init__.py": ""},
    "no step": {**TRACE, "backend_core/integrations/startup.py": ""},
    "step raises": {
        **TRACE,
        "backend_core/integrations/startup.py": "def before_import(h): 1/0\ndef after_import(h): 1/0\n",
    },
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_installation_leaves_the_host_importable_and_says_so(tmp_path, what):
    out = run(tmp_path, "import mlx_lm.utils; print(mlx_lm.value, mlx_lm.utils.load_model())", BROKEN[what])
    assert out.stdout.strip() == "42 stock", out.stderr
    assert out.returncode == 0
    assert "[accel] start-up hook is inactive: " in out.stderr
    assert "Traceback" not in out.stderr
    # One line per fault, not one per step.
    assert len(out.stderr.splitlines()) == len(set(out.stderr.splitlines()))


def test_without_stderr_a_fault_is_still_harmless(tmp_path):
    out = run(tmp_path, "sys.stderr = None\nimport mlx_lm; print(mlx_lm.value)")
    assert (out.stdout.strip(), out.returncode) == ("42", 0)


def test_a_host_that_fails_by_itself_fails_as_before(tmp_path):
    code = "try: import mlx_lm\nexcept ValueError as e: print('own', e, sys.log, 'mlx_lm' in sys.modules)"
    out = run(tmp_path, code, {**TRACE, "mlx_lm/__init__.py": "raise ValueError('x')"})
    assert out.stdout.strip() == "own x ['before mlx_lm'] False"


def test_a_host_that_is_not_installed_is_missing_as_before(tmp_path):
    # The directory without __init__ is a namespace package: it has no code to run before or after.
    site = tmp_path / "empty"
    site.mkdir()
    code = "try: import mlx_lm\nexcept ModuleNotFoundError as e: print(e.name)"
    out = helpers.python("-S", "-c", HEAD + code, path=(helpers.STARTUP, site))
    assert out.stdout.strip() == "mlx_lm"


def test_reload_and_find_spec_work(tmp_path):
    code = (
        "import importlib, importlib.util, inspect\n"
        "spec = importlib.util.find_spec('mlx_lm'); print(spec.name, 'mlx_lm' in sys.modules)\n"
        "import mlx_lm; importlib.reload(mlx_lm)\n"
        "print(sys.log.count('body'), mlx_lm.__spec__.origin == mlx_lm.__file__, "
        "'value = 42' in inspect.getsource(mlx_lm), type(mlx_lm.__loader__).__name__)"
    )
    assert run(tmp_path, code, TRACE).stdout.splitlines() == [
        "mlx_lm False",
        "2 True True SourceFileLoader",
    ]


def test_the_finder_asks_the_finders_around_it(monkeypatch):
    spec_of_boot = importlib.util.spec_from_file_location("boot_copy", helpers.STARTUP / "_mlx_accel_boot.py")
    boot = importlib.util.module_from_spec(spec_of_boot)
    spec_of_boot.loader.exec_module(boot)
    finder = boot.HostFinder()

    class Fixed:
        """A loader whose attributes cannot be set."""

        __slots__ = ()

        def exec_module(self, module):
            pass

    spec = types.SimpleNamespace(loader=Fixed())
    asked = []
    other = types.SimpleNamespace(find_spec=lambda name, path, target: asked.append(name) or spec)
    monkeypatch.setattr(sys, "meta_path", [object(), finder, boot.HostFinder(), other])
    assert finder.find_spec("mlx_lm") is spec
    assert asked == ["mlx_lm"]
    assert sys.meta_path[1] is finder and len(sys.meta_path) == 4
    assert finder.find_spec("mlx_lm", path=["x"]) is None
    assert finder.find_spec("mlx") is None
    assert asked == ["mlx_lm"]
    spec.loader = None  # a namespace package
    assert finder.find_spec("mlx_vlm") is spec


def test_start_files_call_what_exists():
    pth = (helpers.STARTUP / "mlx_accel.pth").read_text()
    assert pth.startswith("import ") and len(pth.splitlines()) == 1  # site runs single import lines only
    scope: dict[str, object] = {}
    calls = []
    boot = types.ModuleType("_mlx_accel_boot")
    boot.install = lambda: calls.append(1)  # type: ignore[attr-defined]
    saved = sys.modules.get("_mlx_accel_boot")
    sys.modules["_mlx_accel_boot"] = boot
    try:
        exec(pth, scope)
    finally:
        if saved is not None:
            sys.modules["_mlx_accel_boot"] = saved
        else:
            del sys.modules["_mlx_accel_boot"]
    assert calls == [1]
    assert (helpers.STARTUP / "mlx_accel.start").read_text().strip() == "_mlx_accel_boot:install"


def test_an_interpreter_of_this_environment_imports_nothing_by_itself():
    code = (
        "import sys; b = sys.modules.get('_mlx_accel_boot')\n"
        "print(b is not None and b.active(), "
        "[m for m in sys.modules if m.partition('.')[0] in ('mlx', 'mlx_lm', 'backend_core', 'numpy')])"
    )
    out = helpers.python("-c", code, path=(helpers.STARTUP,))
    assert out.stdout.strip() == "True []", out.stderr
