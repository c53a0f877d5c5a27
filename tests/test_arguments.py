"""--backend on the real commands of mlx-lm and mlx-vlm, in every form they are started."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

BIN = Path(sys.executable).parent
LM_COMMANDS = ["awq", "benchmark", "cache_prompt", "chat", "convert", "dwq", "dynamic_quant", "evaluate", "fuse",
               "generate", "gptq", "lora", "manage", "perplexity", "server", "share", "upload"]  # fmt: skip
HAS_VLM = importlib.util.find_spec("mlx_vlm") is not None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", bits=4)
    return tiny_models.save(model, "llama", tmp_path_factory.mktemp("model"), bits=4)


def run(command: list[str], cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_ACCEL_")}
    # One plugin, so that the number of sites in the report is known.
    environment.update(MLX_ACCEL_CACHE=str(cache), MLX_ACCEL_PLUGINS="bonsai_qmv", HF_HUB_OFFLINE="1", COLUMNS="100")
    environment.update(env)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def script(name: str) -> str:
    found = shutil.which(name, path=str(BIN))
    if found is None:
        pytest.skip(f"the console script {name} is not installed here")
    return found


def forms(module: str, command: str) -> dict[str, list[str]]:
    return {
        "script": [script(f"{module}.{command}")],
        "-m package command": [sys.executable, "-m", module, command],
        "-m package.command": [sys.executable, "-m", f"{module}.{command}"],
        "package command": [script(module), command],
    }


GENERATE = ["--prompt", "hello", "--max-tokens", "8", "--temp", "0", "--ignore-chat-template"]


@pytest.mark.parametrize("form", ["script", "-m package command", "-m package.command", "package command"])
def test_generate_in_every_form_prints_the_same_text(form, model_dir, tmp_path) -> None:
    command = [*forms("mlx_lm", "generate")[form], "--model", str(model_dir), *GENERATE]
    stock = run([*command, "--backend", "mlx"], tmp_path)
    accel = run([*command, "--backend", "accel"], tmp_path)
    assert stock.returncode == accel.returncode == 0, stock.stderr + accel.stderr
    assert accel.stdout.split("==========")[1] == stock.stdout.split("==========")[1]
    assert "[accel]" not in stock.stderr
    [line] = [x for x in accel.stderr.splitlines() if x.startswith("[accel] ")]
    assert line.startswith("[accel] 15 sites: ")


def test_all_lm_commands_show_the_option_in_their_help(tmp_path) -> None:
    """One process for all of them: every command's parser is built by its own main()."""
    code = """
import contextlib, importlib, io, sys
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(f"mlx_lm.{name}")
    except ModuleNotFoundError:
        try:
            module = importlib.import_module(f"mlx_lm.quant.{name}")
        except ImportError as error:
            print(name, "SKIP", error); continue
    out = io.StringIO()
    sys.argv = [name, "-h"]
    try:
        with contextlib.redirect_stdout(out):
            module.main()
    except SystemExit as error:
        print(name, "OK" if "--backend NAME" in out.getvalue() and "--backend-option" in out.getvalue() and
              error.code == 0 else "MISSING")
"""
    result = run([sys.executable, "-c", code, *LM_COMMANDS], tmp_path)
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    # -c code is not a host; the parsers are, since the code that parses lies in mlx_lm.
    missing = {n: lines.get(n, result.stderr[-500:]) for n in LM_COMMANDS
               if not lines.get(n, "").startswith(("OK", "SKIP"))}  # fmt: skip
    assert not missing, missing
    assert sum(v == "OK" for v in lines.values()) >= 12, lines


@pytest.mark.vlm
@pytest.mark.skipif(not HAS_VLM, reason="mlx-vlm is not installed")
@pytest.mark.parametrize("command", ["generate", "server"])
def test_vlm_commands_show_the_option(command, tmp_path) -> None:
    for form in ([sys.executable, "-m", f"mlx_vlm.{command}"], [script(f"mlx_vlm.{command}")]):
        result = run([*form, "-h"], tmp_path)
        assert result.returncode == 0, result.stderr
        assert "--backend NAME" in result.stdout and "--backend-option KEY=VALUE" in result.stdout


def test_unknown_backend_lists_the_names(model_dir, tmp_path) -> None:
    result = run([sys.executable, "-m", "mlx_lm", "generate", "--model", str(model_dir), "--backend", "acel"], tmp_path)
    assert result.returncode == 2
    assert "argument --backend: unknown backend 'acel' (available: accel, mlx)" in result.stderr


BAD_OPTIONS = [
    (["--backend", "accel", "--backend-option", "speed=1"], "unknown option 'speed' (options: plugins, allow,"),
    (["--backend", "accel", "--backend-option", "alow=lossy"], "Did you mean 'allow'?"),
    (["--backend", "accel", "--backend-option", "race=maybe"], "race='maybe': not one of 'on', 'off', 'force'"),
    (["--backend", "accel", "--backend-option", "race"], "option 'race' needs a value: race=VALUE"),
    (["--backend-option", "race=off"], "needs --backend NAME"),
    (["--backend", "mlx", "--backend-option", "race=off"], "no meaning with the stock backend"),
    (["--backend", "accel", "--model", "/no/such/model"], "/no/such/model does not exist"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit status and messages of mlx_lm.generate for each of BAD_OPTIONS; one process, which imports mlx-lm once."""
    code = """
import contextlib, importlib, io, json, sys
command = importlib.import_module("mlx_lm.generate")
out = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, messages, status = ["mlx_lm.generate", *arguments], io.StringIO(), 0
    with contextlib.redirect_stderr(messages):
        try:
            command.main()
        except SystemExit as error:
            status = error.code
    out.append((status, messages.getvalue()))
print(json.dumps(out))
"""
    lists = json.dumps([arguments for arguments, _ in BAD_OPTIONS])
    result = run([sys.executable, "-c", code, lists], tmp_path_factory.mktemp("cache"))
    assert result.returncode == 0, result.stderr
    return [(status, text) for status, text in json.loads(result.stdout)]


@pytest.mark.parametrize("i", range(len(BAD_OPTIONS)), ids=[" ".join(arguments) for arguments, _ in BAD_OPTIONS])
def test_bad_options_exit_2_with_one_message(i, refusals) -> None:
    status, text = refusals[i]
    assert status == 2
    assert text.count("error: ") == 1 and BAD_OPTIONS[i][1] in text and "Traceback" not in text


def test_a_bad_option_on_the_real_command(tmp_path) -> None:
    arguments, message = BAD_OPTIONS[0]
    result = run([sys.executable, "-m", "mlx_lm", "generate", *arguments], tmp_path)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_environment_turns_the_backend_on_and_the_command_line_wins(model_dir, tmp_path) -> None:
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", str(model_dir), *GENERATE]
    on = run(command, tmp_path, MLX_ACCEL_BACKEND="accel", MLX_ACCEL_REPORT="json")
    assert on.returncode == 0 and '"decisions"' in on.stderr
    off = run([*command, "--backend", "mlx"], tmp_path, MLX_ACCEL_BACKEND="accel")
    assert off.returncode == 0 and "[accel]" not in off.stderr
    killed = run([*command, "--backend", "accel"], tmp_path, MLX_ACCEL_NO_HOOK="1")
    assert killed.returncode == 2 and "unrecognized arguments: --backend accel" in killed.stderr


def test_environment_serves_programs_that_use_mlx_lm_as_a_library(model_dir, tmp_path) -> None:
    code = f"""
import mlx_lm
m, t = mlx_lm.load({str(model_dir)!r})
print(type(m.layers[0].mlp.up_proj).__mro__[1].__name__)
"""
    on = run([sys.executable, "-c", code], tmp_path, MLX_ACCEL_BACKEND="accel", MLX_ACCEL_DETERMINISTIC="1")
    assert on.returncode == 0 and "[accel] 15 sites" in on.stderr
    off = run([sys.executable, "-c", code], tmp_path)
    assert off.stdout.strip() == "Module" and "[accel]" not in off.stderr


def test_run_is_the_fallback_without_the_hook(model_dir, tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "backend_core",
        "run",
        "mlx_lm.generate",
        "--model",
        str(model_dir),
        *GENERATE,
    ]
    result = run(command, tmp_path, MLX_ACCEL_NO_HOOK="1")
    assert result.returncode == 0, result.stderr
    assert "[accel] 15 sites" in result.stderr
    wrong = run([sys.executable, "-m", "backend_core", "run", "mlx_lm.nothing"], tmp_path)
    assert wrong.returncode == 2 and "there is no module mlx_lm.nothing" in wrong.stderr
    other = run([sys.executable, "-m", "backend_core", "run", "json.tool"], tmp_path)
    assert other.returncode == 2 and "not a command of mlx_lm or mlx_vlm" in other.stderr


def test_commands_that_write_weights_run_stock_and_say_so(model_dir, tmp_path) -> None:
    result = run([sys.executable, "-m", "mlx_lm", "fuse", "--model", str(model_dir), "--backend", "accel",
                  "--adapter-path", "/no/such/adapter", "--save-path", str(tmp_path / "out")], tmp_path)  # fmt: skip
    assert "mlx_lm.fuse trains or rewrites weights: it runs stock" in result.stderr
    assert "sites:" not in result.stderr


def test_parsers_of_other_programs_are_left_alone() -> None:
    from backend_core.integrations import arguments

    arguments.install()
    parser = argparse.ArgumentParser()
    assert vars(parser.parse_args([])) == {}
    with pytest.raises(SystemExit):
        parser.parse_args(["--backend", "accel"])


def test_nothing_is_left_in_the_namespace(tmp_path) -> None:
    code = """
import sys
import mlx_lm
source = '''
import argparse
def parse(argv):
    p = argparse.ArgumentParser(); p.add_argument("--x", default=1)
    return [sorted(vars(p.parse_args(argv))) for _ in range(2)]
'''
import types
module = types.ModuleType("mlx_lm.toy"); module.__package__ = "mlx_lm"
exec(compile(source, "toy", "exec"), module.__dict__)
print(module.parse(["--backend", "mlx"]))
"""
    result = run([sys.executable, "-c", code], tmp_path)
    assert result.stdout.strip() == "[['x'], ['x']]", result.stderr


def test_a_host_with_its_own_backend_option_keeps_it(tmp_path) -> None:
    code = """
import mlx_lm, types
module = types.ModuleType("mlx_lm.toy"); module.__package__ = "mlx_lm"
exec('''
import argparse
def parse(argv):
    p = argparse.ArgumentParser(); p.add_argument("--backend", choices=["theirs"])
    return vars(p.parse_args(argv))
''', module.__dict__)
print(module.parse(["--backend", "theirs"]))
"""
    result = run([sys.executable, "-c", code], tmp_path)
    assert result.stdout.strip() == "{'backend': 'theirs'}", result.stderr
